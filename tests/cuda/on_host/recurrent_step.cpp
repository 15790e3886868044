// Runs the kernels of csrc/recurrent_step/recurrent_step.cu block by block.
#include "device.h"
#include "recurrent_step/recurrent_step.cuh"

namespace ejkernel::recurrent_step {
namespace {

template <int K, bool kDelta, bool kChannels, bool kTransposed>
void launch(const RecurrentStep& call) {
  const int warps = call.rows * call.sequences * call.heads * (call.values / kStepValues);
  for (int block = 0; block < (warps + 3) / 4; ++block) {
    device::run_cluster(block, 1, sizeof(StepShared<K>), [&] {
      step_kernel<__nv_bfloat16, K, kDelta, kChannels, kTransposed>(call);
    });
  }
}

template <int K>
void run(const RecurrentStep& call, bool channels, bool transposed) {
  const bool delta = call.beta.data != nullptr;
  if (transposed) return launch<K, false, false, true>(call);
  if (channels) return delta ? launch<K, true, true, false>(call) : launch<K, false, true, false>(call);
  return delta ? launch<K, true, false, false>(call) : launch<K, false, false, false>(call);
}

}  // namespace
}  // namespace ejkernel::recurrent_step

// What was wrong, or null. Arrays in the order of the record, then the integers.
extern "C" const char* recurrent_step(void** a, const int* n, float scale) {
  using namespace ejkernel::recurrent_step;
  device::complaint = nullptr;
  RecurrentStep call{};
  call.query = a[0], call.key = a[1], call.value = a[2];
  Numbers* numbers[] = {&call.decay, &call.beta, &call.dt, &call.skip};
  for (int i = 0; i < 4; ++i) *numbers[i] = {a[3 + i], n[12 + 3 * i], n[13 + 3 * i], bool(n[14 + 3 * i])};
  call.bounds = static_cast<const int*>(a[7]), call.slots = static_cast<const int*>(a[8]);
  call.initial = static_cast<const float*>(a[9]), call.final = static_cast<float*>(a[10]), call.output = a[11];
  call.rows = n[0], call.tokens = n[1], call.sequences = n[2], call.heads = n[3];
  call.query_heads = n[4], call.key_heads = n[5], call.value_heads = n[6];
  call.a_query = n[3] / n[4], call.a_key = n[3] / n[5], call.a_value = n[3] / n[6];
  call.values = n[7], call.slot_count = n[8], call.scale = scale;
  const bool channels = n[10], transposed = n[11];
  n[9] == 64 ? run<64>(call, channels, transposed) : run<128>(call, channels, transposed);
  return device::complaint;
}
