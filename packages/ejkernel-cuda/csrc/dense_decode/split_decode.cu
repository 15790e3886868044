// The XLA FFI handler of split-KV decode attention.
#include <algorithm>
#include <string>

#include "dense_decode/split_decode.cuh"
#include "xla/ffi/api/ffi.h"

namespace ffi = xla::ffi;

namespace ejkernel::dense_decode {
namespace {

ffi::Error failed(const char* what, cudaError_t error) {
  return ffi::Error::Internal(std::string("ejkernel split decode: ") + what + ": " + cudaGetErrorString(error));
}

template <int Size, typename T>
ffi::Error launch(cudaStream_t stream, const SplitDecode& call) {
  using S = Shape<Size, T>;
  const int group = call.heads / call.kv_heads, parts = (group + kHeads - 1) / kHeads;
  // One axis of the grid, since the others are limited to 65535 blocks.
  const int64_t blocks = int64_t(call.rows) * call.splits * call.kv_heads * parts;
  // More than 48 KiB must be requested per device and process, so it is requested at each launch.
  cudaError_t error =
      cudaFuncSetAttribute(split_kernel<Size, T>, cudaFuncAttributeMaxDynamicSharedMemorySize, S::kBytes);
  if (error != cudaSuccess) return failed("shared memory", error);
  split_kernel<Size, T><<<blocks, S::kWarps * 32, S::kBytes, stream>>>(call);
  if ((error = cudaGetLastError()) != cudaSuccess) return failed("launch", error);
  if (call.splits > 1) {
    error = launch_early(merge_kernel, int64_t(call.rows) * call.heads, kMergeThreads, 0, stream, call);
    if (error != cudaSuccess) return failed("merge", error);
  }
  return ffi::Error::Success();
}

template <typename T>
ffi::Error launch_for_size(cudaStream_t stream, const SplitDecode& call) {
  // Head dimensions are padded with zeros in shared memory to one of three sizes, the same for keys and values.
  const int size = std::max(call.size, call.value_size);
  if (size <= 64) return launch<64, T>(stream, call);
  if (size <= 128) return launch<128, T>(stream, call);
  return launch<256, T>(stream, call);
}

struct Arguments {
  ffi::AnyBuffer query, keys, values;
  ffi::Buffer<ffi::S32> starts, ends;
  ffi::Buffer<ffi::F32> sinks;
  ffi::AnyBuffer output;
  ffi::Buffer<ffi::F32> lse, partial, statistics;
  int32_t splits, left, right;
  float scale, cap;
};

// Builds the record of a call. Extra leading axes, which jax.vmap adds to all arrays alike, count as more rows.
SplitDecode decode_call(const Arguments& a) {
  const auto query = a.query.dimensions(), keys = a.keys.dimensions(), values = a.values.dimensions();
  SplitDecode call{};
  call.query = a.query.untyped_data();
  call.keys = static_cast<const unsigned char*>(a.keys.untyped_data());
  call.values = static_cast<const unsigned char*>(a.values.untyped_data());
  call.starts = a.starts.typed_data();
  call.ends = a.ends.typed_data();
  call.output = a.output.untyped_data();
  call.lse = a.lse.typed_data();
  call.partial = a.partial.typed_data();
  call.statistics = a.statistics.typed_data();
  call.rows = a.ends.element_count();
  call.heads = query[query.size() - 2];
  call.size = query[query.size() - 1];
  call.kv_heads = keys[keys.size() - 2];
  call.value_size = values[values.size() - 1];
  // A row's keys are a single page.
  call.pages = 1;
  call.page_size = keys[keys.size() - 3];
  const auto strides = [&](int size) {
    const uint32_t head = size / 8, slot = call.kv_heads * head;
    return Strides{call.page_size * slot, slot, head};
  };
  call.key_strides = strides(call.size);
  call.value_strides = strides(call.value_size);
  call.splits = a.splits;
  call.left = a.left;
  call.right = a.right;
  call.scale = a.scale;
  call.cap = a.cap;
  call.value_scale = 1.f;
  call.bfloat16 = a.query.element_type() == ffi::BF16;
  // jax.vmap may batch sinks like all arrays: each row of sinks then belongs to the rows of one batch element.
  const int sink_rows = a.sinks.element_count() / call.heads;
  call.sinks = sink_rows == 0 ? nullptr : a.sinks.typed_data();
  call.rows_a_sink = sink_rows == 0 ? 1 : call.rows / sink_rows;
  return call;
}

// Whether the arrays' sizes belong to one call: the kernels rely on the shapes and check nothing.
bool consistent(const Arguments& a, const SplitDecode& call) {
  const int64_t rows = call.rows, cached = rows * call.page_size * call.kv_heads, heads = rows * call.heads;
  const int64_t split_heads = call.splits > 1 ? call.splits * heads : 0;
  return call.size % 8 == 0 && call.value_size % 8 == 0 && std::max(call.size, call.value_size) <= 256 &&
         call.heads % call.kv_heads == 0 && call.splits >= 1 && call.splits <= kMostSplits &&
         rows % call.rows_a_sink == 0 && a.query.element_count() == size_t(heads * call.size) &&
         a.keys.element_count() == size_t(cached * call.size) &&
         a.values.element_count() == size_t(cached * call.value_size) && a.starts.element_count() == size_t(rows) &&
         a.output.element_count() == size_t(heads * call.value_size) && a.lse.element_count() == size_t(heads) &&
         a.partial.element_count() >= size_t(split_heads * call.value_size) &&
         a.statistics.element_count() >= size_t(split_heads * 2);
}

template <typename T>
ffi::Error run(cudaStream_t stream, const Arguments& arguments) {
  const SplitDecode call = decode_call(arguments);
  if (!consistent(arguments, call)) {
    return ffi::Error::InvalidArgument("ejkernel split decode: the shapes of the arrays do not belong together");
  }
  return launch_for_size<T>(stream, call);
}

ffi::Error split_decode(
    cudaStream_t stream, ffi::AnyBuffer query, ffi::AnyBuffer keys, ffi::AnyBuffer values,
    ffi::Buffer<ffi::S32> starts, ffi::Buffer<ffi::S32> ends, ffi::Buffer<ffi::F32> sinks,
    ffi::Result<ffi::AnyBuffer> output, ffi::Result<ffi::Buffer<ffi::F32>> lse,
    ffi::Result<ffi::Buffer<ffi::F32>> partial, ffi::Result<ffi::Buffer<ffi::F32>> statistics, int32_t splits,
    int32_t left, int32_t right, float scale, float cap) {
  const Arguments arguments{query, keys, values,   starts,      ends,   sinks, *output, *lse,
                            *partial, *statistics, splits, left,  right,   scale, cap};
  // Also ensures that `heads` is not 0 in the divisions below.
  if (output->element_count() == 0) return ffi::Error::Success();
  if (query.element_type() != keys.element_type() || query.element_type() != values.element_type()) {
    return ffi::Error::InvalidArgument("ejkernel split decode: query, keys and values differ in dtype");
  }
  switch (query.element_type()) {
    case ffi::BF16: return run<__nv_bfloat16>(stream, arguments);
    case ffi::F16: return run<__half>(stream, arguments);
    default: return ffi::Error::InvalidArgument("ejkernel split decode: dtype is neither bfloat16 nor float16");
  }
}

}  // namespace
}  // namespace ejkernel::dense_decode

// A symbol that the library exports.
extern "C" __attribute__((visibility("default"))) XLA_FFI_Error* ejkernel_split_decode(XLA_FFI_CallFrame* frame);

XLA_FFI_DEFINE_HANDLER_SYMBOL(
    ejkernel_split_decode, ejkernel::dense_decode::split_decode,
    ffi::Ffi::Bind()
        .Ctx<ffi::PlatformStream<cudaStream_t>>()
        .Arg<ffi::AnyBuffer>()
        .Arg<ffi::AnyBuffer>()
        .Arg<ffi::AnyBuffer>()
        .Arg<ffi::Buffer<ffi::S32>>()
        .Arg<ffi::Buffer<ffi::S32>>()
        .Arg<ffi::Buffer<ffi::F32>>()
        .Ret<ffi::AnyBuffer>()
        .Ret<ffi::Buffer<ffi::F32>>()
        .Ret<ffi::Buffer<ffi::F32>>()
        .Ret<ffi::Buffer<ffi::F32>>()
        .Attr<int32_t>("splits")
        .Attr<int32_t>("left")
        .Attr<int32_t>("right")
        .Attr<float>("scale")
        .Attr<float>("cap"),
    // Only kernel launches and no host synchronisation: XLA may capture the call in a CUDA graph.
    {ffi::Traits::kCmdBufferCompatible});
