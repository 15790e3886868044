// The decode step of linear recurrences: processes up to eight tokens at a time, reading and writing each state once.
//
//   state in HBM   K keys x W values -- copies ---> shared memory -----------------------------> copies, in place
//   q, k, v, gates           load ---> q S0, k S0 | 8 x 8 pairs | solve | + pairs x u | S = decay S0 + u k^T
//                                     tensor cores                            tensor cores
//
// Token by token, eight tokens would be eight dependent sums over the keys, whose instructions and barriers take longer
// than reading the state. Here they are one chunk: tensor cores multiply them with the initial state, and the
// interactions between tokens are 8 x 8 matrices.
#pragma once

#include "common/logarithms.cuh"
#include "recurrent_step/channels.cuh"
#include "recurrent_step/staged_state.cuh"

namespace ejkernel::recurrent_step {

// Products of the gates of a chunk, for a lane's tokens.
struct ChunkDecay {
  float from_start[2];  // up to and including tokens 2 c + n
  float to_end[2];      // after tokens 2 c + n
  float between[2];     // after 2 c + n, up to and including token r; 0 if r is before 2 c + n
  float all;
};

// `factor` is the gate of token lane % 8, and 1 for a missing token.
__device__ __forceinline__ ChunkDecay chunk_decay(float factor, int r, int c) {
  ChunkDecay decay{{1.f, 1.f}, {1.f, 1.f}, {1.f, 1.f}, 1.f};
  // Multiplies factors and never subtracts cumulative sums, so that gates of -inf are exact.
#pragma unroll
  for (int n = 0; n < kStepTokens; ++n) {
    const float next = __shfl_sync(~0u, factor, n);
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      if (n <= 2 * c + i) decay.from_start[i] *= next;
      if (n > 2 * c + i) decay.to_end[i] *= next;
      if (n > 2 * c + i && n <= r) decay.between[i] *= next;
    }
    decay.all *= next;
  }
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    if (2 * c + i > r) decay.between[i] = 0.f;
  }
  return decay;
}

// The same for tokens in a tree: products of the gates of a token and its ancestors, and of those between an ancestor and
// r. `path` has the token lane % 8 and its ancestors as bits. `to_end` and `all` are those of a path without branches.
__device__ __forceinline__ ChunkDecay tree_decay(float factor, unsigned path, int r, int c) {
  ChunkDecay decay = chunk_decay(factor, r, c);
  const unsigned row_path = __shfl_sync(~0u, path, r);
  const unsigned column_path[2] = {__shfl_sync(~0u, path, 2 * c), __shfl_sync(~0u, path, 2 * c + 1)};
  decay.from_start[0] = decay.from_start[1] = 1.f;
#pragma unroll
  for (int i = 0; i < 2; ++i) decay.between[i] = row_path >> (2 * c + i) & 1 ? 1.f : 0.f;
#pragma unroll
  for (int n = 0; n < kStepTokens; ++n) {
    const float next = __shfl_sync(~0u, factor, n);
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      if (column_path[i] >> n & 1) decay.from_start[i] *= next;
      if ((row_path & ~column_path[i]) >> n & 1) decay.between[i] *= next;
    }
  }
  return decay;
}

// Solves u_t = beta_t (v_t - known_t - sum of pairs_ti u_i over i < t), for a lane's values of tokens 2 c and 2 c + 1.
// `first` and `second` are the pairs of token r with 2 c and 2 c + 1, with their decay.
__device__ __forceinline__ void solve(float (&u)[2][4], float first, float second, const float (&beta)[2], int lane) {
  const int c = lane % 4;
#pragma unroll
  for (int i = 0; i < kStepTokens - 1; ++i) {
    float of[2];
#pragma unroll
    for (int n = 0; n < 2; ++n) {
      const float pair = __shfl_sync(~0u, i % 2 ? second : first, 4 * (2 * c + n) + i / 2);
      of[n] = i < 2 * c + n ? beta[n] * pair : 0.f;
    }
#pragma unroll
    for (int m = 0; m < 2; ++m) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const float written = __shfl_sync(~0u, u[m][2 * half + i % 2], (lane & ~3) + i / 2);
        u[m][2 * half] -= of[0] * written;
        u[m][2 * half + 1] -= of[1] * written;
      }
    }
  }
}

// Converts values 4 r to 4 r + 3 of tokens 2 c and 2 c + 1 to float32, in the layout of accumulators.
template <typename T>
__device__ __forceinline__ void widen_values(float (&v)[2][4], const uint2 (&found)[2]) {
#pragma unroll
  for (int n = 0; n < 2; ++n) {
    const float2 low = widened_pair<T>(found[n].x), high = widened_pair<T>(found[n].y);
    v[0][n] = low.x, v[0][2 + n] = low.y, v[1][n] = high.x, v[1][2 + n] = high.y;
  }
}

// Computes a chunk's outputs and updates the state. With gates per key channel `pairs` are computed before, and tokens
// have no queries and keys.
template <typename T, int K, bool kDelta, bool kTrees, typename State, typename Channels>
__device__ __forceinline__ void step_chunk(
    const RecurrentStep& call, State& state, const StepTokens<K>& tokens, float (&pairs)[4], Channels& channels,
    const StepItem& item, const StepChunk& chunk, float skip, int lane) {
  constexpr bool kChannels = Channels::kPresent;
  const int r = lane / 4, c = lane % 4, here = chunk.count;
  float read[2][4] = {}, known[2][4] = {};
  ChunkDecay decay{{1.f, 1.f}, {1.f, 1.f}, {1.f, 1.f}, 1.f};
  if constexpr (kChannels) {
    read_channels<K, kDelta>(state, *channels.shared, read, known, lane);
    channels.store_ends();
  } else {
    const bool there = call.decay.data != nullptr && lane % 8 < here;
    const float log = number_of<T>(tokens.gate, call.decay, scalar_index(call.decay, item, chunk)) * kLog2e;
    const float gate = there ? exp2_fast(log) : 1.f;
    decay = kTrees ? tree_decay(gate, chunk.path, r, c) : chunk_decay(gate, r, c);
    // Rows of the left operand are queries, then keys: one instruction multiplies both with the keys.
#pragma unroll
    for (int t = 0; t < K / 16; ++t) {
      const uint32_t both[4] = {tokens.query[t].x, tokens.key[t].x, tokens.query[t].y, tokens.key[t].y};
      Half<T>::multiply(pairs, both, tokens.key[t].x, tokens.key[t].y);
    }
#pragma unroll
    for (int i = 0; i < 4; ++i) pairs[i] *= decay.between[i % 2];
    read_state<T, K, kDelta>(state, tokens.query, tokens.key, read, known);
  }
  const Numbers& factors = kDelta ? call.beta : call.dt;
  float own_factor = 1.f, factor[2];
  if (factors.data != nullptr) own_factor = number_of<T>(tokens.factor, factors, scalar_index(factors, item, chunk));
#pragma unroll
  for (int n = 0; n < 2; ++n) factor[n] = __shfl_sync(~0u, own_factor, 2 * c + n);
  float v[2][4], u[2][4];
  widen_values<T>(v, tokens.values);
#pragma unroll
  for (int m = 0; m < 2; ++m) {
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      read[m][i] *= decay.from_start[i % 2];
      u[m][i] = factor[i % 2] * (kDelta ? v[m][i] - decay.from_start[i % 2] * known[m][i] : v[m][i]);
    }
  }
  if (kDelta) solve(u, pairs[2], pairs[3], factor, lane);
  // A token reads what it wrote, so its pair with itself counts.
  uint32_t weight[2], rest[2];
  split(pairs[0], weight[0], rest[0]);
  split(pairs[1], weight[1], rest[1]);
  uint32_t written[2][4], written_rest[2][4];
#pragma unroll
  for (int m = 0; m < 2; ++m) {
    split_operand(u[m], written[m], written_rest[m]);
    multiply_tf32(read[m], written[m], weight[0], weight[1]);
    multiply_tf32(read[m], written_rest[m], weight[0], weight[1]);
    multiply_tf32(read[m], written[m], rest[0], rest[1]);
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      read[m][i] = call.scale * read[m][i] + skip * v[m][i];
      u[m][i] *= decay.to_end[i % 2];
    }
    split_operand(u[m], written[m], written_rest[m]);
  }
  const StepHead<T> at = head_of<T, K, kChannels>(call, item);
#pragma unroll
  for (int n = 0; n < 2; ++n) {
    if (2 * c + n < here && (!kTrees || 2 * c + n >= chunk.first_output)) {
      *reinterpret_cast<uint2*>(at.output + chunk.column_token[n] * at.output_stride + 4 * r) = uint2{
          Half<T>::pack(read[0][n], read[0][2 + n]), Half<T>::pack(read[1][n], read[1][2 + n])};
    }
  }
  if (kTrees && !chunk.has_successor) return;
#pragma unroll
  for (int t = 0; t < K / 16; ++t) {
    StateTile tile;
    state.read_again(t, tile);
    float all[4];
    if constexpr (kChannels) channels.decay_of(t, all);
#pragma unroll
    for (int s = 0; s < 2; ++s) {
      // A row of keys of tokens 2 c and 2 c + 1, from the lane's keys of token r.
      uint32_t b[2], b_low[2];
      if constexpr (kChannels) {
        const int key = 16 * t + 4 * (r / 2) + 2 * s + r % 2;
        split(channels.shared->ends()[2 * c][key], b[0], b_low[0]);
        split(channels.shared->ends()[2 * c + 1][key], b[1], b_low[1]);
      } else {
        const float2 pair = widened_pair<T>(transpose_matrix(s ? tokens.key[t].y : tokens.key[t].x));
        b[0] = __float_as_uint(pair.x), b[1] = __float_as_uint(pair.y);
      }
#pragma unroll
      for (int m = 0; m < 2; ++m) {
#pragma unroll
        for (int i = 0; i < 4; ++i) tile[s][m][i] *= kChannels ? all[2 * s + i % 2] : decay.all;
        multiply_tf32(tile[s][m], written[m], b[0], b[1]);
        multiply_tf32(tile[s][m], written_rest[m], b[0], b[1]);
        if constexpr (kChannels) multiply_tf32(tile[s][m], written[m], b_low[0], b_low[1]);
      }
    }
    state.write(t, tile);
  }
}

// Writes zeros to the outputs of every `step`-th of the padding tokens.
template <typename T>
__device__ __forceinline__ void zero_outputs(
    T* output, long long stride, long long first, long long end, int step, int c) {
  for (long long token = first; token < end; token += step) {
    if (c == 0) *reinterpret_cast<uint2*>(output + token * stride) = uint2{0, 0};
  }
}

// Writes zeros to an item's share of the padding tokens' outputs.
template <typename T, int K, bool kChannels>
__device__ __forceinline__ void zero_padding(const RecurrentStep& call, const StepItem& item, int lane) {
  const int c = lane % 4;
  if (call.bounds != nullptr) {
    // The warps of all sequences share the padding tokens, which are before the first and after the last sequence.
    const StepHead<T> at = head_of<T, K, kChannels>(call, item);
    const int count = call.sequences;
    zero_outputs(at.output + 4 * (lane / 4), at.output_stride, item.sequence, call.bounds[0], count, c);
    zero_outputs(at.output + 4 * (lane / 4), at.output_stride, call.bounds[count] + item.sequence, call.tokens, count, c);
  }
}

template <typename T>
__device__ __forceinline__ float load_skip(const RecurrentStep& call, const StepItem& item) {
  const long long at = item.row * call.skip.row + item.head;
  return call.skip.data == nullptr ? 0.f : number_of<T>(*word_address(call.skip, at), call.skip, at);
}

// Issues the loads of an item's state, and puts it into the layout of accumulators where it is needed, so that all loads
// of an item are in flight together. A sequence without a state loads from some valid address, and uses zeros.
template <int K, bool kTransposed>
__device__ __forceinline__ bool load_state_pieces(
    StepPieces<K>& pieces, const RecurrentStep& call, const StepItem& item, int lane) {
  const bool there = item.has_state && call.initial != nullptr;
  const float* from = call.initial == nullptr ? call.final : call.initial;
  from += there ? state_offset<K, kTransposed>(call, item) : offset_in_head<K, kTransposed>(item);
  load_pieces<K, kTransposed>(pieces, from, call.values, lane / 4, lane % 4);
  return there;
}

// A block has the state of W values of a head in shared memory, a warp 32 of them. Twelve warps are resident, so that the
// states of other blocks are on their way while one computes.
template <typename T, int K, int W, bool kDelta, bool kTransposed>
__global__ void __launch_bounds__(W, 384 / W) step_kernel(const __grid_constant__ RecurrentStep call) {
  extern __shared__ __align__(16) unsigned char memory[];
  const int lane = threadIdx.x % 32;
  const StepItem item = load_item(call, blockIdx.x * (W / 32) + threadIdx.x / 32);
  StepTokens<K> tokens;
  StepChunk chunk = consecutive_tokens(item, item.first, lane);
  load_tokens<T, K, kDelta>(tokens, call, item, chunk, lane);
  auto state = start_loading<K, W, kTransposed>(memory, call, item);
  const float skip = load_skip<T>(call, item);
  finish_loading();
  NoChannels none;
  for (int token = item.first; token < item.end;) {
    float pairs[4] = {};
    state.leaves = token + kStepTokens >= item.end && item.has_state;
    step_chunk<T, K, kDelta, false>(call, state, tokens, pairs, none, item, chunk, skip, lane);
    state.arrives = false;
    token += kStepTokens;
    if (token >= item.end) break;
    chunk = consecutive_tokens(item, token, lane);
    load_tokens<T, K, kDelta>(tokens, call, item, chunk, lane);
  }
  finish_storing(state, item);
  zero_padding<T, K, false>(call, item, lane);
}

}  // namespace ejkernel::recurrent_step
