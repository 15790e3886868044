// Runs the kernels of csrc/selective_scan block by block.
#include <map>

#include "device.h"

inline float4 make_float4(float x, float y, float z, float w) { return {x, y, z, w}; }

namespace device {

// A barrier by its number, of a block's first threads to come.
inline void named_barrier(int number, int threads, bool wait) {
  static std::map<std::pair<const Block*, int>, Barrier> barriers;
  Barrier& barrier = barriers[{current->block, number}];
  barrier.size = threads;
  if (wait) return barrier.wait();
  if (++barrier.count == barrier.size) barrier.count = 0, ++barrier.generation;
}

}  // namespace device

#include "selective_scan/gradient.cuh"

namespace ejkernel::selective_scan {
namespace {

template <typename Tile>
void scan(const SelectiveScan& call) {
  const int warps = call.rows * ((call.channels + Tile::kChannels - 1) / Tile::kChannels);
  for (int block = 0; block < (warps + Tile::kWarps - 1) / Tile::kWarps; ++block) {
    device::run_cluster(block, 1, Tile::kBytes, [&] { scan_kernel<Tile>(call); }, Tile::kWarps * 32);
  }
}

template <typename Tile>
void gradient(const ScanGradient& call) {
  const int items = call.rows * ((call.channels + kGradientChannels - 1) / kGradientChannels);
  for (int block = 0; block < (items + Tile::kWarpgroups - 1) / Tile::kWarpgroups; ++block) {
    device::run_cluster(
        block, 1, Tile::kWarpgroups * Tile::kBytes, [&] { gradient_kernel<Tile>(call); },
        Tile::kWarpgroups * Tile::kThreads);
  }
}

Packing packing_of(void** a, const int* n) {
  return {static_cast<const int*>(a[0]), static_cast<const int*>(a[1]), n[0]};
}

void know(void** a, const int* bytes, int count) {
  device::complaint = nullptr;
  device::arrays.clear();
  for (int i = 0; i < count; ++i) {
    if (a[i]) device::arrays.push_back({static_cast<const char*>(a[i]), size_t(bytes[i])});
  }
}

}  // namespace
}  // namespace ejkernel::selective_scan

// What was wrong, or null. Arrays as the handler takes them, the integers of a call, and the bytes of every array.
extern "C" const char* selective_scan(void** a, const int* n, const int* bytes) {
  using namespace ejkernel::selective_scan;
  know(a, bytes, 11);
  SelectiveScan call{};
  call.x = a[0], call.step = a[1];
  call.decay = static_cast<float*>(a[2]), call.columns = static_cast<float*>(a[3]);
  call.skip = static_cast<float*>(a[4]), call.initial = static_cast<float*>(a[5]);
  call.packing = packing_of(a + 6, n + 6);
  call.output = a[8], call.states = static_cast<float*>(a[9]), call.final = static_cast<float*>(a[10]);
  call.rows = n[0], call.tokens = n[1], call.channels = n[2], call.size = n[3], call.rows_a_map = n[4];
  n[5] > 1 ? scan<ScanTile<float, float, 16, 2, 2>>(call) : scan<ScanTile<float, float, 16, 1, 1>>(call);
  return device::complaint;
}

extern "C" const char* selective_scan_gradient(void** a, const int* n, const int* bytes) {
  using namespace ejkernel::selective_scan;
  know(a, bytes, 16);
  ScanGradient call{};
  call.x = a[0], call.step = a[1];
  call.decay = static_cast<float*>(a[2]), call.columns = static_cast<float*>(a[3]);
  call.skip = static_cast<float*>(a[4]), call.states = static_cast<float*>(a[5]);
  call.cotangent = a[6], call.behind = static_cast<float*>(a[7]);
  call.packing = packing_of(a + 8, n + 6);
  call.dx = a[10], call.dstep = a[11], call.partial = static_cast<float*>(a[12]);
  call.ddecay = static_cast<float*>(a[13]), call.dskip = static_cast<float*>(a[14]);
  call.dfirst = static_cast<float*>(a[15]);
  call.rows = n[0], call.tokens = n[1], call.channels = n[2], call.size = n[3], call.rows_a_map = n[4];
  n[5] > 1 ? gradient<GradientTile<float, float, 2>>(call) : gradient<GradientTile<float, float, 1>>(call);
  return device::complaint;
}
