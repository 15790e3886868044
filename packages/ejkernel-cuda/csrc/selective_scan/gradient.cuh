// The backward selective scan: recomputes states forwards, and propagates their cotangents backwards.
//
//   interval of 64 tokens, the last first, from the state that the forward pass stored before it:
//     1. forwards: the states before its blocks of 8 tokens go to shared memory
//     2. for every block, the last first, and in it for each half of 4 tokens, the last first:
//          forwards   w_t = a_t h_{t-1} and a_t of 4 tokens, in registers
//          backwards  cotangents G, in registers, and all gradients
//
//   g_t = G_{t+1} + C_t dy_t        dx = dt s1 + D dy      s1 = sum over n of g B      dB = sum over channels of g dt x
//   G_t = a_t g_t                   ddt = x s1 + s2        s2 = sum over n of A g w    dC = sum over channels of dy h
//   a_t = exp(dt A)                 dA = sum over tokens of dt g w                     h_t = w_t + dt x B
//
// Using w instead of h, half a block does not need the state before it: g w is a g h_{t-1}, and dC is a sum over w plus
// a product with B. Recovering h_{t-1} by a division by a_t would lose all digits where a_t is small.
//
// A thread has 4 channels and 4 elements of their states, so that 8 lanes share a sum over the 32 channels of a warp
// and 4 lanes a sum over the 16 elements of a state. Both sums exchange halves: 7 and 6 shuffles per token. A warpgroup
// adds up the sums of its warps in a fixed order, and XLA those of warpgroups: without atomics, results are
// reproducible bit for bit.
//
// Source: Gu & Dao 2023, arXiv:2312.00752.
#pragma once

#include "selective_scan/inputs.cuh"

namespace ejkernel::selective_scan {

// Advances the states by `Count` tokens.
template <typename Tile, int Count>
__device__ __forceinline__ void advance_state(State& state, const float (&rates)[4][4], const Inputs<Tile>& inputs) {
#pragma unroll
  for (int t = 0; t < Count; ++t) {
    float dt[4], written[4], b[4];
    inputs.dt(dt, t), inputs.written(written, t), inputs.b(b, t);
#pragma unroll
    for (int j = 0; j < 4; ++j) {
#pragma unroll
      for (int n = 0; n < 4; ++n) {
        state.h[j][n] = exp2_fast(rates[j][n] * dt[j]) * state.h[j][n] + written[j] * b[n];
      }
    }
  }
}

// Stores [kTokens][kChannels] to a [tokens, channels] array, from `token` on: the reverse of `copy_tokens`.
template <typename Tile, typename T>
__device__ __forceinline__ void store_tokens(
    T* to, const unsigned char* from, int tokens, int channels, int first_token, int first_channel) {
  constexpr int kPiece = 16 / sizeof(T), kRow = Tile::kChannels / kPiece, kRows = 32 / kRow;
  const int lane = threadIdx.x % 32, channel = first_channel + lane % kRow * kPiece;
#pragma unroll
  for (int t = 0; t < Tile::kTokens; t += kRows) {
    const int token = first_token + t + lane / kRow;
    if (token < tokens && channel < channels) {
      *reinterpret_cast<uint4*>(to + size_t(token) * channels + channel) =
          reinterpret_cast<const uint4*>(from + t * Tile::kChannels * sizeof(T))[lane];
    }
  }
}

// The sums that a thread carries backwards from token to token.
struct Cotangents {
  float g[4][4];       // G: of the states after the tokens that remain
  float ddecay[4][4];
  float dskip;         // of the lane's channel in `Inputs::own_x`
};

// Computes the gradients of half a block of tokens from the states before it.
template <typename Tile>
__device__ __forceinline__ void half_gradients(
    State& state, Cotangents& sums, const float (&rates)[4][4], float skip, const Inputs<Tile>& inputs, int first,
    float* columns_sums) {
  float w[Tile::kHalf][4][4], a[Tile::kHalf][4][4];
  // Stored after all tokens: a store between two tokens would keep the next one's loads from overlapping the shuffles.
  float column[Tile::kHalf], dx[Tile::kHalf], dstep[Tile::kHalf];
  const int lane = threadIdx.x % 32;
#pragma unroll
  for (int u = 0; u < Tile::kHalf; ++u) {
    float dt[4], written[4], b[4];
    inputs.dt(dt, first + u), inputs.written(written, first + u), inputs.b(b, first + u);
#pragma unroll
    for (int j = 0; j < 4; ++j) {
#pragma unroll
      for (int n = 0; n < 4; ++n) {
        a[u][j][n] = exp2_fast(rates[j][n] * dt[j]);
        w[u][j][n] = a[u][j][n] * state.h[j][n];
        state.h[j][n] = w[u][j][n] + written[j] * b[n];
      }
    }
  }
#pragma unroll
  for (int u = Tile::kHalf - 1; u >= 0; --u) {
    const int t = first + u;
    float dt[4], written[4], dy[4], b[4], c[4];
    inputs.dt(dt, t), inputs.written(written, t), inputs.dy(dy, t), inputs.b(b, t), inputs.c(c, t);
    float of_channels[8] = {};  // dB and dC
    float of_numbers[8];        // s1 and s2 of channels 0 and 1, then of 2 and 3
    float both = 0.f;           // sum over channels of dt x dy: the term of dC that is a multiple of B
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      float s1 = 0.f, s2 = 0.f;
      both += written[j] * dy[j];
#pragma unroll
      for (int n = 0; n < 4; ++n) {
        const float g = sums.g[j][n] + c[n] * dy[j];
        const float decayed = g * w[u][j][n];
        sums.g[j][n] = a[u][j][n] * g;
        sums.ddecay[j][n] += dt[j] * decayed;
        s1 += g * b[n];
        s2 += rates[j][n] * decayed;
        of_channels[n] += g * written[j];
        of_channels[4 + n] += w[u][j][n] * dy[j];
      }
      of_numbers[j / 2 * 4 + j % 2] = s1;
      of_numbers[j / 2 * 4 + 2 + j % 2] = s2;
    }
#pragma unroll
    for (int n = 0; n < 4; ++n) of_channels[4 + n] += both * b[n];
    // Each lane ends with one of 8 sums over channels, of its 4 state elements: its upper index bits say which.
    exchange<16, 8>(of_channels);
    exchange<8, 4>(of_channels);
    exchange<4, 2>(of_channels);
    column[u] = of_channels[0];
    // Each lane also ends with the sums of one of its 4 channels, the warp's channel of the lane's index.
    exchange<2, 8>(of_numbers);
    float s1[2] = {of_numbers[0], of_numbers[1]}, s2[2] = {of_numbers[2], of_numbers[3]};
    exchange<1, 2>(s1);
    exchange<1, 2>(s2);
    const float own_dy = inputs.own_dy(t), own_x = inputs.own_x(t);
    sums.dskip += own_dy * own_x;
    // `rates` is A log2(e), so the gradient is multiplied by ln 2.
    dx[u] = s1[0] * inputs.own_dt(t) + skip * own_dy;
    dstep[u] = s1[0] * own_x + s2[0] * 0.6931471805599453f;
  }
#pragma unroll
  for (int u = 0; u < Tile::kHalf; ++u) {
    const int t = first + u;
    columns_sums[t * (2 * Tile::N) + lane / 16 * Tile::N + lane % 4 * 4 + lane / 4 % 4] = column[u];
    inputs.put(t, dx[u], dstep[u]);
  }
}

constexpr int kStartBarrier = 3;  // follows the warpgroups' barriers

// Named barriers: waits until `threads` threads have arrived, or arrives without waiting.
__device__ __forceinline__ void sync_threads(int barrier, int threads) {
  asm volatile("bar.sync %0, %1;" ::"r"(barrier), "r"(threads) : "memory");
}
__device__ __forceinline__ void arrive_threads(int barrier, int threads) {
  asm volatile("bar.arrive %0, %1;" ::"r"(barrier), "r"(threads) : "memory");
}

template <typename Tile>
__global__ void __launch_bounds__(Tile::kThreads * Tile::kWarpgroups, 2 / Tile::kWarpgroups)
    gradient_kernel(const __grid_constant__ ScanGradient call) {
  using X = typename Tile::X;
  using Step = typename Tile::Step;
  extern __shared__ __align__(128) unsigned char all_shared[];
  // The shuffle tells the compiler that the value is uniform in a warp.
  const int warpgroup = __shfl_sync(~0u, int(threadIdx.x) / Tile::kThreads, 0);
  const int thread = threadIdx.x % Tile::kThreads, warp = thread / 32, lane = thread % 32, part = lane % 4;
  unsigned char* shared = all_shared + warpgroup * Tile::kBytes;
  const int row_warpgroups = (call.channels + kGradientChannels - 1) / kGradientChannels;
  const int item = blockIdx.x * Tile::kWarpgroups + warpgroup, row = item / row_warpgroups;
  if (row >= call.rows) return;
  // Channels are a multiple of 8, so a thread's channels are all valid or all out of bounds.
  const int warp_channel = item % row_warpgroups * kGradientChannels + warp * Tile::kChannels;
  const int channel = warp_channel + lane / 4 * 4;
  const bool there = channel < call.channels, own_there = warp_channel + lane < call.channels;
  const size_t row_channel = size_t(row) * call.channels + channel;
  const size_t shared_row = size_t(row / call.rows_a_map) * call.channels;  // of A and D

  Cotangents sums;
  float rates[4][4];
#pragma unroll
  for (int j = 0; j < 4; ++j) {
#pragma unroll
    for (int n = 0; n < 4; ++n) {
      const int number = part * 4 + n;
      const bool given = there && number < call.size;
      rates[j][n] = given ? call.decay[(shared_row + channel + j) * call.size + number] * 1.4426950408889634f : 0.f;
      sums.g[j][n] = given ? call.behind[(row_channel + j) * call.size + number] : 0.f;
      sums.ddecay[j][n] = 0.f;
    }
  }
  sums.dskip = 0.f;
  const float skip = own_there ? call.skip[shared_row + warp_channel + lane] : 0.f;

  const Span span = call.packing.span(row, call.tokens);
  const int tokens = span.tokens;
  const size_t row_tokens = span.token;
  const X* x = static_cast<const X*>(call.x) + row_tokens * call.channels;
  const X* cotangent = static_cast<const X*>(call.cotangent) + row_tokens * call.channels;
  const Step* step = static_cast<const Step*>(call.step) + row_tokens * call.channels;
  const float* columns = call.columns + row_tokens * (2 * Tile::N);
  X* dx = static_cast<X*>(call.dx) + row_tokens * call.channels;
  Step* dstep = static_cast<Step*>(call.dstep) + row_tokens * call.channels;
  // Warpgroup w of a row of tokens stores to [w, tokens]; packed sequences share that row, each with its own tokens.
  const int64_t row_of_tokens = call.packing.bounds == nullptr ? row : row / call.packing.sequences;
  const int64_t sums_row = row_of_tokens * row_warpgroups + item % row_warpgroups;
  float* row_partial = call.partial + size_t(sums_row) * call.tokens * (2 * Tile::N);
  float* partial = row_partial + size_t(span.token - row_of_tokens * call.tokens) * (2 * Tile::N);
  const int intervals = (tokens + kInterval - 1) / kInterval;
  unsigned char* states = shared + Tile::kStates + warp * (Tile::kBlocks * Tile::kStateBytes);
  float* floats = reinterpret_cast<float*>(shared + Tile::kFloats + warp * Tile::kFloatBytes);
  float* column_sums = reinterpret_cast<float*>(shared + Tile::kSums);

  const auto copy = [&](const Cursor& at, int stage) {
    unsigned char* to = shared + stage * Tile::kStageBytes;
    if (thread < Tile::kColumnBytes / 16) {
      const bool given = at.token + thread / 8 < tokens;
      const float* from = columns + size_t(at.token) * (2 * Tile::N) + thread * 4;
      copy_async(shared_address(to + Tile::kWarps * Tile::kWarpStageBytes) + thread * 16, from, given ? 16 : 0);
    }
    to += warp * Tile::kWarpStageBytes;
    copy_tokens<Tile>(to, x, tokens, call.channels, at.token, warp_channel);
    if (at.back) {
      copy_tokens<Tile>(to + Tile::kXBytes, cotangent, tokens, call.channels, at.token, warp_channel);
    }
    copy_tokens<Tile>(to + 2 * Tile::kXBytes, step, tokens, call.channels, at.token, warp_channel);
  };
  // Adds up dB and dC of a block of tokens over the warps.
  const auto flush = [&](int token, int buffer) {
    const float2* sums = reinterpret_cast<const float2*>(column_sums + buffer * Tile::kWarps * (Tile::kSumBytes / 4));
    float2 total = sums[thread];
#pragma unroll
    for (int w = 1; w < Tile::kWarps; ++w) {
      const float2 sum = sums[w * (Tile::kSumBytes / 8) + thread];
      total.x += sum.x, total.y += sum.y;
    }
    if (token + thread / 16 < tokens) {
      reinterpret_cast<float2*>(partial)[token * Tile::N + thread] = total;
    }
  };
  static_assert(Tile::kTokens * 2 * Tile::N == Tile::kThreads * 2, "a thread adds up two sums");

  Cursor now, ahead;
  now.enter((intervals - 1) * kInterval, tokens);  // for an empty sequence, past its end
  ahead = now;
#pragma unroll 1
  for (int stage = 0; stage < Tile::kStages - 1; ++stage) {
    if (ahead.first >= 0) copy(ahead, stage), ahead.advance(tokens);
    commit_copies();
  }
  // Ping-pong scheduling: the second warpgroup starts when the first begins its backward phase. The forward phase is
  // limited by exponentials, the backward phase by instruction issue, and each scheduler has a warp in either.
  bool other_waits = Tile::kWarpgroups == 2 && warpgroup == 0;
  if (warpgroup == 1) sync_threads(kStartBarrier, 2 * Tile::kThreads);
  State state;
  int flushed = -1;  // the block of tokens whose sums are complete after the next barrier
  int stage = 0, buffer = 0;
  for (; now.first >= 0; now.advance(tokens), buffer ^= 1) {
    wait_for_copies<Tile::kStages - 2>();
    // The warpgroup's copies of this step have arrived, no thread reads the stage of the last step any more, and the
    // last step's sums are in shared memory.
    sync_threads(1 + warpgroup, Tile::kThreads);
    if (flushed >= 0) flush(flushed, buffer ^ 1);
    flushed = -1;
    const int free_stage = stage == 0 ? Tile::kStages - 1 : stage - 1;
    if (ahead.first >= 0) copy(ahead, free_stage), ahead.advance(tokens);
    commit_copies();
    unsigned char* from = shared + stage * Tile::kStageBytes;
    const Inputs<Tile> inputs{
        from + warp * Tile::kWarpStageBytes, floats,
        reinterpret_cast<const float*>(from + Tile::kWarps * Tile::kWarpStageBytes), lane};
    if (now.entered) {
      // The state that the forward pass stored: before the interval's first token.
      const size_t interval = span.interval + now.first / kInterval;
      const float* stored = call.states + interval * call.size * call.channels + channel;
#pragma unroll
      for (int n = 0; n < 4; ++n) {
        const int number = part * 4 + n;
        const bool given = there && number < call.size;
        float4 h = {0.f, 0.f, 0.f, 0.f};
        if (given) h = *reinterpret_cast<const float4*>(stored + size_t(number) * call.channels);
        state.h[0][n] = h.x, state.h[1][n] = h.y, state.h[2][n] = h.z, state.h[3][n] = h.w;
      }
    }
    unsigned char* saved = states + (now.token - now.first) / 8 * Tile::kStateBytes;
    if (!now.back || now.token == now.last) save_state(saved, state);
    if (!now.back) {
      inputs.template convert<false>();
      advance_state<Tile, Tile::kTokens>(state, rates, inputs);
    } else {
      if (other_waits) arrive_threads(kStartBarrier, 2 * Tile::kThreads);
      other_waits = false;
      inputs.template convert<true>();
      float* warp_sums = column_sums + (buffer * Tile::kWarps + warp) * (Tile::kSumBytes / 4);
#pragma unroll 1
      for (int first = Tile::kTokens - Tile::kHalf; first >= 0; first -= Tile::kHalf) {
        // A lane reads only what it saved itself.
        state = saved_state(saved);
        if (first > 0) advance_state<Tile, Tile::kHalf>(state, rates, inputs);
        half_gradients<Tile>(state, sums, rates, skip, inputs, first, warp_sums);
      }
      __syncwarp();
      store_tokens<Tile>(dx, inputs.stage, tokens, call.channels, now.token, warp_channel);
      store_tokens<Tile>(
          dstep, inputs.stage + 2 * Tile::kXBytes, tokens, call.channels, now.token, warp_channel);
      flushed = now.token;
    }
    stage = stage == Tile::kStages - 1 ? 0 : stage + 1;
  }
  // Release the other warpgroup, which still waits if this one's sequence was empty.
  if (other_waits) arrive_threads(kStartBarrier, 2 * Tile::kThreads);
  sync_threads(1 + warpgroup, Tile::kThreads);
  if (flushed >= 0) flush(flushed, buffer ^ 1);
  call.packing.of_none(row, call.tokens, [&](int64_t token) {
    if (own_there) {
      static_cast<X*>(call.dx)[token * call.channels + warp_channel + lane] = round_to<X>(0.f);
      static_cast<Step*>(call.dstep)[token * call.channels + warp_channel + lane] = round_to<Step>(0.f);
    }
    if (thread < 2 * Tile::N) row_partial[(token - row_of_tokens * call.tokens) * (2 * Tile::N) + thread] = 0.f;
  });
  if (own_there) call.dskip[size_t(row) * call.channels + warp_channel + lane] = sums.dskip;
  if (!there) return;
#pragma unroll
  for (int j = 0; j < 4; ++j) {
#pragma unroll
    for (int n = 0; n < 4; ++n) {
      const int number = part * 4 + n;
      if (number < call.size) {
        call.ddecay[(row_channel + j) * call.size + number] = sums.ddecay[j][n];
        call.dfirst[(row_channel + j) * call.size + number] = sums.g[j][n];
      }
    }
  }
}

}  // namespace ejkernel::selective_scan
