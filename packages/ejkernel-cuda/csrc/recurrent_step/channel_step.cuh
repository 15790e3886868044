// The decode step with gates per key channel: blocks stay resident, and a warp copies its next state ahead.
//
// Pairs take more time here than loading a state, and registers leave room for two blocks per multiprocessor, which
// would copy nothing while they compute pairs.
#pragma once

#include "recurrent_step/recurrent_step.cuh"

namespace ejkernel::recurrent_step {

// Dynamic shared memory of a block.
template <int K>
__host__ __device__ constexpr size_t channel_shared_bytes() {
  return kStepWarps * sizeof(WarpStage<K>) + sizeof(StepShared<K>);
}

// A warp has every `gridDim.x * kStepWarps`-th item. The four warps of a block have the same head, so the value dimension
// is a multiple of 128.
template <typename T, int K, bool kDelta>
__global__ void __launch_bounds__(kStepThreads, 2) channel_kernel(const __grid_constant__ RecurrentStep call) {
  extern __shared__ __align__(16) unsigned char memory[];
  WarpStage<K>& stage = reinterpret_cast<WarpStage<K>*>(memory)[threadIdx.x / 32];
  StepShared<K>& shared = *reinterpret_cast<StepShared<K>*>(memory + kStepWarps * sizeof(WarpStage<K>));
  const int lane = threadIdx.x % 32;
  const unsigned count = count_items(call), stride = gridDim.x * kStepWarps;
  unsigned index = blockIdx.x * kStepWarps + threadIdx.x / 32;
  if (index >= count) return;
  StepItem item = load_item(call, index);
  copy_tokens<T, K, kDelta>(stage.tokens, call, item, consecutive_tokens(item, item.first, lane), lane);
  copy_state<K>(stage, call, item, lane);
  for (;;) {
    const bool has_next = index + stride < count;
    const StepItem next = load_item(call, has_next ? index + stride : index);
    wait_for_warp_copies();
    StepState<K> state;
    load_staged_state<K>(state, stage, lane);
    __syncwarp();  // all lanes have read the state that the next one replaces
    if (has_next) copy_state<K>(stage, call, next, lane);
    const float skip = load_skip<T>(call, item);
    for (int token = item.first; token < item.end; token += kStepTokens) {
      if (token > item.first) wait_for_warp_copies();
      float pairs[4] = {};
      prepare_channels<T, K, kDelta>(stage.tokens, shared, pairs, lane);
      StepTokens<K> tokens;
      tokens.values[0] = stage.tokens.values[0][lane], tokens.values[1] = stage.tokens.values[1][lane];
      tokens.factor = stage.tokens.factor[lane];
      // The next tokens of this item, or the first ones of the next.
      if (item.end - token > kStepTokens) {
        const StepChunk following = consecutive_tokens(item, token + kStepTokens, lane);
        copy_tokens<T, K, kDelta>(stage.tokens, call, item, following, lane);
      } else if (has_next) {
        copy_tokens<T, K, kDelta>(stage.tokens, call, next, consecutive_tokens(next, next.first, lane), lane);
      }
      const StepChunk chunk = consecutive_tokens(item, token, lane);
      step_chunk<T, K, kDelta, true, false>(call, state, tokens, pairs, &shared, item, chunk, skip, lane);
    }
    store_item<K, false>(call, item, state, lane);
    zero_padding<T, K, true>(call, item, lane);
    if (!has_next) return;
    if (item.first >= item.end) {
      copy_tokens<T, K, kDelta>(stage.tokens, call, next, consecutive_tokens(next, next.first, lane), lane);
    }
    item = next;
    index += stride;
  }
}

}  // namespace ejkernel::recurrent_step
