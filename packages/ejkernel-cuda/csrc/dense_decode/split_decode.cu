// The XLA FFI handler of split-KV decode attention.
#include <algorithm>

#include "common/ffi_handler.cuh"
#include "dense_decode/split_decode.cuh"

namespace ejkernel::dense_decode {
namespace {

constexpr HandlerErrors kErrors{"split decode"};

template <int HeadDim, typename T>
ffi::Error launch(cudaStream_t stream, const SplitDecodeParams& call) {
  using S = TileShape<HeadDim, T>;
  const int heads_per_kv_head = call.heads / call.kv_heads;
  const int blocks_per_kv_head = (heads_per_kv_head + kHeadsPerBlock - 1) / kHeadsPerBlock;
  // One axis of the grid, since the others are limited to 65535 blocks.
  const int64_t blocks = int64_t(call.rows) * call.splits * call.kv_heads * blocks_per_kv_head;
  const cudaError_t error = launch_in_order(split_kernel<HeadDim, T>, blocks, S::kWarps * 32, S::kSmemBytes, stream,
      call);
  if (error != cudaSuccess || call.splits == 1) return kErrors.check("launch", error);
  return kErrors.check(
      "merge", launch_early(merge_kernel, int64_t(call.rows) * call.heads, kMergeThreads, 0, stream, call));
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
SplitDecodeParams make_params(const Arguments& a) {
  SplitDecodeParams call{};
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
  call.heads = last_dimension(a.query, 1);
  call.size = last_dimension(a.query);
  call.kv_heads = last_dimension(a.keys, 1);
  call.value_size = last_dimension(a.values);
  // A row's keys are a single page.
  call.pages = 1;
  call.page_size = last_dimension(a.keys, 2);
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
  call.rows_per_sink = sink_rows == 0 ? 1 : call.rows / sink_rows;
  return call;
}

// Whether the arrays' sizes belong to one call: the kernels rely on the shapes and check nothing.
bool shapes_match(const Arguments& a, const SplitDecodeParams& call) {
  const int64_t rows = call.rows, cached = rows * call.page_size * call.kv_heads, heads = rows * call.heads;
  const int64_t split_heads = call.splits > 1 ? call.splits * heads : 0;
  return call.size % 8 == 0 && call.value_size % 8 == 0 && std::max(call.size, call.value_size) <= 256 &&
         call.heads % call.kv_heads == 0 && call.splits >= 1 && call.splits <= kMaxSplits &&
         rows % call.rows_per_sink == 0 && count(a.query) == heads * call.size &&
         count(a.keys) == cached * call.size && count(a.values) == cached * call.value_size &&
         count(a.starts) == rows && count(a.output) == heads * call.value_size && count(a.lse) == heads &&
         count(a.partial) >= split_heads * call.value_size && count(a.statistics) >= split_heads * 2;
}

ffi::Error split_decode(
    cudaStream_t stream, ffi::AnyBuffer query, ffi::AnyBuffer keys, ffi::AnyBuffer values,
    ffi::Buffer<ffi::S32> starts, ffi::Buffer<ffi::S32> ends, ffi::Buffer<ffi::F32> sinks,
    ffi::Result<ffi::AnyBuffer> output, ffi::Result<ffi::Buffer<ffi::F32>> lse,
    ffi::Result<ffi::Buffer<ffi::F32>> partial, ffi::Result<ffi::Buffer<ffi::F32>> statistics, int32_t splits,
    int32_t left, int32_t right, float scale, float cap) {
  const Arguments arrays{query, keys, values,   starts,      ends,   sinks, *output, *lse,
                         *partial, *statistics, splits, left,  right,   scale, cap};
  // Also ensures that `heads` is not 0 in the divisions below.
  if (output->element_count() == 0) return ffi::Error::Success();
  if (query.element_type() != keys.element_type() || query.element_type() != values.element_type()) {
    return kErrors.invalid("query, keys and values differ in dtype");
  }
  const char* const unsupported = "dtype is neither bfloat16 nor float16";
  return dispatch_dtype<__nv_bfloat16, __half>(query.element_type(), kErrors, unsupported, [&](auto number) {
    const SplitDecodeParams call = make_params(arrays);
    if (!shapes_match(arrays, call)) return kErrors.invalid_shapes();
    return dispatch_head_dimension(std::max(call.size, call.value_size), [&](auto size) {
      return launch<size.value, decltype(number)>(stream, call);
    });
  });
}

}  // namespace

EJKERNEL_FFI_HANDLER(ejkernel_split_decode, split_decode, "splits", "left", "right", "scale", "cap");

}  // namespace ejkernel::dense_decode
