// The XLA FFI handler of the indexer's scores.
#include "common/dependent_launch.cuh"
#include "common/ffi_handler.cuh"
#include "common/tensor_map.cuh"
#include "lightning_indexer/scores.cuh"

namespace ejkernel::lightning_indexer {
namespace {

constexpr HandlerErrors kErrors{"lightning indexer scores"};

using F32 = ffi::Buffer<ffi::F32>;
using S32 = ffi::Buffer<ffi::S32>;

template <int Heads>
ffi::Error launch(cudaStream_t stream, ScoresCall& call, int64_t batch, bool rectify) {
  constexpr int kQueries = kColumns / Heads;
  call.groups = (call.tokens + kQueries - 1) / kQueries;
  call.splits = (call.keys + call.split_keys - 1) / call.split_keys;
  const int64_t items = batch * call.groups * call.splits;
  if (items > INT32_MAX) return kErrors.invalid("the kernel has at most 2 ** 31 - 1 items");
  call.items = static_cast<int>(items);
  int device = 0, multiprocessors = 0;
  cudaError_t error = cudaGetDevice(&device);
  if (error == cudaSuccess) error = cudaDeviceGetAttribute(&multiprocessors, cudaDevAttrMultiProcessorCount, device);
  if (error != cudaSuccess) return kErrors.check("device", error);
  const int64_t blocks = items < multiprocessors ? items : multiprocessors;  // a block fills a multiprocessor
  const auto kernel = rectify ? scores_kernel<Heads, true> : scores_kernel<Heads, false>;
  return kErrors.check("launch", launch_in_order(kernel, blocks, kThreads, sizeof(ScoresShared), stream, call));
}

ffi::Error scores(cudaStream_t stream, ffi::AnyBuffer query, ffi::AnyBuffer key, F32 weights, S32 key_starts, S32 key_ends, F32 key_scales,
                  ffi::Result<S32> ordered_scores, int32_t split_keys, bool rectify) {
  if (ordered_scores->element_count() == 0) return ffi::Error::Success();
  ScoresCall call;
  call.weights = weights.typed_data();
  call.key_starts = key_starts.typed_data();
  call.key_ends = key_ends.typed_data();
  call.key_scales = data_or_null(key_scales);
  call.ordered_scores = ordered_scores->typed_data();
  call.tokens = last_dimension(query, 2);
  call.keys = last_dimension(key, 1);
  call.pitch = last_dimension(*ordered_scores);
  call.split_keys = split_keys;
  const int64_t heads = last_dimension(query, 1), rows = count(query) / kChannels, tokens = rows / heads;
  const int64_t batch = tokens / call.tokens, keys = batch * call.keys;
  if (query.element_type() != ffi::F8E4M3FN || key.element_type() != ffi::F8E4M3FN) {
    return kErrors.invalid("queries and keys must be float8_e4m3fn");
  }
  // The kernel relies on the shapes and checks nothing.
  if (last_dimension(query) != kChannels || last_dimension(key) != kChannels || count(key) != keys * kChannels ||
      count(weights) != rows || count(key_starts) != tokens || count(key_ends) != tokens ||
      (call.key_scales && count(key_scales) != keys) || call.pitch != (call.keys + 3) / 4 * 4 ||
      count(*ordered_scores) != tokens * call.pitch || split_keys < 1 || split_keys % kStepKeys) {
    return kErrors.invalid_shapes();
  }
  if (rows > INT32_MAX || keys > INT32_MAX) return kErrors.invalid("arrays have at most 2 ** 31 - 1 rows");
  const auto form = [](int64_t rows, int tile) {
    return Described{CU_TENSOR_MAP_DATA_TYPE_UINT8, 1, int(rows), kChannels, tile, kChannels, CU_TENSOR_MAP_SWIZZLE_128B};
  };
  const char* wrong = describe(&call.query, query.untyped_data(), form(rows, kColumns));
  if (!wrong) wrong = describe(&call.key, key.untyped_data(), form(keys, kStepKeys));
  if (wrong) return kErrors.internal("tensor map", wrong);
  if (heads == 64) return launch<64>(stream, call, batch, rectify);
  if (heads == 32) return launch<32>(stream, call, batch, rectify);
  return kErrors.invalid("the kernel is compiled for 32 and 64 heads");
}

}  // namespace

EJKERNEL_FFI_HANDLER(ejkernel_indexer_scores, scores, "split_keys", "rectify");

}  // namespace ejkernel::lightning_indexer
