// The decode step with gates per key channel: pairs are computed while the state is on its way.
#pragma once

#include "recurrent_step/recurrent_step.cuh"

namespace ejkernel::recurrent_step {

// Dynamic shared memory of a block.
template <int K>
__host__ __device__ constexpr size_t channel_shared_bytes() {
  return sizeof(StepShared<K>) + StagedState<K, kStepThreads, false>::kBytes;
}

// A block has one head of a sequence, so the value dimension is a multiple of 128.
template <typename T, int K, bool kDelta>
__global__ void __launch_bounds__(kStepThreads, 3) channel_kernel(const __grid_constant__ RecurrentStep call) {
  extern __shared__ __align__(16) unsigned char memory[];
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  const StepItem item = load_item(call, blockIdx.x * kStepWarps + warp);
  StepTokens<K> tokens;
  ChannelChunk<T, K, kDelta> channels;
  channels.shared = reinterpret_cast<StepShared<K>*>(memory);
  channels.r = lane / 4, channels.c = lane % 4, channels.warp = warp;
  StepChunk chunk = consecutive_tokens(item, item.first, lane);
  channels.load(call, item, chunk);
  load_values<T, K, kDelta>(tokens, call, item, chunk, lane);
  auto state = start_loading<K, kStepThreads, false>(memory + sizeof(StepShared<K>), call, item);
  const float skip = load_skip<T>(call, item);
  finish_loading();
  for (int token = item.first; token < item.end;) {
    float pairs[4] = {};
    channels.prepare(pairs, lane);
    state.leaves = token + kStepTokens >= item.end && item.has_state;
    step_chunk<T, K, kDelta, false>(call, state, tokens, pairs, channels, item, chunk, skip, lane);
    state.arrives = false;
    token += kStepTokens;
    if (token >= item.end) break;
    chunk = consecutive_tokens(item, token, lane);
    channels.load(call, item, chunk);
    load_values<T, K, kDelta>(tokens, call, item, chunk, lane);
  }
  finish_storing(state, item);
  zero_padding<T, K, true>(call, item, lane);
}

}  // namespace ejkernel::recurrent_step
