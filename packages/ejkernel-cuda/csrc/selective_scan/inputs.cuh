// The shared memory of a block of the backward selective scan, and how its threads read it.
#pragma once

#include "selective_scan/selective_scan.cuh"

namespace ejkernel::selective_scan {

constexpr int kGradientChannels = 128;  // channels per warpgroup, which adds up sums over them

struct ScanGradient {
  const void *x, *step;  // [rows of tokens, tokens, channels]
  const float* decay;    // [maps, channels, size], A
  const float* columns;  // [rows of tokens, tokens, 2, 16], B and C of a token, padded with zeros
  const float* skip;     // [maps, channels], D
  const float* states;   // [rows, intervals, size, channels], before the first token of each
  const void* cotangent; // as x, dy
  const float* behind;   // [rows, channels, size], the cotangent of the final states
  void *dx, *dstep;      // as x and step
  // [rows of tokens, warpgroups per row, tokens, 2, 16], dB and dC summed over a warpgroup's channels
  float* partial;      
  float* ddecay;         // [rows, channels, size]
  float* dskip;          // [rows, channels]
  float* dfirst;         // [rows, channels, size], the cotangent of the initial states
  Packing packing;
  int rows, tokens, channels, size;  // rows of states: packed sequences, or rows of tokens
  int rows_a_map;        // rows that share one A and D
};

// The sizes of a block: its warpgroups share nothing but the barrier at their start.
template <typename X_, typename Step_, int Warpgroups_>
struct GradientTile {
  static constexpr int kWarpgroups = Warpgroups_;
  using X = X_;
  using Step = Step_;
  static constexpr int N = 16, Channels = 4, Lanes = 4, kNumbers = 4;  // per thread
  static constexpr int kWarps = 4, kThreads = kWarps * 32;  // per warpgroup
  static constexpr int kStages = sizeof(X) == 4 ? 2 : 3;  // chosen so that two warpgroups fit on a multiprocessor
  static constexpr int kTokens = 8, kHalf = 4;  // tokens per block of tokens, and per half of one
  static constexpr int kBlocks = kInterval / kTokens;
  static constexpr int kChannels = 32;          // per warp
  static constexpr bool kPieces = true;
  static constexpr int kXBytes = kTokens * kChannels * sizeof(X);
  static constexpr int kStepBytes = kTokens * kChannels * sizeof(Step);
  static constexpr int kWarpStageBytes = 2 * kXBytes + kStepBytes;       // x, dy, dt
  static constexpr int kColumnBytes = kTokens * 2 * N * 4;
  static constexpr int kStageBytes = kWarps * kWarpStageBytes + kColumnBytes;
  static constexpr int kStateBytes = kChannels * N * 4;                  // per warp
  static constexpr int kSumBytes = kTokens * 2 * N * 4;                  // per warp
  static constexpr int kStates = kStages * kStageBytes;                  // offsets in shared memory
  static constexpr int kSums = kStates + kWarps * kBlocks * kStateBytes;
  static constexpr int kFloats = kSums + 2 * kWarps * kSumBytes;
  static constexpr int kFloatBytes = 3 * kTokens * kChannels * 4;        // per warp: dt, dt x, dy
  static constexpr int kBytes = kFloats + kWarps * kFloatBytes;
  static_assert(kWarps * kChannels == kGradientChannels, "");
};

// The position of the scan: a block of tokens of an interval, in the forward or the backward phase.
struct Cursor {
  int token;             // the block's first
  int first, last;       // first tokens of the interval's first and last block; `first` < 0 after the last step
  bool entered, back;    // whether it is the interval's first step, and whether it is in the backward phase

  __device__ __forceinline__ void enter(int interval_token, int tokens) {
    token = first = interval_token;
    last = min(first + kInterval, (tokens + 7) & ~7) - 8;
    entered = true;
    back = first == last;
  }
  // Steps through the blocks 0, 1, .. forwards, then backwards from the last one, which the forward phase skips.
  __device__ __forceinline__ void advance(int tokens) {
    if (back && token == first) return enter(first - kInterval, tokens);
    entered = false;
    token += back ? -8 : 8;
    back |= token == last;
  }
};

// Exchanges half of `Count` sums with the lane whose index differs in bit `Span`: each of the two keeps one half.
template <int Span, int Count>
__device__ __forceinline__ void exchange(float* values) {
  const bool upper = threadIdx.x & Span;
#pragma unroll
  for (int i = 0; i < Count / 2; ++i) {
    const float kept = upper ? values[i + Count / 2] : values[i], sent = upper ? values[i] : values[i + Count / 2];
    values[i] = kept + __shfl_xor_sync(~0u, sent, Span);
  }
}

// A thread's elements of the states of a warp.
struct State {
  float h[4][4];  // [channel][state element]
};

__device__ __forceinline__ void save_state(unsigned char* to, const State& state) {
#pragma unroll
  for (int n = 0; n < 4; ++n) {
    reinterpret_cast<float4*>(to)[n * 32 + threadIdx.x % 32] =
        make_float4(state.h[0][n], state.h[1][n], state.h[2][n], state.h[3][n]);
  }
}

__device__ __forceinline__ State saved_state(const unsigned char* from) {
  State state;
#pragma unroll
  for (int n = 0; n < 4; ++n) {
    const float4 h = reinterpret_cast<const float4*>(from)[n * 32 + threadIdx.x % 32];
    state.h[0][n] = h.x, state.h[1][n] = h.y, state.h[2][n] = h.z, state.h[3][n] = h.w;
  }
  return state;
}

// Loads four consecutive elements.
__device__ __forceinline__ void load_four(float (&to)[4], const float* from) {
  const float4 loaded = *reinterpret_cast<const float4*>(from);
  to[0] = loaded.x, to[1] = loaded.y, to[2] = loaded.z, to[3] = loaded.w;
}

__device__ __forceinline__ void put_four(float* to, const float* from) {
  *reinterpret_cast<float4*>(to) = make_float4(from[0], from[1], from[2], from[3]);
}

// A lane's view of one warp's block of tokens in shared memory.
template <typename Tile>
struct Inputs {
  using X = typename Tile::X;
  using Step = typename Tile::Step;
  unsigned char* stage;  // x, dy, dt in their original dtypes
  float* floats;         // dt, dt x, dy
  const float* columns;
  int lane;

  // Converts the copied data to float32 once, since several lanes and phases read it. Without `Back` there is no dy.
  template <bool Back>
  __device__ __forceinline__ void convert() const {
    constexpr int kEach = Tile::kTokens * Tile::kChannels / 32;
    float x[kEach], dt[kEach], dy[kEach];
    const int first = lane * kEach;
    load_floats<X>(x, stage + first * sizeof(X));
    load_floats<Step>(dt, stage + 2 * Tile::kXBytes + first * sizeof(Step));
    if (Back) load_floats<X>(dy, stage + Tile::kXBytes + first * sizeof(X));
#pragma unroll
    for (int i = 0; i < kEach; ++i) x[i] *= dt[i];
#pragma unroll
    for (int i = 0; i < kEach; i += 4) {
      put_four(floats + first + i, dt + i);
      put_four(floats + kPlane + first + i, x + i);
      if (Back) put_four(floats + 2 * kPlane + first + i, dy + i);
    }
    __syncwarp();
  }
  __device__ __forceinline__ void dt(float (&to)[4], int t) const { load_four(to, floats + at(t)); }
  __device__ __forceinline__ void written(float (&to)[4], int t) const { load_four(to, floats + kPlane + at(t)); }
  __device__ __forceinline__ void dy(float (&to)[4], int t) const { load_four(to, floats + 2 * kPlane + at(t)); }
  __device__ __forceinline__ void b(float (&to)[4], int t) const {
    load_four(to, columns + t * (2 * Tile::N) + lane % 4 * 4);
  }
  __device__ __forceinline__ void c(float (&to)[4], int t) const {
    load_four(to, columns + t * (2 * Tile::N) + Tile::N + lane % 4 * 4);
  }
  // Inputs of the channel whose sums are in this lane after the reduction.
  __device__ __forceinline__ float own_x(int t) const {
    return to_float(reinterpret_cast<const X*>(stage)[t * Tile::kChannels + lane]);
  }
  __device__ __forceinline__ float own_dt(int t) const { return floats[t * Tile::kChannels + lane]; }
  __device__ __forceinline__ float own_dy(int t) const { return floats[2 * kPlane + t * Tile::kChannels + lane]; }
  // Stores that channel's gradients over x and dt, which no other lane reads any more.
  __device__ __forceinline__ void put(int t, float dx, float dstep) const {
    reinterpret_cast<X*>(stage)[t * Tile::kChannels + lane] = round_to<X>(dx);
    reinterpret_cast<Step*>(stage + 2 * Tile::kXBytes)[t * Tile::kChannels + lane] = round_to<Step>(dstep);
  }

 private:
  static constexpr int kPlane = Tile::kTokens * Tile::kChannels;
  __device__ __forceinline__ int at(int t) const { return t * Tile::kChannels + lane / 4 * 4; }
};

}  // namespace ejkernel::selective_scan
