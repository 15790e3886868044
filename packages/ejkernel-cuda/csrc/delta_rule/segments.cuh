// Segments of a long row. Rows and heads may be too few for all multiprocessors, so blocks scan a row's segments at the
// same time. Each needs the state before its first chunk:
//
//   row        |   segment 0   |   segment 1   |   segment 2   |
//   with delta |               |
//                        [.....|---------------|                  a block begins where the decay up to its segment
//                                                                 vanishes, from zeros, and stores nothing before it
//   without    |   |   |   |   |                                  parts of segments give states from zeros, which a
//                                                                 kernel of its own adds up (segment_states.cuh)
//
// Both are exact: what is left out is multiplied by less than float32's smallest normal number. With the delta rule a row
// whose decay does not vanish is scanned from its first chunk by the blocks of all segments.
#pragma once

#include "common/logarithms.cuh"
#include "common/tensor_core.cuh"

namespace ejkernel::delta_rule {

constexpr int kChunkTokens = 64, kKeyDim = 128, kBlockValues = 64;
constexpr float kMinLog2Gate = -150.0f;  // powers of two, in which exp2 is 0
constexpr float kVanishedLog2 = -126.0f, kSmallestNormal = 1.17549435e-38f;  // float32's smallest normal number

struct DeltaCall {
  const float* gates;    // [B, T, H], log gates; null without gates
  const float* beta;     // [B, T, H]; without the delta rule, factors on what tokens write, or null
  const float* skip;     // [H], factors on what tokens' own values add to outputs; not with the delta rule; or null
  const float* initial_states;  // [B, H, K, V]; null for zeros. Of the reverse scan, gradients of the final states
  float* final_states;          // [B, H, K, V]
  const float* segment_states;  // [B, segments - 1, H, K, V], before all but the first segment; null with the delta rule
  const __nv_bfloat16* keys;    // [B, T, key heads, K]
  int tokens, chunks, heads, query_heads, key_heads, value_heads, value_dim, segments;
  float scale;

  __host__ __device__ int segment_steps() const { return (chunks + segments - 1) / segments; }
};

// Steps of a scan, one a chunk: those of a block, which stores nothing before `stored`.
struct StepRange {
  int first, stored, end;
};

// What a block scans. It is in shared memory, since the state's threads have no registers to spare.
struct Work : StepRange {
  int head, row, first_value;
};

// The chunk of a scan's step.
template <bool Reverse>
__device__ __forceinline__ int chunk_of_step(const DeltaCall& call, int step) {
  return Reverse ? call.chunks - 1 - step : step;
}

// A log gate in powers of two, so that sums are finite. NaN stays NaN.
__device__ __forceinline__ float clamped_log2_gate(float gate) {
  const float log2 = gate * kLog2e;
  return log2 < kMinLog2Gate ? kMinLog2Gate : log2;
}

// The sum of a chunk's log2 gates, of which each lane returns its own part.
__device__ __forceinline__ float lane_log2_decay(const DeltaCall& call, int row, int head, int chunk) {
  float sum = 0.0f;
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    const int token = chunk * kChunkTokens + i * 32 + int(threadIdx.x) % 32;
    if (token >= call.tokens) continue;
    sum += clamped_log2_gate(__ldg(call.gates + (int64_t(row) * call.tokens + token) * call.heads + head));
  }
  return sum;
}

// How much a chunk's tokens can make a state grow beside their gates: the norm of I - beta k k^T is at most 1, or
// |1 - beta <k, k>|. Each lane returns its own part of the sum of log2 norms; four lanes have a token.
__device__ __forceinline__ float lane_log2_growth(const DeltaCall& call, int row, int head, int chunk) {
  const int lane = int(threadIdx.x) % 32;
  const int key_head = head / (call.heads / call.key_heads);
  float sum = 0.0f;
#pragma unroll 2
  for (int i = 0; i < kChunkTokens; i += 8) {
    const int token = chunk * kChunkTokens + i + lane / 4;
    const bool valid = token < call.tokens;
    float square = 0.0f, beta = 0.0f;
    if (valid) {
      const int64_t at = int64_t(row) * call.tokens + token;
      const uint4* const key = reinterpret_cast<const uint4*>(call.keys + (at * call.key_heads + key_head) * kKeyDim);
      beta = __ldg(call.beta + at * call.heads + head);
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        const uint4 piece = __ldg(key + j * 4 + lane % 4);
        const uint32_t pairs[4] = {piece.x, piece.y, piece.z, piece.w};
#pragma unroll
        for (int n = 0; n < 4; ++n) {
          const float low = __uint_as_float(pairs[n] << 16), high = __uint_as_float(pairs[n] & 0xFFFF0000u);
          square += low * low + high * high;
        }
      }
    }
    square += __shfl_xor_sync(~0u, square, 1);
    square += __shfl_xor_sync(~0u, square, 2);
    const float norm = fabsf(1.0f - beta * square);
    if (lane % 4 == 0 && norm > 1.0f) sum += log2f(norm);
  }
  return sum;
}

// Adds the log2 decay of steps to `log2_decay`, from the one before `end` back to `begin` or until it vanishes, and
// returns the last step that it has added. All threads of a block call it; `sums` is shared memory of a number per chunk.
template <bool Reverse, bool Delta, int Threads, int ChunksPerWarp>
__device__ __forceinline__ int look_back(const DeltaCall& call, int row, int head, float* sums, int begin, int end,
                                         float& log2_decay) {
  constexpr int kChunks = Threads / 32 * ChunksPerWarp;
  const int warp = int(threadIdx.x) / 32, lane = int(threadIdx.x) % 32;
  for (int last = end; last > begin; last -= kChunks) {
    float decays[ChunksPerWarp];
#pragma unroll
    for (int i = 0; i < ChunksPerWarp; ++i) {
      const int step = last - 1 - i - warp * ChunksPerWarp;
      decays[i] = 0.0f;
      if (step < begin) continue;
      const int chunk = chunk_of_step<Reverse>(call, step);
      decays[i] = lane_log2_decay(call, row, head, chunk);
      if constexpr (Delta) decays[i] += lane_log2_growth(call, row, head, chunk);
    }
#pragma unroll
    for (int i = 0; i < ChunksPerWarp; ++i) {
#pragma unroll
      for (int lanes = 16; lanes > 0; lanes /= 2) decays[i] += __shfl_xor_sync(~0u, decays[i], lanes);
      if (lane == 0) sums[warp * ChunksPerWarp + i] = decays[i];
    }
    __syncthreads();
    int found = -1;
    for (int i = 0; i < kChunks && last - 1 - i >= begin; ++i) {
      log2_decay += sums[i];
      if (log2_decay < kVanishedLog2) {
        found = last - 1 - i;
        break;
      }
    }
    __syncthreads();
    if (found >= 0) return found;
  }
  return begin;
}

// The steps of a block that scans a segment. With the delta rule all threads of the block call it.
template <bool Reverse, bool Delta, int Threads>
__device__ __forceinline__ StepRange steps_of_segment(const DeltaCall& call, int row, int head, int segment, float* sums) {
  const int steps = call.segment_steps(), stored = segment * steps, end = min(stored + steps, call.chunks);
  if (segment == 0 || call.segment_states != nullptr) return {stored, stored, end};
  if (call.gates == nullptr) return {0, stored, end};
  float log2_decay = 0.0f;
  return {look_back<Reverse, Delta, Threads, 1>(call, row, head, sums, 0, stored, log2_decay), stored, end};
}

}  // namespace ejkernel::delta_rule
