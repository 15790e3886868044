// What a block of the backward selective scan has in shared memory, and how its threads read it.
#pragma once

#include "selective_scan.cuh"

namespace ejkernel {

constexpr int kGradientChannels = 128;  // of a warpgroup, whose sums over channels are one

struct ScanGradient {
  const void *x, *step;  // [rows of tokens, tokens, channels]
  const float* decay;    // [maps, channels, size], A
  const float* columns;  // [rows of tokens, tokens, 2, 16], B and C of a token, padded with zeros
  const float* skip;     // [maps, channels], D
  const float* states;   // [rows, intervals, size, channels], before the first token of each
  const void* cotangent; // as x, dy
  const float* behind;   // [rows, channels, size], the cotangent of the final states
  void *dx, *dstep;      // as x and step
  float* partial;        // [rows of tokens, warpgroups of a row, tokens, 2, 16], dB and dC of a warpgroup's channels
  float* ddecay;         // [rows, channels, size]
  float* dskip;          // [rows, channels]
  float* dfirst;         // [rows, channels, size], the cotangent of the initial states
  Packing packing;
  int rows, tokens, channels, size;  // rows of states: packed sequences, or rows of tokens
  int rows_a_map;        // rows that share A and D
};

// Warpgroups of a block, which share nothing but a start.
template <typename X_, typename Step_, int Warpgroups_>
struct GradientTile {
  static constexpr int kWarpgroups = Warpgroups_;
  using X = X_;
  using Step = Step_;
  static constexpr int N = 16, Channels = 4, Lanes = 4, kNumbers = 4;  // of a thread
  static constexpr int kWarps = 4, kThreads = kWarps * 32;  // of a warpgroup
  static constexpr int kStages = sizeof(X) == 4 ? 2 : 3;  // two warpgroups a multiprocessor
  static constexpr int kTokens = 8, kHalf = 4;  // of a block of tokens
  static constexpr int kBlocks = kInterval / kTokens;
  static constexpr int kChannels = 32;          // of a warp
  static constexpr bool kPieces = true;
  static constexpr int kXBytes = kTokens * kChannels * sizeof(X);
  static constexpr int kStepBytes = kTokens * kChannels * sizeof(Step);
  static constexpr int kWarpStageBytes = 2 * kXBytes + kStepBytes;       // x, dy, dt
  static constexpr int kColumnBytes = kTokens * 2 * N * 4;
  static constexpr int kStageBytes = kWarps * kWarpStageBytes + kColumnBytes;
  static constexpr int kStateBytes = kChannels * N * 4;                  // of a warp
  static constexpr int kSumBytes = kTokens * 2 * N * 4;                  // of a warp
  static constexpr int kStates = kStages * kStageBytes;                  // offsets in shared memory
  static constexpr int kSums = kStates + kWarps * kBlocks * kStateBytes;
  static constexpr int kFloats = kSums + 2 * kWarps * kSumBytes;
  static constexpr int kFloatBytes = 3 * kTokens * kChannels * 4;        // of a warp: dt, dt x, dy
  static constexpr int kBytes = kFloats + kWarps * kFloatBytes;
  static_assert(kWarps * kChannels == kGradientChannels, "");
};

// Where the scan is: a block of tokens of an interval, forwards or backwards.
struct Cursor {
  int token;             // the block's first
  int first, last;       // first tokens of the interval's first and last block; `first` < 0 behind the last step
  bool entered, back;    // whether it is the interval's first step, and whether it goes backwards

  __device__ __forceinline__ void enter(int interval_token, int tokens) {
    token = first = interval_token;
    last = min(first + kInterval, (tokens + 7) & ~7) - 8;
    entered = true;
    back = first == last;
  }
  // Blocks 0, 1, .. forwards, then from the last on backwards: the last is not scanned forwards.
  __device__ __forceinline__ void advance(int tokens) {
    if (back && token == first) return enter(first - kInterval, tokens);
    entered = false;
    token += back ? -8 : 8;
    back |= token == last;
  }
};

// Halves `Count` sums of this lane and of the one whose bit `Span` differs: each keeps the sums of one half.
template <int Span, int Count>
__device__ __forceinline__ void exchange(float* values) {
  const bool upper = threadIdx.x & Span;
#pragma unroll
  for (int i = 0; i < Count / 2; ++i) {
    const float kept = upper ? values[i + Count / 2] : values[i], sent = upper ? values[i] : values[i + Count / 2];
    values[i] = kept + __shfl_xor_sync(~0u, sent, Span);
  }
}

// A thread's share of the states of a warp.
struct State {
  float h[4][4];  // [channel][number]
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

// Four numbers that follow each other.
__device__ __forceinline__ void load_four(float (&to)[4], const float* from) {
  const float4 loaded = *reinterpret_cast<const float4*>(from);
  to[0] = loaded.x, to[1] = loaded.y, to[2] = loaded.z, to[3] = loaded.w;
}

__device__ __forceinline__ void put_four(float* to, const float* from) {
  *reinterpret_cast<float4*>(to) = make_float4(from[0], from[1], from[2], from[3]);
}

// A block of tokens of a warp in shared memory, as a lane reads it.
template <typename Tile>
struct Inputs {
  using X = typename Tile::X;
  using Step = typename Tile::Step;
  unsigned char* stage;  // x, dy, dt as they were copied
  float* floats;         // dt, dt x, dy
  const float* columns;
  int lane;

  // Converts what was copied: once, where several lanes and passes read it. Without `Back` there is no dy.
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
  // Those of the channel whose sums this lane ends with.
  __device__ __forceinline__ float own_x(int t) const {
    return to_float(reinterpret_cast<const X*>(stage)[t * Tile::kChannels + lane]);
  }
  __device__ __forceinline__ float own_dt(int t) const { return floats[t * Tile::kChannels + lane]; }
  __device__ __forceinline__ float own_dy(int t) const { return floats[2 * kPlane + t * Tile::kChannels + lane]; }
  // That channel's gradients take the place of x, which no other lane reads any more, and of dt.
  __device__ __forceinline__ void put(int t, float dx, float dstep) const {
    reinterpret_cast<X*>(stage)[t * Tile::kChannels + lane] = round_to<X>(dx);
    reinterpret_cast<Step*>(stage + 2 * Tile::kXBytes)[t * Tile::kChannels + lane] = round_to<Step>(dstep);
  }

 private:
  static constexpr int kPlane = Tile::kTokens * Tile::kChannels;
  __device__ __forceinline__ int at(int t) const { return t * Tile::kChannels + lane / 4 * 4; }
};

}  // namespace ejkernel
