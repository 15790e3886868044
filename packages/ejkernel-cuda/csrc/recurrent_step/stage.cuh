// What a warp of the decode step with gates per key channel copies to shared memory ahead of its use: the state and the
// tokens of a work item.
//
//   item n      wait | state -> registers | tokens | products ........ | store state
//   item n + 1       | copy state ...........................................
//                                         | copy tokens ......................
//
// Lanes copy whole lines of states, and read what other lanes have copied. Lines are permuted, so that neither meets the
// same bank twice.
#pragma once

#include "recurrent_step/work.cuh"

namespace ejkernel::recurrent_step {

// Up to eight tokens. The four warps of a head share its key channels: a lane has pieces of token lane / 4, four of 16
// channels each. Values and scalars are the lane's, as in `StepTokens`.
template <int K>
struct TokenStage {
  static constexpr int kPieces = K / 16 / kStepWarps;
  float4 gates[kPieces][32];
  uint2 query[kPieces][32], key[kPieces][32], values[2][32];
  uint32_t factor[32];
};

template <int K>
struct WarpStage {
  float4 state[K * kStepValues / 4];
  TokenStage<K> tokens;
};

// The index in shared memory of values 4 r to 4 r + 3 of a key.
__device__ __forceinline__ int staged_piece(int key, int r) {
  return key * (kStepValues / 4) + (r ^ key / 4 % 4 * 2);
}

// Waits for all copies of the warp's lanes.
__device__ __forceinline__ void wait_for_warp_copies() {
  wait_for_copies<0>();
  __syncwarp();
}

// Issues the copies of an item's state; zeros for a sequence without a state.
template <int K>
__device__ __forceinline__ void copy_state(
    WarpStage<K>& stage, const RecurrentStep& call, const StepItem& item, int lane) {
  constexpr int kPieces = kStepValues / 4, kKeys = 32 / kPieces;
  const bool there = item.has_state && call.initial != nullptr;
  const float* from = there ? call.initial + state_offset<K, false>(call, item) : call.final;
  from += (long long)(lane / kPieces) * call.values + lane % kPieces * 4;
#pragma unroll
  for (int n = 0; n < K / kKeys; ++n) {
    const int place = staged_piece(kKeys * n + lane / kPieces, lane % kPieces);
    copy_async(shared_address(&stage.state[place]), from + (long long)(kKeys * n) * call.values, there ? 16 : 0);
  }
  commit_copies();
}

// Loads the state that the warp's lanes have copied, after a wait of each of them.
template <int K>
__device__ __forceinline__ void load_staged_state(StepState<K>& state, const WarpStage<K>& stage, int lane) {
  StepPieces<K> pieces;
#pragma unroll
  for (int t = 0; t < K / 16; ++t) {
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      pieces[t][i] = stage.state[staged_piece(16 * t + 4 * (lane % 4) + i, lane / 4)];
    }
  }
  arrange_state<K, false>(state, pieces, true);
}

// Issues the copies of a chunk's tokens; zeros for missing tokens.
template <typename T, int K, bool kDelta>
__device__ __forceinline__ void copy_tokens(
    TokenStage<K>& stage, const RecurrentStep& call, const StepItem& item, const StepChunk& chunk, int lane) {
  const int r = lane / 4, c = lane % 4;
  const StepHead<T> at = head_of<T, K, true>(call, item);
#pragma unroll
  for (int n = 0; n < TokenStage<K>::kPieces; ++n) {
    const int channel = 16 * (kStepWarps * n + int(threadIdx.x / 32)) + 4 * c;
    const float* gates = at.gates + chunk.row_token * at.gate_stride + channel;
    const T* query = at.query + chunk.row_token * at.query_stride + channel;
    const T* key = at.key + chunk.row_token * at.key_stride + channel;
    copy_async(shared_address(&stage.gates[n][lane]), gates, r < chunk.count ? 16 : 0);
    copy_async_8(shared_address(&stage.query[n][lane]), query, r < chunk.count ? 8 : 0);
    copy_async_8(shared_address(&stage.key[n][lane]), key, r < chunk.count ? 8 : 0);
  }
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    const T* value = at.value + chunk.column_token[i] * at.value_stride + 4 * r;
    copy_async_8(shared_address(&stage.values[i][lane]), value, 2 * c + i < chunk.count ? 8 : 0);
  }
  const Numbers& factors = kDelta ? call.beta : call.dt;
  if (factors.data != nullptr) {
    const uint32_t* word = word_address(factors, scalar_index(factors, item, chunk));
    copy_async_4(shared_address(&stage.factor[lane]), word, lane % 8 < chunk.count ? 4 : 0);
  }
  commit_copies();
}

}  // namespace ejkernel::recurrent_step
