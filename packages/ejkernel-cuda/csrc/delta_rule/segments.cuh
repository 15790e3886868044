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
constexpr int kLoadedRowsEnd = 1 << 30;  // a coordinate of tensor maps (tensor_maps.cuh)
constexpr float kMinLog2Gate = -150.0f;  // powers of two, in which exp2 is 0
constexpr float kVanishedLog2 = -126.0f, kSmallestNormal = 1.17549435e-38f;  // float32's smallest normal number

// A chunk of a packed row, whose sequences begin with a chunk of their own; a sequence without tokens has one too. Those
// of padding tokens have no tokens, and zeros are stored for their rows. `mark` is the sequence, times 4, and whether the
// chunk is its first (1) and its last (2) one; the sequence of padding is the number of sequences. After the chunks the
// table has entries without rows, whose mark is -1.
struct alignas(16) Chunk {
  int token, tokens, rows, mark;
};

struct DeltaCall {
  const float* gates;    // [B, T, H], log gates; null without gates
  const float* beta;     // [B, T, H]; without the delta rule, factors on what tokens write, or null
  const float* skip;     // [H], factors on what tokens' own values add to outputs; not with the delta rule; or null
  const float* initial_states;  // [sequences, H, K, V]; null for zeros. Of the reverse scan, gradients of the final states
  float* final_states;          // [sequences, H, K, V]
  const float* segment_states;  // [B, segments - 1, H, K, V], before all but the first segment; null with the delta rule
  const __nv_bfloat16* keys;    // [B, T, key heads, K]
  const Chunk* table;           // [chunks + 1] of a packed row, and the number of its chunks; null for rows
  int tokens, chunks, heads, query_heads, key_heads, value_heads, value_dim, segments, sequences;
  float scale;
};

// A chunk of a row, or of a packed one.
__device__ __forceinline__ Chunk chunk_at(const Chunk* table, int tokens, int row, int chunk) {
  if (table != nullptr) {
    const int4 entry = __ldg(reinterpret_cast<const int4*>(table + chunk));
    return {entry.x, entry.y, entry.z, entry.w};
  }
  const int token = chunk * kChunkTokens, rows = min(kChunkTokens, tokens - token);
  return {token, rows, rows, row * 4 + (chunk == 0) + 2 * (token + kChunkTokens >= tokens)};
}

__device__ __forceinline__ int count_chunks(const DeltaCall& call) {
  return call.table == nullptr ? call.chunks : __ldg(&call.table[call.chunks].token);
}

// Whether a chunk is the first or the last one of its sequence, in the order of a scan.
template <bool Reverse>
__device__ __forceinline__ bool begins_sequence(int mark) {
  return mark & (Reverse ? 2 : 1);
}
template <bool Reverse>
__device__ __forceinline__ bool ends_sequence(int mark) {
  return begins_sequence<!Reverse>(mark);
}

// Steps of a scan, one per chunk: those of a block, which stores nothing before `stored`.
struct StepRange {
  int first, stored, end;
};

// What a block scans. It is in shared memory, since the state's threads have no registers to spare.
struct Work : StepRange {
  int head, row, first_value, chunks;
  int stored_tokens[4][2];  // of each of the state's warps, the first token and the rows whose output it stores next
};

// The chunk of a scan's step.
template <bool Reverse>
__device__ __forceinline__ int chunk_of_step(int chunks, int step) {
  return Reverse ? chunks - 1 - step : step;
}

// A log gate in powers of two, so that sums are finite. NaN stays NaN.
__device__ __forceinline__ float clamped_log2_gate(float gate) {
  const float log2 = gate * kLog2e;
  return log2 < kMinLog2Gate ? kMinLog2Gate : log2;
}

// The sum of a chunk's log2 gates, of which each lane returns its own part.
__device__ __forceinline__ float lane_log2_decay(const DeltaCall& call, int row, int head, const Chunk& chunk) {
  float sum = 0.0f;
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    const int at = i * 32 + int(threadIdx.x) % 32, token = chunk.token + at;
    if (at >= chunk.tokens || call.gates == nullptr) continue;
    sum += clamped_log2_gate(__ldg(call.gates + (int64_t(row) * call.tokens + token) * call.heads + head));
  }
  return sum;
}

// How much a chunk's tokens can make a state grow, apart from their gates: the norm of I - beta k k^T is at most 1, or
// |1 - beta <k, k>|. Returns this lane's share of the sum of log2 norms: the first of the four lanes of a token adds it.
__device__ __forceinline__ float lane_log2_growth(const DeltaCall& call, int row, int head, const Chunk& chunk) {
  const int lane = int(threadIdx.x) % 32;
  const int key_head = head / (call.heads / call.key_heads);
  float sum = 0.0f;
#pragma unroll 2
  for (int i = 0; i < kChunkTokens; i += 8) {
    const int token = chunk.token + i + lane / 4;
    const bool valid = i + lane / 4 < chunk.tokens;
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

// Adds the log2 decay of steps to `log2_decay`, from the one before `end` back to `begin`, to where a sequence begins or
// until it vanishes, and returns the last step that it has added. All threads of a block call it; `sums` is shared memory of a number per chunk.
template <bool Reverse, bool Delta, int Threads, int ChunksPerWarp>
__device__ __forceinline__ int look_back(const DeltaCall& call, int chunks, int row, int head, float* sums, int begin,
                                         int end, float& log2_decay) {
  constexpr int kChunks = Threads / 32 * ChunksPerWarp;
  const int warp = int(threadIdx.x) / 32, lane = int(threadIdx.x) % 32;
  for (int last = end; last > begin; last -= kChunks) {
    float decays[ChunksPerWarp];
#pragma unroll
    for (int i = 0; i < ChunksPerWarp; ++i) {
      const int step = last - 1 - i - warp * ChunksPerWarp;
      decays[i] = 0.0f;
      if (step < begin) continue;
      const Chunk chunk = chunk_at(call.table, call.tokens, row, chunk_of_step<Reverse>(chunks, step));
      decays[i] = lane_log2_decay(call, row, head, chunk);
      if constexpr (Delta) decays[i] += lane_log2_growth(call, row, head, chunk);
      if (begins_sequence<Reverse>(chunk.mark)) decays[i] = -INFINITY;
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

// The steps of a segment; no steps, if a packed row has too few chunks.
__device__ __forceinline__ StepRange segment_range(const DeltaCall& call, int chunks, int segment) {
  const int steps = (chunks + call.segments - 1) / call.segments, first = min(segment * steps, chunks);
  return {first, first, min(first + steps, chunks)};
}

// Whether a segment continues the state after the tokens before it.
template <bool Reverse>
__device__ __forceinline__ bool continues_sequence(const DeltaCall& call, int chunks, int row, const StepRange& steps) {
  if (steps.first >= steps.end) return false;
  return !begins_sequence<Reverse>(chunk_at(call.table, call.tokens, row, chunk_of_step<Reverse>(chunks, steps.first)).mark);
}

// The steps of a block that scans a segment. With the delta rule all threads of the block call it.
template <bool Reverse, bool Delta, int Threads>
__device__ __forceinline__ StepRange steps_of_segment(const DeltaCall& call, int chunks, int row, int head, int segment,
                                                      float* sums) {
  StepRange steps = segment_range(call, chunks, segment);
  if (!Delta || !continues_sequence<Reverse>(call, chunks, row, steps)) return steps;
  float log2_decay = 0.0f;
  steps.first = look_back<Reverse, Delta, Threads, 1>(call, chunks, row, head, sums, 0, steps.stored, log2_decay);
  return steps;
}

}  // namespace ejkernel::delta_rule
