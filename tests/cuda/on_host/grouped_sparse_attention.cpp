// Runs the kernels of grouped attention to listed keys block by block.
#include "device.h"

inline int __popc(unsigned x) { return __builtin_popcount(x); }
inline unsigned __shfl_up_sync(unsigned mask, unsigned value, int lanes) {
  return __float_as_uint(__shfl_up_sync(mask, __uint_as_float(value), lanes));
}
inline unsigned __funnelshift_l(unsigned low, unsigned high, unsigned by) {
  return unsigned((uint64_t(high) << 32 | low) >> (32 - by));
}
inline unsigned __funnelshift_r(unsigned low, unsigned high, unsigned by) {
  return unsigned((uint64_t(high) << 32 | low) >> by);
}
inline unsigned __match_any_sync(unsigned, int value) {
  device::Warp& warp = device::warp();
  warp.values[device::current->index % 32][0] = value;
  warp.barrier.wait();
  unsigned same = 0;
  for (int lane = 0; lane < 32; ++lane) same |= unsigned(warp.values[lane][0] == unsigned(value)) << lane;
  warp.barrier.wait();
  return same;
}
// Threads change at barriers alone.
inline unsigned atomicOr(unsigned* to, unsigned bits) {
  const unsigned before = *to;
  *to |= bits;
  return before;
}
inline void atomicAdd(int* to, int x) { *to += x; }

#include "grouped_sparse_attention/attention.cuh"

// What was wrong, or null. Arrays in the order of the handler, absent ones null; then the sizes.
extern "C" const char* grouped_sparse(void** a, const int* n, float score_factor) {
  using namespace ejkernel::grouped_sparse_attention;
  Call call{};
  call.query = static_cast<const __nv_bfloat16*>(a[0]), call.key = static_cast<const __nv_bfloat16*>(a[1]);
  call.value = static_cast<const __nv_bfloat16*>(a[2]), call.indices = static_cast<const int*>(a[3]);
  call.sinks = static_cast<const float*>(a[4]), call.output = static_cast<__nv_bfloat16*>(a[5]);
  call.lse = static_cast<float*>(a[6]), call.entries = static_cast<uint32_t*>(a[7]);
  call.tiles = static_cast<int*>(a[8]), call.not_finite = static_cast<int*>(a[9]);
  call.any_not_finite = static_cast<int*>(a[10]);
  call.batch = n[0], call.tokens = n[1], call.heads = n[2], call.keys = n[3], call.kv_heads = n[4], call.lists = n[5];
  call.listed = n[6], call.list_tiles = n[7], call.window = n[8];
  call.groups = (call.tokens + kQueries - 1) / kQueries;
  call.items = call.batch * call.kv_heads * call.groups;
  call.score_factor = score_factor;
  device::complaint = nullptr;
  const size_t key_bytes = size_t(call.batch) * call.keys * call.kv_heads * kRowBytes;
  device::arrays = {
      {static_cast<const char*>(a[0]), size_t(call.batch) * call.tokens * call.heads * kRowBytes},
      {static_cast<const char*>(a[1]), key_bytes},
      {static_cast<const char*>(a[2]), key_bytes}};
  device::blocks_of_grid = call.batch * call.lists * call.groups;
  for (unsigned block = 0; block < device::blocks_of_grid; ++block) {
    device::run_cluster(block, 1, list_bytes(call.window), [&] { make_lists_kernel(call); }, kListThreads);
  }
  // One block fewer than items, so that a block continues with another item.
  device::blocks_of_grid = call.items > 1 ? call.items - 1 : 1;
  for (unsigned block = 0; block < device::blocks_of_grid; ++block) {
    device::run_cluster(block, 1, sizeof(Shared), [&] { attention_kernel<false>(call); }, kThreads);
  }
  for (unsigned block = 0; block < device::blocks_of_grid; ++block) {
    device::run_cluster(block, 1, sizeof(Shared), [&] { attention_kernel<true>(call); }, kThreads);
  }
  return device::complaint;
}
