// The decode step over trees of draft tokens: outputs alone, since states stay as they are until tokens are accepted.
//
//   up to eight tokens    one chunk, whose pairs are those of a token with its ancestors
//   longer trees          the path to each token, in chunks of eight, from the state before the tree
#pragma once

#include "recurrent_step/recurrent_step.cuh"

namespace ejkernel::recurrent_step {

// The parent of a token, both by position in their request; -1 for the state before it. A parent that does not come before
// the token counts as the one before.
__device__ __forceinline__ int parent_of(const int* parents, int position) {
  return max(-1, min(parents[position], position - 1));
}

// The token lane % 8 and its ancestors as bits, of a tree of up to eight tokens.
__device__ __forceinline__ unsigned ancestors_of(int parent, int lane) {
  unsigned path = 1u << lane % 8;
#pragma unroll
  for (int step = 0; step < 3; ++step) {  // a path has up to eight tokens, and each step doubles what is known of it
    const unsigned known = __shfl_sync(~0u, path, parent < 0 ? lane % 8 : parent);
    const int next = __shfl_sync(~0u, parent, parent < 0 ? lane % 8 : parent);
    if (parent >= 0) path |= known;
    parent = parent < 0 ? -1 : next;
  }
  return path;
}

// The number of tokens on the path to a token.
__device__ __forceinline__ int path_length(const int* parents, int position) {
  int length = 1;
  while ((position = parent_of(parents, position)) >= 0) ++length;
  return length;
}

// Tokens `first` to `first` + 7 of a path of `length` tokens that ends with `last`.
__device__ __forceinline__ StepChunk chunk_of_path(
    const StepItem& item, const int* parents, int last, int length, int first, int lane) {
  StepChunk chunk;
  chunk.count = min(length - first, kStepTokens);
  int position = last;
  for (int above = length - 1; above > first + min(lane % 8, chunk.count - 1); --above) {
    position = parent_of(parents, position);
  }
  chunk.scalar_token = item.first + position;
  chunk.row_token = __shfl_sync(~0u, chunk.scalar_token, lane / 4);
  chunk.column_token[0] = __shfl_sync(~0u, chunk.scalar_token, 2 * (lane % 4));
  chunk.column_token[1] = __shfl_sync(~0u, chunk.scalar_token, 2 * (lane % 4) + 1);
  chunk.path = (2u << lane % 8) - 1;
  chunk.has_successor = first + kStepTokens < length;
  chunk.first_output = chunk.has_successor ? kStepTokens : chunk.count - 1;
  return chunk;
}

// Processes a chunk from `state`.
template <typename T, int K, bool kDelta>
__device__ __forceinline__ void step_tree_chunk(
    const RecurrentStep& call, RegisterState<K>& state, const StepTokens<K>& tokens, const StepItem& item,
    const StepChunk& chunk, float skip, int lane) {
  float pairs[4] = {};
  NoChannels none;
  step_chunk<T, K, kDelta, true>(call, state, tokens, pairs, none, item, chunk, skip, lane);
}

// A block is one warp, which has one item.
template <typename T, int K, bool kDelta, bool kTransposed>
__global__ void __launch_bounds__(32) tree_kernel(const __grid_constant__ RecurrentStep call) {
  const int lane = threadIdx.x;
  const StepItem item = load_item(call, blockIdx.x);
  const int length = item.end - item.first;
  const int* parents = call.parents + (long long)item.row * call.tokens + item.first;
  const float skip = load_skip<T>(call, item);
  StepTokens<K> tokens;
  StepPieces<K> pieces;
  RegisterState<K> state;
  if (length <= kStepTokens) {
    StepChunk chunk = consecutive_tokens(item, item.first, lane);
    load_tokens<T, K, kDelta>(tokens, call, item, chunk, lane);
    const int parent = lane % 8 < length ? parent_of(parents, lane % 8) : -1;
    const bool there = load_state_pieces<K, kTransposed>(pieces, call, item, lane);
    chunk.path = ancestors_of(parent, lane);
    arrange_state<K, kTransposed>(state.x, pieces, there);
    step_tree_chunk<T, K, kDelta>(call, state, tokens, item, chunk, skip, lane);
  } else {
    for (int position = 0; position < length; ++position) {
      const bool there = load_state_pieces<K, kTransposed>(pieces, call, item, lane);
      arrange_state<K, kTransposed>(state.x, pieces, there);
      const int depth = path_length(parents, position);
      for (int first = 0; first < depth; first += kStepTokens) {
        const StepChunk chunk = chunk_of_path(item, parents, position, depth, first, lane);
        load_tokens<T, K, kDelta>(tokens, call, item, chunk, lane);
        step_tree_chunk<T, K, kDelta>(call, state, tokens, item, chunk, skip, lane);
      }
    }
  }
  zero_padding<T, K, false>(call, item, lane);
}

}  // namespace ejkernel::recurrent_step
