// The XLA FFI handler of grouped attention to listed keys.
#include "common/dependent_launch.cuh"
#include "common/ffi_handler.cuh"
#include "grouped_sparse_attention/attention.cuh"

namespace ejkernel::grouped_sparse_attention {
namespace {

constexpr HandlerErrors kErrors{"token-sparse grouped attention"};
constexpr int kMostWindow = 131072;  // keys whose bits, of eight queries, are 128 KiB

using S32 = ffi::Buffer<ffi::S32>;

ffi::Error attention(
    cudaStream_t stream, ffi::Buffer<ffi::BF16> query, ffi::Buffer<ffi::BF16> key, ffi::Buffer<ffi::BF16> value,
    S32 indices, ffi::Buffer<ffi::F32> sinks, ffi::ResultBuffer<ffi::BF16> output, ffi::ResultBuffer<ffi::F32> lse,
    ffi::Result<S32> entries, ffi::Result<S32> tiles, ffi::Result<S32> not_finite, ffi::Result<S32> any_not_finite,
    float score_factor) {
  if (query.element_count() == 0) return ffi::Error::Success();
  Call call;
  call.query = static_cast<const __nv_bfloat16*>(query.untyped_data());
  call.key = static_cast<const __nv_bfloat16*>(key.untyped_data());
  call.value = static_cast<const __nv_bfloat16*>(value.untyped_data());
  call.indices = indices.typed_data();
  call.sinks = data_or_null(sinks);
  call.output = static_cast<__nv_bfloat16*>(output->untyped_data());
  call.lse = lse->typed_data();
  call.entries = reinterpret_cast<uint32_t*>(entries->typed_data());
  call.tiles = tiles->typed_data();
  call.not_finite = not_finite->typed_data();
  call.any_not_finite = any_not_finite->typed_data();
  call.heads = last_dimension(query, 1), call.tokens = last_dimension(query, 2);
  call.kv_heads = last_dimension(key, 1), call.keys = last_dimension(key, 2);
  call.listed = last_dimension(indices), call.lists = last_dimension(indices, 1);
  call.groups = (call.tokens + kQueries - 1) / kQueries;
  call.list_tiles = last_dimension(*entries, 1);
  call.score_factor = score_factor;
  const int64_t rows = count(query) / kSize / call.heads, batch = rows / call.tokens;
  const int64_t items = batch * call.kv_heads * call.groups, lists = batch * call.lists * call.groups;
  // The kernels rely on the shapes and check nothing.
  if (last_dimension(query) != kSize || last_dimension(key) != kSize || last_dimension(value) != kSize ||
      call.heads % call.kv_heads || call.heads / call.kv_heads > kHeads || call.keys > kMostKeys || score_factor <= 0 ||
      count(key) != batch * call.keys * call.kv_heads * kSize || count(value) != count(key) ||
      (call.lists != 1 && call.lists != call.kv_heads) || count(indices) != rows * call.lists * call.listed ||
      (call.sinks && count(sinks) != batch * call.heads) || count(*output) != count(query) ||
      count(*lse) != rows * call.heads || last_dimension(*entries) != kKeys ||
      call.list_tiles < kQueries * ((call.listed + kKeys - 1) / kKeys) + 3 + kQueries ||
      count(*entries) != lists * call.list_tiles * kKeys || count(*tiles) != lists || count(*not_finite) != items ||
      count(*any_not_finite) < 1) {
    return kErrors.invalid_shapes();
  }
  if (items > INT32_MAX || lists > INT32_MAX) return kErrors.invalid("the kernel has at most 2 ** 31 - 1 blocks");
  call.items = static_cast<int>(items);
  call.batch = static_cast<int>(batch);
  call.window = (call.keys < kMostWindow ? call.keys + 31 : kMostWindow) / 32 * 32;
  cudaError_t error = launch_in_order(make_lists_kernel, lists, kListThreads, list_bytes(call.window), stream, call);
  if (error != cudaSuccess) return kErrors.check("lists", error);
  int device = 0, multiprocessors = 0;
  error = cudaGetDevice(&device);
  if (error == cudaSuccess) {
    error = cudaDeviceGetAttribute(&multiprocessors, cudaDevAttrMultiProcessorCount, device);
  }
  if (error != cudaSuccess) return kErrors.check("device", error);
  const int64_t blocks = items < multiprocessors ? items : multiprocessors;  // a block fills a multiprocessor
  error = launch_in_order(attention_kernel<false>, blocks, kThreads, sizeof(Shared), stream, call);
  if (error != cudaSuccess) return kErrors.check("launch", error);
  return kErrors.check(
      "second launch", launch_in_order(attention_kernel<true>, blocks, kThreads, sizeof(Shared), stream, call));
}

}  // namespace

// Defined without the trait that lets XLA capture calls into CUDA graphs: the kernels of a call pass lists to each
// other in results that nothing else reads. By XLA's rules such results are safe scratch memory in a graph, too
// (docs/lab/cuda_graphs.md), but no call in a graph has been measured.
extern "C" __attribute__((visibility("default"))) XLA_FFI_Error* ejkernel_grouped_sparse(XLA_FFI_CallFrame* frame);
XLA_FFI_DEFINE_HANDLER_SYMBOL(ejkernel_grouped_sparse, attention, ejkernel::bind(attention, {"score_factor"}));

}  // namespace ejkernel::grouped_sparse_attention
