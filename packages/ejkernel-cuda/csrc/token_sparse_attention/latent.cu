// The XLA FFI handler of latent attention to listed keys.
#include "common/ffi_handler.cuh"
#include "token_sparse_attention/latent.cuh"

namespace ejkernel::token_sparse_attention {
namespace {

constexpr HandlerErrors kErrors{"token-sparse latent attention"};

ffi::Error latent(
    cudaStream_t stream, ffi::Buffer<ffi::BF16> query, ffi::Buffer<ffi::BF16> key, ffi::Buffer<ffi::S32> indices,
    ffi::Buffer<ffi::F32> sinks, ffi::ResultBuffer<ffi::BF16> output, ffi::ResultBuffer<ffi::F32> lse,
    int32_t splits, float score_factor) {
  if (query.element_count() == 0) return ffi::Error::Success();
  LatentCall call;
  call.query = static_cast<const __nv_bfloat16*>(query.untyped_data());
  call.key = static_cast<const __nv_bfloat16*>(key.untyped_data());
  call.indices = indices.typed_data();
  call.sinks = data_or_null(sinks);
  call.output = static_cast<__nv_bfloat16*>(output->untyped_data());
  call.lse = lse->typed_data();
  call.heads = last_dimension(query, 1);
  call.tokens = last_dimension(query, 2);
  call.keys = last_dimension(key, 2);
  call.listed = last_dimension(indices);
  call.head_tiles = (call.heads + kHeads - 1) / kHeads;
  call.splits = splits;
  call.score_factor = score_factor;
  const int64_t heads = count(query) / kRowSize, rows = heads / call.heads, batch = rows / call.tokens;
  // The kernel relies on the shapes and checks nothing.
  if (last_dimension(query) != kRowSize || last_dimension(key) != kRowSize || last_dimension(key, 1) != 1 ||
      splits < 1 || splits > kMostSplits || score_factor <= 0 || count(key) != batch * call.keys * kRowSize ||
      count(indices) != rows * call.listed || (call.sinks && count(sinks) != batch * call.heads) ||
      count(*output) != heads * kValueSize || count(*lse) != heads) {
    return kErrors.invalid_shapes();
  }
  const int steps = (call.listed + kStepKeys - 1) / kStepKeys;
  call.split_entries = (steps + splits - 1) / splits * kStepKeys;
  const int64_t items = rows * call.head_tiles * splits;
  if (items > INT32_MAX) return kErrors.invalid("the kernel has at most 2 ** 31 - 1 blocks");
  call.items = static_cast<int>(items);
  if (splits > 1) {
    const int clusters = static_cast<int>(items / splits);
    return kErrors.check(
        "launch", launch_clusters(latent_kernel<true>, clusters, splits, kThreads, sizeof(LatentShared),
                                  stream, call));
  }
  int device = 0, multiprocessors = 0;
  cudaError_t error = cudaGetDevice(&device);
  if (error == cudaSuccess) {
    error = cudaDeviceGetAttribute(&multiprocessors, cudaDevAttrMultiProcessorCount, device);
  }
  if (error != cudaSuccess) return kErrors.check("device", error);
  // A block fills a multiprocessor; it copies keys of its next item while it ends one.
  const int64_t blocks = items < multiprocessors ? items : multiprocessors;
  return kErrors.check("launch", launch_in_order(latent_kernel<false>, blocks, kThreads, sizeof(LatentShared),
                                                 stream, call));
}

}  // namespace

EJKERNEL_FFI_HANDLER(ejkernel_latent_sparse, latent, "splits", "score_factor");

}  // namespace ejkernel::token_sparse_attention
