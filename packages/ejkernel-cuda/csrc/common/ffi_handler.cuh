// What the XLA FFI handlers of all families share: errors, shapes and absent arrays, and the choice of a kernel by
// dtype and head dimension.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_runtime.h>

#include <initializer_list>
#include <string>
#include <type_traits>
#include <utility>

#include "xla/ffi/api/ffi.h"

// Defines the library's symbol of a handler, from its function and the names of its attributes, in order. Handlers only
// launch kernels and do not synchronise with the host, so XLA may capture their calls in a CUDA graph.
#define EJKERNEL_FFI_HANDLER(symbol, function, ...)                                                  \
  extern "C" __attribute__((visibility("default"))) XLA_FFI_Error* symbol(XLA_FFI_CallFrame* frame); \
  XLA_FFI_DEFINE_HANDLER_SYMBOL(                                                                     \
      symbol, function, ejkernel::bind(function, {__VA_ARGS__}), {xla::ffi::Traits::kCmdBufferCompatible})

namespace ejkernel {

namespace ffi = xla::ffi;

// The errors of one handler, which name it.
struct HandlerErrors {
  const char* handler;

  ffi::Error invalid(const char* what) const { return ffi::Error::InvalidArgument(message(what)); }
  ffi::Error invalid_shapes() const { return invalid("the shapes of the arrays do not belong together"); }
  ffi::Error internal(const char* step, const char* what) const {
    return ffi::Error::Internal(message(step) + ": " + what);
  }
  // Success, unless a step has failed.
  ffi::Error check(const char* step, cudaError_t error) const {
    return error == cudaSuccess ? ffi::Error::Success() : internal(step, cudaGetErrorString(error));
  }

 private:
  std::string message(const char* what) const { return std::string("ejkernel ") + handler + ": " + what; }
};

template <typename Buffer>
int64_t count(const Buffer& buffer) {
  return static_cast<int64_t>(buffer.element_count());
}

// A dimension, counted from the last one: jax.vmap adds leading ones to all arrays alike.
template <typename Buffer>
int64_t last_dimension(const Buffer& buffer, int from_last = 0) {
  const auto shape = buffer.dimensions();
  return shape[shape.size() - 1 - from_last];
}

// The data of an optional array, which is absent if it has no elements.
template <ffi::DataType dtype>
auto data_or_null(const ffi::Buffer<dtype>& buffer) -> decltype(buffer.typed_data()) {
  return buffer.element_count() == 0 ? nullptr : buffer.typed_data();
}

template <typename T>
constexpr ffi::DataType kDtype = ffi::DataType::INVALID;
template <>
constexpr ffi::DataType kDtype<__nv_bfloat16> = ffi::BF16;
template <>
constexpr ffi::DataType kDtype<__half> = ffi::F16;
template <>
constexpr ffi::DataType kDtype<float> = ffi::F32;

// Calls `launch` with a value of that type, of those listed, which has the dtype; if none has, the call is invalid.
template <typename T, typename... Others, typename Launch>
ffi::Error dispatch_dtype(ffi::DataType dtype, const HandlerErrors& errors, const char* unsupported, Launch launch) {
  if (dtype == kDtype<T>) return launch(T{});
  if constexpr (sizeof...(Others) > 0) {
    return dispatch_dtype<Others...>(dtype, errors, unsupported, launch);
  } else {
    return errors.invalid(unsupported);
  }
}

// Calls `launch` with the head dimension that a kernel is compiled for. Smaller ones are padded with zeros in shared
// memory, for keys and values alike: one shape of tile each.
template <typename Launch>
auto dispatch_head_dimension(int size, Launch launch) {
  if (size <= 64) return launch(std::integral_constant<int, 64>{});
  if (size <= 128) return launch(std::integral_constant<int, 128>{});
  return launch(std::integral_constant<int, 256>{});
}

template <typename T>
constexpr bool kIsResult = false;
template <typename Buffer>
constexpr bool kIsResult<ffi::Result<Buffer>> = true;
template <typename T>
constexpr bool kIsOperand = std::is_same_v<T, ffi::AnyBuffer>;
template <ffi::DataType dtype>
constexpr bool kIsOperand<ffi::Buffer<dtype>> = true;

// Binds a parameter of a handler by its type; of an attribute, the name is next in the list.
template <typename T, typename Binding>
auto bind_parameter(Binding&& binding, const char* const*& attribute) {
  if constexpr (std::is_same_v<T, cudaStream_t>) {
    return std::move(binding).template Ctx<ffi::PlatformStream<cudaStream_t>>();
  } else if constexpr (std::is_same_v<T, ffi::RemainingArgs>) {
    return std::move(binding).RemainingArgs();
  } else if constexpr (std::is_same_v<T, ffi::RemainingRets>) {
    return std::move(binding).RemainingRets();
  } else if constexpr (kIsOperand<T>) {
    return std::move(binding).template Arg<T>();
  } else if constexpr (kIsResult<T>) {
    return std::move(binding).template Ret<std::decay_t<decltype(*std::declval<T&>())>>();
  } else {
    return std::move(binding).template Attr<T>(*attribute++);
  }
}

// Binds the parameters of a handler in order. A binding can be neither copied nor moved, so that each is a temporary.
template <typename T, typename... Others, typename Binding>
auto bind_parameters(Binding&& binding, const char* const*& attribute) {
  if constexpr (sizeof...(Others) == 0) {
    return bind_parameter<T>(std::move(binding), attribute);
  } else {
    return bind_parameters<Others...>(bind_parameter<T>(std::move(binding), attribute), attribute);
  }
}

template <typename... Parameters>
auto bind(ffi::Error (*)(Parameters...), std::initializer_list<const char*> attributes) {
  const char* const* attribute = attributes.begin();
  return bind_parameters<Parameters...>(ffi::Ffi::Bind(), attribute);
}

}  // namespace ejkernel
