// The state of a linear recurrence in the registers of a warp, and products with it.
//
// One register layout serves all products, since a product may sum its inner axis in any order. A warp holds S^T as
// accumulators of 16 values by 8 keys; lane 4 r + c has
//
//   values 4 r + 2 m + half of tile row m   (half: rows r and r + 8 of the instruction)
//   keys 16 t + 4 c + 2 s + h of tile 2 t + s   (h: columns 2 c and 2 c + 1 of the instruction)
//
// so that a lane's values, or keys, are 16 contiguous bytes in memory. As an operand the same registers are the values'
// rows and, with inner index c for h = 0 and c + 4 for h = 1, the keys' columns. Results of tokens 2 c and 2 c + 1 are
// also in the registers in which the next product reads them.
//
// States are float32: an operand is split into the part that TF32 represents and the rest, which keeps 21 bits.
#pragma once

#include "recurrent_step/numbers.cuh"
#include "recurrent_step/ptx.cuh"

namespace ejkernel::recurrent_step {

constexpr int kStepTokens = 8;   // per chunk: columns of the MMA
constexpr int kStepValues = 32;  // per warp
constexpr int kStepThreads = 128, kStepWarps = kStepThreads / 32;  // per block

// Splits x into a number that TF32 represents, and the remainder.
__device__ __forceinline__ void split(float x, uint32_t& high, uint32_t& low) {
  high = __float_as_uint(x) & 0xffffe000u;
  low = __float_as_uint(x - __uint_as_float(high));
}

// Splits accumulators as a left operand: columns 2 c and 2 c + 1 are its inner indices c and c + 4.
__device__ __forceinline__ void split_operand(const float (&x)[4], uint32_t (&high)[4], uint32_t (&low)[4]) {
  split(x[0], high[0], low[0]);
  split(x[2], high[1], low[1]);
  split(x[1], high[2], low[2]);
  split(x[3], high[3], low[3]);
}

// A warp's state: [tile of 8 keys][tile of 16 values][registers of an accumulator].
template <int K>
using StepState = float[K / 8][2][4];

// A lane's 16-byte pieces of the state in memory: four elements of one key or, if the state is [V, K], of one value.
template <int K>
using StepPieces = float4[K / 16][4];

template <int K, bool kTransposed>
__device__ __forceinline__ long long piece_offset(int t, int i, int values, int r, int c) {
  const int key = 16 * t + 4 * c + (kTransposed ? 0 : i), value = 4 * r + (kTransposed ? i : 0);
  return kTransposed ? value * K + key : key * values + value;
}

// The register of a piece's element n.
template <int K, bool kTransposed>
__device__ __forceinline__ float& element_of_piece(StepState<K>& state, int t, int i, int n) {
  const int k = kTransposed ? n : i, v = kTransposed ? i : n;
  return state[2 * t + k / 2][v / 2][2 * (v % 2) + k % 2];
}

// Issues the loads of a state.
template <int K, bool kTransposed>
__device__ __forceinline__ void load_pieces(StepPieces<K>& pieces, const float* base, int values, int r, int c) {
#pragma unroll
  for (int t = 0; t < K / 16; ++t) {
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      pieces[t][i] = *reinterpret_cast<const float4*>(base + piece_offset<K, kTransposed>(t, i, values, r, c));
    }
  }
}

// Puts loaded pieces into the state's layout, or zeros. This is the first use of the loads, so the warp waits for them
// here.
template <int K, bool kTransposed>
__device__ __forceinline__ void arrange_state(StepState<K>& state, const StepPieces<K>& pieces, bool there) {
#pragma unroll
  for (int t = 0; t < K / 16; ++t) {
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const float found[4] = {pieces[t][i].x, pieces[t][i].y, pieces[t][i].z, pieces[t][i].w};
#pragma unroll
      for (int n = 0; n < 4; ++n) element_of_piece<K, kTransposed>(state, t, i, n) = there ? found[n] : 0.f;
    }
  }
}

// Two tiles of a state, the accumulators of keys 16 t to 16 t + 15: [tile of 8 keys][tile of 16 values][register].
using StateTile = float[2][2][4];

// A state in registers, which gives out and takes in two tiles at a time.
template <int K>
struct RegisterState {
  StepState<K> x;


  __device__ __forceinline__ void read(int t, StateTile& tile) const {
#pragma unroll
    for (int i = 0; i < 16; ++i) tile[i / 8][i / 4 % 2][i % 4] = x[2 * t + i / 8][i / 4 % 2][i % 4];
  }
  __device__ __forceinline__ void read_again(int t, StateTile& tile) const { read(t, tile); }
  __device__ __forceinline__ void write(int t, const StateTile& tile) {
#pragma unroll
    for (int i = 0; i < 16; ++i) x[2 * t + i / 8][i / 4 % 2][i % 4] = tile[i / 8][i / 4 % 2][i % 4];
  }
};

// x[n] += S^T b^T for the tokens of b, which are exact in TF32: a lane's pieces of a token's keys.
template <typename T, int K, bool kDelta, typename State>
__device__ __forceinline__ void read_state(
    const State& state, const uint2 (&q)[K / 16], const uint2 (&k)[K / 16], float (&read)[2][4], float (&known)[2][4]) {
  // High and low parts have separate accumulators, so that four products do not depend on each other.
  float read_low[2][4] = {}, known_low[2][4] = {};
#pragma unroll
  for (int t = 0; t < K / 16; ++t) {
    StateTile tile;
    state.read(t, tile);
#pragma unroll
    for (int s = 0; s < 2; ++s) {
      const float2 b = widened_pair<T>(s ? q[t].y : q[t].x);
      const float2 d = widened_pair<T>(s ? k[t].y : k[t].x);
#pragma unroll
      for (int m = 0; m < 2; ++m) {
        uint32_t high[4], low[4];
        split_operand(tile[s][m], high, low);
        multiply_tf32(read[m], high, __float_as_uint(b.x), __float_as_uint(b.y));
        multiply_tf32(read_low[m], low, __float_as_uint(b.x), __float_as_uint(b.y));
        if (kDelta) {
          multiply_tf32(known[m], high, __float_as_uint(d.x), __float_as_uint(d.y));
          multiply_tf32(known_low[m], low, __float_as_uint(d.x), __float_as_uint(d.y));
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
