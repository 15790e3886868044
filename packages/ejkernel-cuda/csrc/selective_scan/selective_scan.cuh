// The selective scan (Mamba-1) forward: a warp scans all tokens of its channels, whose states stay in registers.
//
//   HBM --cp.async--> two stages of a warp: x, dt [tokens][channels]      --LDS--> registers: h, A, y
//                                           B, C  [tokens][2][N]          --LDS--> (one broadcast for all channels)
//   state before every interval, y  <--------------------------------------------- registers
//
// For each token, channel and state element n, with A' = A log2(e):
//
//   h_n = exp2(dt A'_n) h_n + (dt x) B_n          y = sum_n h_n C_n + D x
//
// The lower bound is one exponential per element: the special function units compute 16 per clock and multiprocessor.
// Shared memory delivers 128 bytes per clock and multiprocessor, broadcast or not, so with one channel per thread
// reading B and C of 16 elements would take as long as the exponentials. A thread has `Channels` channels, for which it
// reads B and C once; `Lanes` lanes split the elements of a state, so that there are as many warps as with one channel
// per thread.
//
// Warps share nothing, so a block has no barrier; each warp copies B and C, which the block's other warps find in L2.
//
// Source: Gu & Dao 2023, arXiv:2312.00752.
#pragma once

#include <cstddef>

#include "common/tensor_core.cuh"

namespace ejkernel::selective_scan {

constexpr int kInterval = 64;  // tokens between stored states: INTERVAL of ejkernel.families.selective_scan

// The tokens of one state: a row, or a packed sequence, which has its own initial and final state. Nothing of other
// sequences is read, so their NaN or infinity cannot leak.
struct Span {
  int64_t token;     // its first token, counted over all rows
  int tokens;
  int64_t interval;  // its first stored state, counted over all rows
};

// The packed sequences of each row of tokens; without packing `bounds` is null, and a row has one state.
struct Packing {
  const int* bounds;     // [rows of tokens, sequences + 1], cumulative lengths
  const int* intervals;  // [rows of tokens, sequences + 1], the first interval of each sequence
  int sequences;

  __device__ __forceinline__ Span span(int row, int tokens) const {
    if (bounds == nullptr) {
      return {int64_t(row) * tokens, tokens, int64_t(row) * ((tokens + kInterval - 1) / kInterval)};
    }
    const int pack = row / sequences, at = pack * (sequences + 1) + row % sequences;
    const int first = bounds[at];
    // The upper bound on intervals: `max_num_intervals` of ejkernel.families.selective_scan.packed_scan.
    const int64_t stored = int64_t(pack) * (tokens / kInterval + sequences);
    return {int64_t(pack) * tokens + first, bounds[at + 1] - first, stored + intervals[at]};
  }
  // Calls a function for each padding token; the sequences of a row share them.
  template <typename Zero>
  __device__ __forceinline__ void of_none(int row, int tokens, Zero zero) const {
    if (bounds == nullptr) return;
    const int pack = row / sequences, n = row % sequences;
    const int* own = bounds + pack * (sequences + 1);
    for (int token = n; token < own[0]; token += sequences) zero(int64_t(pack) * tokens + token);
    for (int token = own[sequences] + n; token < tokens; token += sequences) zero(int64_t(pack) * tokens + token);
  }
};

struct SelectiveScan {
  const void* x;         // [rows of tokens, tokens, channels]
  const void* step;      // the same shape, dt
  const float* decay;    // [maps, channels, size], A
  const float* columns;  // [rows of tokens, tokens, 2, N], B and C of a token, padded to N numbers with zeros
  const float* skip;     // [maps, channels], D
  const float* initial;  // [rows, channels, size] or null
  void* output;          // as x
  float* states;         // [rows, intervals, size, channels], before the first token of each
  float* final;          // [rows, channels, size]
  Packing packing;
  int rows, tokens, channels, size;  // rows of states: packed sequences, or rows of tokens
  int rows_a_map;        // rows that share one A and D
};

// A tile of the scan: each thread has `Channels` neighbouring channels, and `Lanes` lanes split the N elements of a
// state.
template <typename X_, typename Step_, int N_, int Channels_, int Lanes_>
struct ScanTile {
  using X = X_;
  using Step = Step_;
  static constexpr int N = N_, Channels = Channels_, Lanes = Lanes_;
  static constexpr int kWarps = 4;
  static constexpr int kTokens = 16;                         // per stage
  static constexpr int kChannels = 32 / Lanes * Channels;    // per warp
  static constexpr int kNumbers = N / Lanes;                 // state elements per thread
  static constexpr int kColumnBytes = kTokens * 2 * N * 4;
  static constexpr int kXBytes = kTokens * kChannels * sizeof(X);
  static constexpr int kStepBytes = kTokens * kChannels * sizeof(Step);
  static constexpr int kStageBytes = kColumnBytes + kXBytes + kStepBytes;
  static constexpr int kWarpBytes = 2 * kStageBytes;
  static constexpr int kBytes = kWarps * kWarpBytes;
  // Tokens per unrolled iteration. A whole stage: 0.765 ms on an H200, 8 tokens 0.789, 4 tokens 0.811
  // (docs/lab/selective_scan_gpu.md).
  static constexpr int kUnrolled = Lanes > 1 ? kTokens : 4;
  // Whether copies have 16 bytes: rows must then start at multiples of 16 bytes, which only some numbers of channels
  // give.
  static constexpr bool kPieces = Lanes > 1;
  static_assert(kInterval % kTokens == 0 && kTokens % kUnrolled == 0 && kUnrolled % Lanes == 0, "");
  static_assert(kNumbers % 4 == 0, "columns are read in 16 bytes");
};

// Consecutive elements in memory, which one access loads or stores.
template <typename T, int Count>
struct alignas(sizeof(T) * Count) Numbers {
  T values[Count];
};

__device__ __forceinline__ float to_float(float x) { return x; }
__device__ __forceinline__ float to_float(__half x) { return __half2float(x); }
__device__ __forceinline__ float to_float(__nv_bfloat16 x) { return __bfloat162float(x); }

// Splits a register into two 16-bit elements, as float32.
template <typename T>
__device__ __forceinline__ void pair_floats(float& low, float& high, uint32_t pair) {
  low = to_float(reinterpret_cast<const T*>(&pair)[0]);
  high = to_float(reinterpret_cast<const T*>(&pair)[1]);
}
template <>
__device__ __forceinline__ void pair_floats<__nv_bfloat16>(float& low, float& high, uint32_t pair) {
  // A bfloat16 is the upper half of the equal float32, so each conversion is one instruction.
  low = __uint_as_float(pair << 16);
  high = __uint_as_float(pair & 0xffff0000u);
}

template <typename T, int Count>
__device__ __forceinline__ void load_floats(float (&to)[Count], const unsigned char* from) {
  if constexpr (sizeof(T) == 2 && Count > 1) {
    const auto loaded = *reinterpret_cast<const Numbers<uint32_t, Count / 2>*>(from);
#pragma unroll
    for (int j = 0; j < Count; j += 2) pair_floats<T>(to[j], to[j + 1], loaded.values[j / 2]);
  } else {
    const auto loaded = *reinterpret_cast<const Numbers<T, Count>*>(from);
#pragma unroll
    for (int j = 0; j < Count; ++j) to[j] = to_float(loaded.values[j]);
  }
}

template <typename T>
__device__ __forceinline__ T round_to(float x) {
  return Half<T>::round(x);
}
template <>
__device__ __forceinline__ float round_to<float>(float x) {
  return x;
}

template <int Count>
__device__ __forceinline__ void round_floats(Numbers<float, Count>& to, const float (&from)[Count]) {
#pragma unroll
  for (int j = 0; j < Count; ++j) to.values[j] = from[j];
}

template <typename T, int Count>
__device__ __forceinline__ void round_floats(Numbers<T, Count>& to, const float (&from)[Count]) {
  if constexpr (Count == 1) {
    to.values[0] = round_to<T>(from[0]);
  } else {
#pragma unroll
    for (int j = 0; j < Count; j += 2) {
      const uint32_t pair = Half<T>::pack(from[j], from[j + 1]);
      *reinterpret_cast<uint32_t*>(&to.values[j]) = pair;
    }
  }
}

// Starts copying [kTokens][kChannels] of a [tokens, channels] array, from `token` on; zeros outside of the array.
template <typename Tile, typename T>
__device__ __forceinline__ void copy_tokens(
    unsigned char* to, const T* from, int tokens, int channels, int first_token, int first_channel) {
  const int lane = threadIdx.x % 32;
  if constexpr (Tile::kPieces) {
    constexpr int kPiece = 16 / sizeof(T), kRow = Tile::kChannels / kPiece, kRows = 32 / kRow;
    static_assert(kRow <= 32 && (Tile::kTokens % kRows == 0 || kRows > Tile::kTokens), "a copy has whole rows");
    if (kRows > Tile::kTokens && lane / kRow >= Tile::kTokens) return;
    const int channel = first_channel + lane % kRow * kPiece;
#pragma unroll
    for (int t = 0; t < Tile::kTokens; t += kRows) {
      const int token = first_token + t + lane / kRow;
      const bool there = token < tokens && channel < channels;
      // A copy of 0 bytes reads nothing, so its source may be out of bounds.
      const T* source = from + size_t(token) * channels + channel;
      copy_async(shared_address(to) + t * Tile::kChannels * sizeof(T) + lane * 16, source, there ? 16 : 0);
    }
  } else {
    const int channel = first_channel + lane;
    T loaded[Tile::kTokens];
#pragma unroll
    for (int t = 0; t < Tile::kTokens; ++t) {
      const int token = first_token + t;
      const bool there = token < tokens && channel < channels;
      loaded[t] = there ? from[size_t(token) * channels + channel] : T(0.f);
    }
#pragma unroll
    for (int t = 0; t < Tile::kTokens; ++t) reinterpret_cast<T*>(to)[t * Tile::kChannels + lane] = loaded[t];
  }
}

// Starts copying B and C of a stage's tokens, which are contiguous.
template <typename Tile>
__device__ __forceinline__ void copy_columns(
    unsigned char* to, const float* columns, int tokens, int first_token) {
  constexpr int kPieces = Tile::kColumnBytes / 16, kTokenPieces = Tile::N * 2 / 4;
  const int lane = threadIdx.x % 32;
#pragma unroll
  for (int pass = 0; pass < kPieces / 32; ++pass) {
    const int piece = pass * 32 + lane;
    const bool there = first_token + piece / kTokenPieces < tokens;
    const float* source = columns + size_t(first_token) * (Tile::N * 2) + piece * 4;
    copy_async(shared_address(to) + piece * 16, source, there ? 16 : 0);
  }
}

// The thread's elements of B and C of a token.
template <int Count>
struct Columns {
  float b[Count], c[Count];
};

template <typename Tile>
__device__ __forceinline__ Columns<Tile::kNumbers> load_columns(const float* from) {
  Columns<Tile::kNumbers> columns;
#pragma unroll
  for (int n = 0; n < Tile::kNumbers; n += 4) {
    const float4 b = *reinterpret_cast<const float4*>(from + n);
    const float4 c = *reinterpret_cast<const float4*>(from + Tile::N + n);
    columns.b[n] = b.x, columns.b[n + 1] = b.y, columns.b[n + 2] = b.z, columns.b[n + 3] = b.w;
    columns.c[n] = c.x, columns.c[n + 1] = c.y, columns.c[n + 2] = c.z, columns.c[n + 3] = c.w;
  }
  return columns;
}

// Adds up outputs over the lanes of a state. Lane l keeps the tokens t with t % Lanes == l: lanes exchange halves,
// which takes one shuffle per channel and token less than a butterfly reduction of each token.
template <int Lanes, int Channels>
__device__ __forceinline__ void sum_lanes(float (&sum)[Channels], float (&outputs)[Lanes][Channels]) {
#pragma unroll
  for (int span = Lanes / 2; span > 0; span /= 2) {
    const bool upper = threadIdx.x & span;
#pragma unroll
    for (int t = 0; t < span; ++t) {
#pragma unroll
      for (int j = 0; j < Channels; ++j) {
        const float kept = upper ? outputs[t + span][j] : outputs[t][j];
        const float sent = upper ? outputs[t][j] : outputs[t + span][j];
        outputs[t][j] = kept + __shfl_xor_sync(~0u, sent, span);
      }
    }
  }
#pragma unroll
  for (int j = 0; j < Channels; ++j) sum[j] = outputs[0][j];
}

template <typename Tile>
__global__ void __launch_bounds__(Tile::kWarps * 32, 2) scan_kernel(const __grid_constant__ SelectiveScan call) {
  using X = typename Tile::X;
  using Step = typename Tile::Step;
  constexpr int kNumbers = Tile::kNumbers, Channels = Tile::Channels, Lanes = Tile::Lanes;
  extern __shared__ __align__(128) unsigned char shared[];
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, part = lane % Lanes;
  const int row_warps = (call.channels + Tile::kChannels - 1) / Tile::kChannels;
  const int64_t item = int64_t(blockIdx.x) * Tile::kWarps + warp;
  const int row = int(item / row_warps), first_channel = int(item % row_warps) * Tile::kChannels;
  if (row >= call.rows) return;
  const int channel = first_channel + lane / Lanes * Channels;
  const bool there = channel < call.channels;  // a thread's channels are all valid or all out of bounds
  const size_t map_channel = size_t(row / call.rows_a_map) * call.channels + channel;
  const size_t row_channel = size_t(row) * call.channels + channel;

  float state[Channels][kNumbers], rates[Channels][kNumbers], skip[Channels];
#pragma unroll
  for (int j = 0; j < Channels; ++j) {
#pragma unroll
    for (int n = 0; n < kNumbers; ++n) {
      const int number = part * kNumbers + n;
      // Padded state elements have a rate and a B of 0, so their state stays 0.
      const bool given = there && number < call.size;
      rates[j][n] = given ? call.decay[(map_channel + j) * call.size + number] * 1.4426950408889634f : 0.f;
      state[j][n] = given && call.initial != nullptr ? call.initial[(row_channel + j) * call.size + number] : 0.f;
    }
    // Only one of the lanes of a channel adds D x.
    skip[j] = there && part == 0 ? call.skip[map_channel + j] : 0.f;
  }

  const Span span = call.packing.span(row, call.tokens);
  const int tokens = span.tokens;
  const X* x = static_cast<const X*>(call.x) + size_t(span.token) * call.channels;
  const Step* step = static_cast<const Step*>(call.step) + size_t(span.token) * call.channels;
  const float* columns = call.columns + size_t(span.token) * (2 * Tile::N);
  X* output = static_cast<X*>(call.output) + size_t(span.token) * call.channels + channel;
  float* states = call.states + size_t(span.interval) * call.size * call.channels;
  unsigned char* stages = shared + warp * Tile::kWarpBytes;
  const auto copy = [&](int first_token, int stage) {
    unsigned char* to = stages + stage * Tile::kStageBytes;
    copy_columns<Tile>(to, columns, tokens, first_token);
    to += Tile::kColumnBytes;
    copy_tokens<Tile>(to, x, tokens, call.channels, first_token, first_channel);
    copy_tokens<Tile>(to + Tile::kXBytes, step, tokens, call.channels, first_token, first_channel);
  };

  copy(0, 0);
  commit_copies();
  for (int first_token = 0, stage = 0; first_token < tokens; first_token += Tile::kTokens, stage ^= 1) {
    wait_for_copies<0>();
    // All lanes' copies have arrived, and no lane reads the other stage any more.
    __syncwarp();
    if (first_token + Tile::kTokens < tokens) copy(first_token + Tile::kTokens, stage ^ 1);
    commit_copies();
    if (first_token % kInterval == 0 && there) {
      float* to = states + size_t(first_token / kInterval) * call.size * call.channels + channel;
#pragma unroll
      for (int n = 0; n < kNumbers; ++n) {
        const int number = part * kNumbers + n;
        Numbers<float, Channels> stored;
#pragma unroll
        for (int j = 0; j < Channels; ++j) stored.values[j] = state[j][n];
        if (number < call.size) {
          *reinterpret_cast<Numbers<float, Channels>*>(to + size_t(number) * call.channels) = stored;
        }
      }
    }
    const unsigned char* from = stages + stage * Tile::kStageBytes;
    const float* token_columns = reinterpret_cast<const float*>(from) + part * kNumbers;
    const unsigned char* token_x = from + Tile::kColumnBytes + lane / Lanes * Channels * sizeof(X);
    const unsigned char* token_step =
        from + Tile::kColumnBytes + Tile::kXBytes + lane / Lanes * Channels * sizeof(Step);
    // Tokens whose output this lane stores; none for a channel out of bounds.
    const int left = there ? tokens - first_token - part : 0;
    X* to = output + size_t(first_token + part) * call.channels;
    Columns<kNumbers> now = load_columns<Tile>(token_columns);
    for (int t0 = 0; t0 < Tile::kTokens; t0 += Tile::kUnrolled) {
      float outputs[Lanes][Channels];
#pragma unroll
      for (int u = 0; u < Tile::kUnrolled; ++u) {
        const int t = t0 + u;
        // Loads the columns of the next token during the arithmetic of this one; the last token reloads its own.
        const int after = min(t + 1, Tile::kTokens - 1);
        const Columns<kNumbers> next = load_columns<Tile>(token_columns + after * (2 * Tile::N));
        float xs[Channels], steps[Channels];
        load_floats<X>(xs, token_x + t * Tile::kChannels * sizeof(X));
        load_floats<Step>(steps, token_step + t * Tile::kChannels * sizeof(Step));
#pragma unroll
        for (int j = 0; j < Channels; ++j) {
          const float written = steps[j] * xs[j];
          float sum = skip[j] * xs[j];
#pragma unroll
          for (int n = 0; n < kNumbers; ++n) {
            state[j][n] = exp2_fast(rates[j][n] * steps[j]) * state[j][n] + written * now.b[n];
            sum += state[j][n] * now.c[n];
          }
          outputs[u % Lanes][j] = sum;
        }
        if (u % Lanes == Lanes - 1) {
          float sum[Channels];
          sum_lanes(sum, outputs);
          Numbers<X, Channels> rounded;
          round_floats(rounded, sum);
          if (t - (Lanes - 1) < left) *reinterpret_cast<Numbers<X, Channels>*>(to) = rounded;
          to += size_t(Lanes) * call.channels;
        }
        now = next;
      }
    }
  }
  call.packing.of_none(row, call.tokens, [&](int64_t token) {
    for (int c = first_channel + lane; c < min(first_channel + Tile::kChannels, call.channels); c += 32) {
      static_cast<X*>(call.output)[token * call.channels + c] = round_to<X>(0.f);
    }
  });
  if (!there) return;
#pragma unroll
  for (int j = 0; j < Channels; ++j) {
#pragma unroll
    for (int n = 0; n < kNumbers; ++n) {
      const int number = part * kNumbers + n;
      if (number < call.size) call.final[(row_channel + j) * call.size + number] = state[j][n];
    }
  }
}

}  // namespace ejkernel::selective_scan
