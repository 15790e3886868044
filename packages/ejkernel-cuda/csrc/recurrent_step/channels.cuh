// Per-key-channel gates (as in KDA and GLA) in the decode step of linear recurrences.
//
// Each key channel has its own decay between two tokens of a chunk, so the product of a query and a key needs a weight
// per channel. Sums of log gates are formed over lanes, which are tokens, and never as differences of sums, which would
// cancel.
#pragma once

#include "common/logarithms.cuh"
#include "recurrent_step/work.cuh"

namespace ejkernel::recurrent_step {

// Cumulative log gates of one key channel over a chunk, for token r; they are sums, so that nothing cancels.
struct KeyDecay {
  float level[3];  // from the middle of the block of 2, 4 or 8 tokens to r, or from r to the middle
  float from_start, to_end, all;
};

__device__ __forceinline__ KeyDecay key_decay(float gate, int r) {
  KeyDecay decay;
  decay.from_start = decay.all = gate * kLog2e;  // to base 2
  decay.to_end = 0.f;
#pragma unroll
  for (int level = 0; level < 3; ++level) {
    // r is in the upper half of its block if this bit is set; lanes of the other half have that half's sum.
    const bool upper = r >> level & 1;
    decay.level[level] = upper ? decay.from_start : decay.to_end;
    const float other = __shfl_xor_sync(~0u, decay.all, 4 << level);
    decay.from_start += upper ? other : 0.f;
    decay.to_end += upper ? 0.f : other;
    decay.all += other;
  }
  return decay;
}

// c += a b, with both operands split into high and low TF32 parts.
__device__ __forceinline__ void multiply_split(float (&c)[4], const float (&a)[4], const float (&b)[2]) {
  uint32_t high[4], low[4], b_high[2], b_low[2];
#pragma unroll
  for (int i = 0; i < 4; ++i) split(a[i], high[i], low[i]);
#pragma unroll
  for (int i = 0; i < 2; ++i) split(b[i], b_high[i], b_low[i]);
  multiply_tf32(c, high, b_high[0], b_high[1]);
  multiply_tf32(c, low, b_high[0], b_high[1]);
  multiply_tf32(c, high, b_low[0], b_low[1]);
}

// Kernels without gates per key channel.
struct NoChannels {
  static constexpr bool kPresent = false;
};

// A chunk's data that the four warps of a head share. One takes the place of another: each warp's partial products of
// pairs; queries and keys with their decay; keys with the decay to the end. Rows start in different banks.
template <int K>
struct StepShared {
  float queries[kStepTokens][K + 4];  // with the decay from the start of the chunk
  float keys[kStepTokens][K + 4];     // the same
  float all[K];                       // the decay over the whole chunk

  __device__ __forceinline__ float4* pairs() { return reinterpret_cast<float4*>(queries); }
  // Keys with the decay to the end of the chunk.
  __device__ __forceinline__ float (&ends())[kStepTokens][K + 4] { return queries; }
};

// Adds up the partial products of the four warps of a head.
__device__ __forceinline__ void sum_over_warps(float4* exchanged, float (&x)[4], int lane) {
  exchanged[threadIdx.x] = float4{x[0], x[1], x[2], x[3]};
  __syncthreads();
  x[0] = x[1] = x[2] = x[3] = 0.f;
#pragma unroll
  for (int n = 0; n < kStepWarps; ++n) {
    const float4 other = exchanged[32 * n + lane];
    x[0] += other.x, x[1] += other.y, x[2] += other.z, x[3] += other.w;
  }
}

// A chunk's tokens in a block's registers, of which each warp has its share of the key channels.
template <typename T, int K, bool kDelta>
struct ChannelChunk {
  static constexpr bool kPresent = true;
  static constexpr int kPieces = K / 16 / kStepWarps;

  StepShared<K>* shared;
  int r, c, warp;
  float4 gates[kPieces];
  uint2 query[kPieces], key[kPieces];
  float ends[kPieces][4];

  // The key channel of a lane's piece.
  __device__ __forceinline__ int channel(int piece) const { return 16 * (kStepWarps * piece + warp) + 4 * c; }

  // Issues the loads of a chunk's tokens; zeros for missing ones.
  __device__ __forceinline__ void load(const RecurrentStep& call, const StepItem& item, const StepChunk& chunk) {
    const StepHead<T> at = head_of<T, K, true>(call, item);
#pragma unroll
    for (int n = 0; n < kPieces; ++n) {
      const bool there = r < chunk.count;
      const float* gate = at.gates + chunk.row_token * at.gate_stride + channel(n);
      const T* q = at.query + chunk.row_token * at.query_stride + channel(n);
      const T* k = at.key + chunk.row_token * at.key_stride + channel(n);
      gates[n] = there ? *reinterpret_cast<const float4*>(gate) : float4{0.f, 0.f, 0.f, 0.f};
      query[n] = there ? *reinterpret_cast<const uint2*>(q) : uint2{0, 0};
      key[n] = there ? *reinterpret_cast<const uint2*>(k) : uint2{0, 0};
    }
  }

  // Computes the products of token r with tokens 2 c and 2 c + 1, as queries and as keys, with the key channels' decay
  // between them; and stores queries and keys with their decay for `read_channels`.
  //
  // The weight of a pair is the exponential of the summed gates between its tokens: a product of two factors, up to and
  // from the middle of the smallest aligned block that has both tokens. The factors are at most 1 if gates are at most
  // 0. Blocks of 2, 4 and 8 tokens need one product each.
  __device__ __forceinline__ void prepare(float (&pairs)[4], int lane) {
    float of_level[3][4] = {}, plain[4] = {}, starts[kPieces][4], known[kPieces][4], all[kPieces][4];
#pragma unroll
    for (int piece = 0; piece < kPieces; ++piece) {
      const float gate[4] = {gates[piece].x, gates[piece].y, gates[piece].z, gates[piece].w};
      const uint32_t both[4] = {query[piece].x, key[piece].x, query[piece].y, key[piece].y};
      Half<T>::multiply(plain, both, key[piece].x, key[piece].y);
#pragma unroll
      for (int s = 0; s < 2; ++s) {
        const KeyDecay decay[2] = {key_decay(gate[2 * s], r), key_decay(gate[2 * s + 1], r)};
        const float2 q = widened_pair<T>(s ? query[piece].y : query[piece].x);
        const float2 k = widened_pair<T>(s ? key[piece].y : key[piece].x);
#pragma unroll
        for (int level = 0; level < 3; ++level) {
          const bool upper = r >> level & 1;
          const float x = exp2_fast(decay[0].level[level]), y = exp2_fast(decay[1].level[level]);
          const float later[2] = {upper ? x : 0.f, upper ? y : 0.f}, earlier[2] = {upper ? 0.f : x, upper ? 0.f : y};
          const float a[4] = {q.x * later[0], k.x * later[0], q.y * later[1], k.y * later[1]};
          const float b[2] = {k.x * earlier[0], k.y * earlier[1]};
          multiply_split(of_level[level], a, b);
        }
#pragma unroll
        for (int h = 0; h < 2; ++h) {
          const int n = 2 * s + h;
          const float start = exp2_fast(decay[h].from_start), of_k = h ? k.y : k.x;
          starts[piece][n] = (h ? q.y : q.x) * start;
          known[piece][n] = of_k * start;
          ends[piece][n] = of_k * exp2_fast(decay[h].to_end);
          all[piece][n] = exp2_fast(decay[h].all);
        }
      }
    }
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const int token = 2 * c + i % 2, apart = r ^ token;
      pairs[i] = apart > 3 ? of_level[2][i] : apart > 1 ? of_level[1][i] : apart > 0 ? of_level[0][i] : plain[i];
      if (token > r) pairs[i] = 0.f;
    }
    __syncthreads();  // all warps have read the shared data of the chunk before
    sum_over_warps(shared->pairs(), pairs, lane);
    __syncthreads();
#pragma unroll
    for (int piece = 0; piece < kPieces; ++piece) {
      const int at = channel(piece);
      store(&shared->queries[r][at], starts[piece]);
      if (kDelta) store(&shared->keys[r][at], known[piece]);
      if (r == 0) store(&shared->all[at], all[piece]);
    }
    __syncthreads();
  }

  // Puts keys with the decay to the end of the chunk in the place of the queries, which all warps have read.
  __device__ __forceinline__ void store_ends() {
    __syncthreads();
#pragma unroll
    for (int piece = 0; piece < kPieces; ++piece) store(&shared->ends()[r][channel(piece)], ends[piece]);
    __syncthreads();
  }

  // The decay over the chunk of the lane's keys of tile t.
  __device__ __forceinline__ void decay_of(int t, float (&all)[4]) const {
    const float4 x = *reinterpret_cast<const float4*>(&shared->all[16 * t + 4 * c]);
    all[0] = x.x, all[1] = x.y, all[2] = x.z, all[3] = x.w;
  }

 private:
  static __device__ __forceinline__ void store(float* to, const float (&x)[4]) {
    *reinterpret_cast<float4*>(to) = float4{x[0], x[1], x[2], x[3]};
  }
};

// Reads the state by queries and keys that decay from the chunk's start.
template <int K, bool kDelta, typename State>
__device__ __forceinline__ void read_channels(
    const State& state, const StepShared<K>& shared, float (&read)[2][4], float (&known)[2][4], int lane) {
  const int r = lane / 4, c = lane % 4;
  float read_low[2][4] = {}, known_low[2][4] = {};
#pragma unroll
  for (int t = 0; t < K / 16; ++t) {
    StateTile tile;
    state.read(t, tile);
    const int at = 16 * t + 4 * c;
    const float4 of_q = *reinterpret_cast<const float4*>(&shared.queries[r][at]);
    const float q[4] = {of_q.x, of_q.y, of_q.z, of_q.w};
    float k[4] = {};
    if (kDelta) {
      const float4 of_k = *reinterpret_cast<const float4*>(&shared.keys[r][at]);
      k[0] = of_k.x, k[1] = of_k.y, k[2] = of_k.z, k[3] = of_k.w;
    }
#pragma unroll
    for (int s = 0; s < 2; ++s) {
      uint32_t b[2], b_low[2], d[2], d_low[2];
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        split(q[2 * s + h], b[h], b_low[h]);
        if (kDelta) split(k[2 * s + h], d[h], d_low[h]);
      }
#pragma unroll
      for (int m = 0; m < 2; ++m) {
        uint32_t high[4], low[4];
        split_operand(tile[s][m], high, low);
        multiply_tf32(read[m], high, b[0], b[1]);
        multiply_tf32(read_low[m], low, b[0], b[1]);
        multiply_tf32(read_low[m], high, b_low[0], b_low[1]);
        if (kDelta) {
          multiply_tf32(known[m], high, d[0], d[1]);
          multiply_tf32(known_low[m], low, d[0], d[1]);
          multiply_tf32(known_low[m], high, d_low[0], d_low[1]);
        }
      }
    }
  }
#pragma unroll
  for (int i = 0; i < 8; ++i) {
    read[i / 4][i % 4] += read_low[i / 4][i % 4];
    if (kDelta) known[i / 4][i % 4] += known_low[i / 4][i % 4];
  }
}

}  // namespace ejkernel::recurrent_step
