// Runs the kernel of csrc/delta_rule/chunked.cu block by block.
#include "device.h"
#include "delta_rule/chunked.cuh"

namespace ejkernel::delta_rule {
namespace {

void describe(TensorMap* map, void* numbers, int batch, int rows, int columns, int tile_bytes) {
  const Array own = {static_cast<char*>(numbers), batch, rows, columns * 2, tile_bytes};
  std::memcpy(map, &own, sizeof(own));
  device::arrays.push_back({own.numbers, size_t(batch) * rows * columns * 2});
}

}  // namespace
}  // namespace ejkernel::delta_rule

// What was wrong, or null. Arrays in the order of the handler, then the integers.
extern "C" const char* delta_rule(void** a, const int* n, float scale) {
  using namespace ejkernel::delta_rule;
  device::complaint = nullptr;
  device::arrays.clear();
  DeltaCall call{};
  const int batch = n[0];
  call.tokens = n[1], call.heads = n[2], call.query_heads = n[3], call.key_heads = n[4], call.value_heads = n[5];
  call.value_dim = n[6], call.chunks = (n[1] + kChunkTokens - 1) / kChunkTokens, call.scale = scale;
  call.gates = static_cast<const float*>(a[3]), call.beta = static_cast<const float*>(a[4]);
  call.initial_states = static_cast<const float*>(a[5]), call.final_states = static_cast<float*>(a[7]);
  Maps maps;
  describe(&maps.query, a[0], batch, n[1], n[3] * kKeyDim, 128);
  describe(&maps.key, a[1], batch, n[1], n[4] * kKeyDim, 128);
  describe(&maps.value, a[2], batch, n[1], n[5] * n[6], 128);
  describe(&maps.output, a[6], batch, n[1], n[2] * n[6], 32);
  for (int block = 0; block < batch * call.heads * (call.value_dim / kBlockValues); ++block) {
    device::run_cluster(block, 1, kSharedMemoryBytes, [&] { delta_kernel(call, maps); }, kThreads);
  }
  return device::complaint;
}
