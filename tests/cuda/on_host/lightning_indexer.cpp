// Runs the kernels of csrc/lightning_indexer block by block.
#include "device.h"
#include "lightning_indexer/scores.cuh"
#include "lightning_indexer/select.cuh"

namespace ejkernel::lightning_indexer {
namespace {

void describe(TensorMap* map, const void* matrix, int64_t rows, int tile_rows) {
  const Matrix own = {static_cast<const char*>(matrix), int(rows), kChannels, tile_rows, kChannels, 1};
  std::memcpy(map, &own, sizeof(own));
}

template <int Heads>
void launch(ScoresCall& call, int batch, bool rectify) {
  constexpr int kQueries = kColumns / Heads;
  call.groups = (call.tokens + kQueries - 1) / kQueries;
  call.splits = (call.keys + call.split_keys - 1) / call.split_keys;
  call.items = batch * call.groups * call.splits;
  // One block fewer than items, so that a block continues with another item.
  device::blocks_of_grid = call.items > 1 ? call.items - 1 : 1;
  for (unsigned block = 0; block < device::blocks_of_grid; ++block) {
    const auto kernel = [&] { rectify ? scores_kernel<Heads, true>(call) : scores_kernel<Heads, false>(call); };
    device::run_cluster(block, 1, sizeof(ScoresShared), kernel, kThreads);
  }
}

}  // namespace
}  // namespace ejkernel::lightning_indexer

// What was wrong, or null. Arrays in the order of the handler, absent ones null; then the sizes.
extern "C" const char* indexer_scores(void** a, const int* n) {
  using namespace ejkernel::lightning_indexer;
  const int batch = n[0], heads = n[2];
  ScoresCall call{};
  call.tokens = n[1], call.keys = n[3], call.pitch = n[4], call.split_keys = n[5];
  const int64_t rows = int64_t(batch) * call.tokens * heads;
  describe(&call.query, a[0], rows, kColumns);
  describe(&call.key, a[1], int64_t(batch) * call.keys, kStepKeys);
  call.weights = static_cast<const float*>(a[2]);
  call.key_starts = static_cast<const int*>(a[3]), call.key_ends = static_cast<const int*>(a[4]);
  call.key_scales = static_cast<const float*>(a[5]), call.ordered_scores = static_cast<int*>(a[6]);
  device::complaint = nullptr;
  device::arrays = {{static_cast<const char*>(a[0]), size_t(rows) * kChannels},
                    {static_cast<const char*>(a[1]), size_t(batch) * call.keys * kChannels},
                    {static_cast<const char*>(a[2]), size_t(rows) * 4}};
  heads == 64 ? launch<64>(call, batch, n[6]) : launch<32>(call, batch, n[6]);
  return device::complaint;
}

// The same of the selection.
extern "C" const char* indexer_select(void** a, const int* n) {
  using namespace ejkernel::lightning_indexer;
  SelectCall call{};
  call.ordered_scores = static_cast<const int*>(a[0]);
  call.key_starts = static_cast<const int*>(a[1]), call.key_ends = static_cast<const int*>(a[2]);
  call.indices = static_cast<int*>(a[3]), call.scores = static_cast<float*>(a[4]);
  const int rows = n[0];
  call.pitch = n[1], call.top_k = n[2], call.capacity = n[3];
  device::complaint = nullptr;
  for (int row = 0; row < rows; ++row) {
    const size_t bytes = sizeof(SelectShared) + call.capacity * sizeof(uint64_t);
    const auto kernel = [&] { call.top_k <= 2048 ? select_kernel<kFewSlots>(call) : select_kernel<kManySlots>(call); };
    device::run_cluster(row, 1, bytes, kernel, kSelectThreads);
  }
  return device::complaint;
}
