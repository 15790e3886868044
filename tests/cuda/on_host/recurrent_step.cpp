// Runs the kernels of csrc/recurrent_step/recurrent_step.cu block by block.
#include "device.h"
#include "recurrent_step/channel_step.cuh"
#include "recurrent_step/tree_step.cuh"

namespace ejkernel::recurrent_step {
namespace {

template <int K, int W, bool kDelta, bool kTransposed>
void launch_blocks(const RecurrentStep& call) {
  constexpr size_t kShared = StagedState<K, W, kTransposed>::kBytes;
  for (unsigned block = 0; block < count_items(call) / (W / 32); ++block) {
    device::run_cluster(block, 1, kShared, [&] { step_kernel<__nv_bfloat16, K, W, kDelta, kTransposed>(call); }, W);
  }
}

template <int K, bool kDelta, bool kTransposed>
void launch_for_heads(const RecurrentStep& call) {
  if (call.parents == nullptr) {
    if constexpr (!kTransposed) {
      if (call.values % 128 == 0) return launch_blocks<K, 128, kDelta, false>(call);
      if (call.values % 64 == 0) return launch_blocks<K, 64, kDelta, false>(call);
    }
    return launch_blocks<K, 32, kDelta, kTransposed>(call);
  }
  for (unsigned block = 0; block < count_items(call); ++block) {
    device::run_cluster(block, 1, 0, [&] { tree_kernel<__nv_bfloat16, K, kDelta, kTransposed>(call); }, 32);
  }
}

template <int K, bool kDelta>
void launch_for_channels(const RecurrentStep& call) {
  for (unsigned block = 0; block < count_items(call) / kStepWarps; ++block) {
    device::run_cluster(block, 1, channel_shared_bytes<K>(), [&] { channel_kernel<__nv_bfloat16, K, kDelta>(call); });
  }
}

template <int K>
void run(const RecurrentStep& call, bool channels, bool transposed) {
  const bool delta = call.beta.data != nullptr;
  if (transposed) return launch_for_heads<K, false, true>(call);
  if (channels) return delta ? launch_for_channels<K, true>(call) : launch_for_channels<K, false>(call);
  return delta ? launch_for_heads<K, true, false>(call) : launch_for_heads<K, false, false>(call);
}

}  // namespace
}  // namespace ejkernel::recurrent_step

// What was wrong, or null. Arrays in the order of the record and their bytes, then the integers.
extern "C" const char* recurrent_step(void** a, const int* bytes, const int* n, float scale) {
  using namespace ejkernel::recurrent_step;
  device::complaint = nullptr;
  device::arrays.clear();
  for (int i = 0; i < 13; ++i) device::arrays.push_back({static_cast<const char*>(a[i]), bytes[i]});
  RecurrentStep call{};
  call.query = a[0], call.key = a[1], call.value = a[2];
  Numbers* numbers[] = {&call.decay, &call.beta, &call.dt, &call.skip};
  for (int i = 0; i < 4; ++i) *numbers[i] = {a[3 + i], n[12 + 3 * i], n[13 + 3 * i], bool(n[14 + 3 * i])};
  call.bounds = static_cast<const int*>(a[7]), call.slots = static_cast<const int*>(a[8]);
  call.parents = static_cast<const int*>(a[12]);
  call.initial = static_cast<const float*>(a[9]), call.final = static_cast<float*>(a[10]), call.output = a[11];
  call.rows = n[0], call.tokens = n[1], call.sequences = n[2], call.heads = n[3];
  call.query_heads = n[4], call.key_heads = n[5], call.value_heads = n[6];
  call.a_query = n[3] / n[4], call.a_key = n[3] / n[5], call.a_value = n[3] / n[6];
  call.values = n[7], call.slot_count = n[8], call.scale = scale;
  const bool channels = n[10], transposed = n[11];
  n[9] == 64 ? run<64>(call, channels, transposed) : run<128>(call, channels, transposed);
  return device::complaint;
}
