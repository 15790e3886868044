// What the XLA FFI handlers of all families share: errors, shapes and absent arrays, and the choice of a kernel by
// dtype and head dimension.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_runtime.h>

#include <string>
#include <type_traits>

#include "xla/ffi/api/ffi.h"

// Defines the library's symbol of a handler. Handlers only launch kernels and do not synchronise with the host, so XLA
// may capture their calls in a CUDA graph.
#define EJKERNEL_FFI_HANDLER(symbol, function, binding)                                              \
  extern "C" __attribute__((visibility("default"))) XLA_FFI_Error* symbol(XLA_FFI_CallFrame* frame); \
  XLA_FFI_DEFINE_HANDLER_SYMBOL(symbol, function, binding, {xla::ffi::Traits::kCmdBufferCompatible})

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

// Calls `launch` with a number of the listed type that has the dtype; without such a type, the call is invalid.
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

}  // namespace ejkernel
