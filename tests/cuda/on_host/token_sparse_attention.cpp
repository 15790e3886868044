// Runs the kernel of csrc/token_sparse_attention block by block.
#include "device.h"
#include "token_sparse_attention/latent.cuh"

// What was wrong, or null. Arrays in the order of the handler, absent ones null; then the sizes.
extern "C" const char* latent_sparse(void** a, const int* n, float score_factor) {
  using namespace ejkernel::token_sparse_attention;
  const int batch = n[0], tokens = n[1], heads = n[2], keys = n[3], listed = n[4], splits = n[5];
  LatentCall call{};
  call.query = static_cast<const __nv_bfloat16*>(a[0]), call.key = static_cast<const __nv_bfloat16*>(a[1]);
  call.indices = static_cast<const int*>(a[2]), call.sinks = static_cast<const float*>(a[3]);
  call.output = static_cast<__nv_bfloat16*>(a[4]), call.lse = static_cast<float*>(a[5]);
  call.tokens = tokens, call.heads = heads, call.keys = keys, call.listed = listed, call.splits = splits;
  call.head_tiles = (heads + kHeads - 1) / kHeads;
  call.split_entries = ((listed + kStepKeys - 1) / kStepKeys + splits - 1) / splits * kStepKeys;
  call.items = batch * tokens * call.head_tiles * splits;
  call.score_factor = score_factor;
  device::complaint = nullptr;
  device::arrays = {
      {static_cast<const char*>(a[0]), size_t(batch) * tokens * heads * kRowBytes},
      {static_cast<const char*>(a[1]), size_t(batch) * keys * kRowBytes}};
  if (splits > 1) {
    device::blocks_of_grid = call.items;
    for (int first = 0; first < call.items; first += splits) {
      device::run_cluster(first, splits, sizeof(LatentShared), [&] { latent_kernel<true>(call); }, kThreads);
    }
    return device::complaint;
  }
  // One block fewer than items, so that a block continues with another item.
  device::blocks_of_grid = call.items > 1 ? call.items - 1 : 1;
  for (unsigned block = 0; block < device::blocks_of_grid; ++block) {
    device::run_cluster(block, 1, sizeof(LatentShared), [&] { latent_kernel<false>(call); }, kThreads);
  }
  return device::complaint;
}
