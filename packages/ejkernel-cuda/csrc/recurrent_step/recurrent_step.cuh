// The decode step of linear recurrences: processes up to eight tokens at a time with the state in registers.
//
//   state in HBM   32 values x K keys ---- load ---> registers of one warp ----------------> store, in place
//   q, k, v, gates           load ->  q S0, k S0 | 8 x 8 pairs | solve | + pairs x u | S = decay S0 + u k^T
//                                    tensor cores                             tensor cores
//
// Token by token, eight tokens would be eight dependent sums over the keys, whose instructions and barriers take longer
// than reading the state. Here they are one chunk: tensor cores multiply them with the initial state, and the
// interactions between tokens are 8 x 8 matrices.
#pragma once

#include "common/logarithms.cuh"
#include "recurrent_step/channels.cuh"

namespace ejkernel::recurrent_step {

struct RecurrentStep {
  const void *query, *key, *value;
  Numbers decay, beta, dt, skip;
  const int *bounds, *slots;
  const float* initial;  // nullptr for zeros
  float* final;
  void* output;
  int rows, tokens, sequences, heads, values, slot_count;
  int query_heads, key_heads, value_heads;
  int a_query, a_key, a_value;  // state heads per query, key and value head
  float scale;
};

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

// The scalars of the lane's token n = lane % 8: a gate, and beta or dt; 1 if absent.
struct Scalars {
  uint32_t gate, factor;
};

template <bool kDelta, bool kChannels>
__device__ __forceinline__ Scalars load_scalars(
    const RecurrentStep& call, int row, int head, long long token, int here, int n) {
  Scalars found{0, 0};
  const Numbers& factors = kDelta ? call.beta : call.dt;
  if (n >= here) return found;
  if (!kChannels && call.decay.data != nullptr) {
    found.gate = load_word(call.decay, row * call.decay.row + (token + n) * call.decay.token + head);
  }
  if (factors.data != nullptr) {
    found.factor = load_word(factors, row * factors.row + (token + n) * factors.token + head);
  }
  return found;
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

// Loads the keys of token r that a lane has of each tile: 16 t + 4 c to 16 t + 4 c + 3.
template <typename T, int K>
__device__ __forceinline__ void load_keys(uint2 (&keys)[K / 16], const T* row, bool there, int c) {
#pragma unroll
  for (int t = 0; t < K / 16; ++t) {
    keys[t] = there ? *reinterpret_cast<const uint2*>(row + 16 * t + 4 * c) : uint2{0, 0};
  }
}

// Pointers to a head's tokens, and their strides.
template <typename T>
struct StepHead {
  const T *query, *key, *value;
  const float* gates;  // per key channel
  T* output;
  long long query_stride, key_stride, value_stride, gate_stride, output_stride;
};

// A chunk's loaded inputs, and the products of its tokens with each other.
template <int K>
struct Chunk {
  uint2 q[K / 16], k[K / 16], v[2];
  Scalars scalars;
  float pairs[4];
};

// Issues the loads of a chunk: `here` tokens, up to eight, starting at `token` of the row.
template <typename T, int K, bool kDelta, bool kChannels>
__device__ __forceinline__ void load_chunk(
    Chunk<K>& chunk, const RecurrentStep& call, const StepHead<T>& at, int row, int head, long long token, int here,
    int lane) {
  const int r = lane / 4, c = lane % 4;
  if (!kChannels) {
    load_keys<T, K>(chunk.k, at.key + (token + r) * at.key_stride, r < here, c);
    load_keys<T, K>(chunk.q, at.query + (token + r) * at.query_stride, r < here, c);
  }
#pragma unroll
  for (int n = 0; n < 2; ++n) {
    chunk.v[n] = uint2{0, 0};
    if (2 * c + n < here) {
      chunk.v[n] = *reinterpret_cast<const uint2*>(at.value + (token + 2 * c + n) * at.value_stride);
    }
  }
  chunk.scalars = load_scalars<kDelta, kChannels>(call, row, head, token, here, lane % 8);
}

// With gates per key channel, prepares a chunk before the state is needed: see `prepare_channels`.
template <typename T, int K, bool kDelta>
__device__ __forceinline__ void prepare_chunk(
    Chunk<K>& chunk, const StepHead<T>& at, StepShared<K>& shared, long long token, int here, int lane) {
  const int r = lane / 4;
  const T *query = at.query + (token + r) * at.query_stride, *key = at.key + (token + r) * at.key_stride;
  const float* gates = at.gates + (token + r) * at.gate_stride;
  const float4 found = prepare_channels<T, K, kDelta>(gates, query, key, shared, r < here, lane);
  chunk.pairs[0] = found.x, chunk.pairs[1] = found.y, chunk.pairs[2] = found.z, chunk.pairs[3] = found.w;
}

// Computes a chunk's outputs and updates the state.
template <typename T, int K, bool kDelta, bool kChannels>
__device__ __forceinline__ void step_chunk(
    const RecurrentStep& call, StepState<K>& state, Chunk<K>& chunk, const StepHead<T>& at,
    const StepShared<K>* shared, float skip, int row, int head, long long token, int here, int lane) {
  const int r = lane / 4, c = lane % 4;
  uint2(&q)[K / 16] = chunk.q;
  uint2(&k)[K / 16] = chunk.k;
  float(&pairs)[4] = chunk.pairs;
  const Scalars& scalars = chunk.scalars;
  float v[2][4], read[2][4] = {}, known[2][4] = {};
  widen_values<T>(v, chunk.v);
  ChunkDecay decay{{1.f, 1.f}, {1.f, 1.f}, {1.f, 1.f}, 1.f};
  if constexpr (kChannels) {
    read_channels<K, kDelta>(state, *shared, read, known, lane);
  } else {
    const long long gate = row * call.decay.row + (token + lane % 8) * call.decay.token + head;
    const bool there = call.decay.data != nullptr && lane % 8 < here;
    const float log = number_of<T>(scalars.gate, call.decay, gate) * kLog2e;
    decay = chunk_decay(there ? exp2_fast(log) : 1.f, r, c);
    // Rows of the left operand are queries, then keys: one instruction multiplies both with the keys.
#pragma unroll
    for (int i = 0; i < 4; ++i) pairs[i] = 0.f;
#pragma unroll
    for (int t = 0; t < K / 16; ++t) {
      const uint32_t both[4] = {q[t].x, k[t].x, q[t].y, k[t].y};
      Half<T>::multiply(pairs, both, k[t].x, k[t].y);
    }
#pragma unroll
    for (int i = 0; i < 4; ++i) pairs[i] *= decay.between[i % 2];
    read_state<T, K, kDelta>(state, q, k, read, known);
  }
  const Numbers& factors = kDelta ? call.beta : call.dt;
  float own_factor = 1.f, factor[2];
  if (factors.data != nullptr) {
    own_factor = number_of<T>(
        scalars.factor, factors, row * factors.row + (token + lane % 8) * factors.token + head);
  }
#pragma unroll
  for (int n = 0; n < 2; ++n) factor[n] = __shfl_sync(~0u, own_factor, 2 * c + n);
  float u[2][4];
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
#pragma unroll
  for (int n = 0; n < 2; ++n) {
    if (2 * c + n < here) {
      *reinterpret_cast<uint2*>(at.output + (token + 2 * c + n) * at.output_stride) = uint2{
          Half<T>::pack(read[0][n], read[0][2 + n]), Half<T>::pack(read[1][n], read[1][2 + n])};
    }
  }
#pragma unroll
  for (int n = 0; n < K / 8; ++n) {
    // A row of keys of tokens 2 c and 2 c + 1, from the lane's keys of token r.
    if constexpr (kChannels) {
      const int key = 16 * (n / 2) + 4 * (r / 2) + 2 * (n % 2) + r % 2;
      uint32_t b[2], b_low[2];
      split(shared->ends[2 * c][key], b[0], b_low[0]);
      split(shared->ends[2 * c + 1][key], b[1], b_low[1]);
#pragma unroll
      for (int m = 0; m < 2; ++m) {
        multiply_tf32(state[n][m], written[m], b[0], b[1]);
        multiply_tf32(state[n][m], written_rest[m], b[0], b[1]);
        multiply_tf32(state[n][m], written[m], b_low[0], b_low[1]);
      }
    } else {
      const float2 b = widened_pair<T>(transpose_matrix(n % 2 ? k[n / 2].y : k[n / 2].x));
#pragma unroll
      for (int m = 0; m < 2; ++m) {
#pragma unroll
        for (int i = 0; i < 4; ++i) state[n][m][i] *= decay.all;
        multiply_tf32(state[n][m], written[m], __float_as_uint(b.x), __float_as_uint(b.y));
        multiply_tf32(state[n][m], written_rest[m], __float_as_uint(b.x), __float_as_uint(b.y));
      }
    }
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

// A sequence's range of tokens and its state slot.
struct Walk {
  int row, number;  // of the sequence in its row
  long long first, end, place;
  bool used;
};

__device__ __forceinline__ Walk walk_of(const RecurrentStep& call, unsigned number) {
  const unsigned sequences = call.sequences, sequence = number % sequences;
  Walk walk{int(number / sequences), int(sequence), 0, call.tokens, number, true};
  if (call.bounds != nullptr) walk.first = call.bounds[sequence], walk.end = call.bounds[sequence + 1];
  if (call.slots != nullptr) {
    walk.place = call.slots[sequence];
    // A sequence without tokens does not touch its slot, which may belong to another sequence too.
    walk.used = walk.place >= 0 && walk.place < call.slot_count && walk.end > walk.first;
  }
  return walk;
}

template <typename T, int K, bool kChannels>
__device__ __forceinline__ StepHead<T> head_of(const RecurrentStep& call, int row, int head, int column) {
  const long long start = (long long)row * call.tokens;
  StepHead<T> at;
  at.query_stride = (long long)call.query_heads * K;
  at.key_stride = (long long)call.key_heads * K;
  at.value_stride = (long long)call.value_heads * call.values;
  at.output_stride = (long long)call.heads * call.values;
  at.query = static_cast<const T*>(call.query) + start * at.query_stride + head / call.a_query * K;
  at.key = static_cast<const T*>(call.key) + start * at.key_stride + head / call.a_key * K;
  at.value = static_cast<const T*>(call.value) + start * at.value_stride + head / call.a_value * call.values + column;
  at.output = static_cast<T*>(call.output) + start * at.output_stride + head * call.values + column;
  if (kChannels) {
    at.gates = static_cast<const float*>(call.decay.data) + row * call.decay.row + (long long)head * K;
    at.gate_stride = call.decay.token;
  }
  return at;
}

// Processes all tokens of a sequence, for 32 values of one head.
template <typename T, int K, bool kDelta, bool kChannels, bool kTransposed>
__device__ __forceinline__ void step_head(
    const RecurrentStep& call, const Walk& walk, StepShared<K>* shared, int tile, int head, int lane) {
  const int r = lane / 4, c = lane % 4;
  const long long within = tile * kStepValues * (kTransposed ? K : 1);
  const long long offset = (walk.place * call.heads + head) * K * call.values + within;
  const StepHead<T> at = head_of<T, K, kChannels>(call, walk.row, head, tile * kStepValues + 4 * r);
  const uint32_t skip_word =
      call.skip.data == nullptr ? 0 : load_word(call.skip, walk.row * call.skip.row + head);
  Chunk<K> chunk;
  int here = int(min(walk.end - walk.first, (long long)kStepTokens));
  load_chunk<T, K, kDelta, kChannels>(chunk, call, at, walk.row, head, walk.first, here, lane);
  // Loaded without a branch, and rearranged where it is needed, so that all loads of a step are in flight together. A
  // sequence without a state loads from some valid address, and uses zeros.
  const bool there = walk.used && call.initial != nullptr;
  StepPieces<K> pieces;
  load_pieces<K, kTransposed>(pieces, there ? call.initial + offset : call.final + within, call.values, r, c);
  if constexpr (kChannels) prepare_chunk<T, K, kDelta>(chunk, at, *shared, walk.first, here, lane);
  StepState<K> state;
  arrange_state<K, kTransposed>(state, pieces, there);
  const float skip = number_of<T>(skip_word, call.skip, walk.row * call.skip.row + head);
  for (long long token = walk.first; token < walk.end;) {
    step_chunk<T, K, kDelta, kChannels>(call, state, chunk, at, shared, skip, walk.row, head, token, here, lane);
    token += kStepTokens;
    if (token >= walk.end) break;
    here = int(min(walk.end - token, (long long)kStepTokens));
    load_chunk<T, K, kDelta, kChannels>(chunk, call, at, walk.row, head, token, here, lane);
    if constexpr (kChannels) {
      // All warps have read the shared data before any of them overwrites it.
      __syncthreads();
      prepare_chunk<T, K, kDelta>(chunk, at, *shared, token, here, lane);
    }
  }
  if (walk.used) store_state<K, kTransposed>(state, call.final + offset, call.values, r, c);
  if (call.bounds != nullptr) {
    // The warps of all sequences share the padding tokens, which are before the first and after the last sequence.
    zero_outputs(at.output, at.output_stride, walk.number, call.bounds[0], call.sequences, c);
    zero_outputs(
        at.output, at.output_stride, call.bounds[call.sequences] + walk.number, call.tokens, call.sequences, c);
  }
}

// A warp has 32 values of one head of a sequence. With gates per key channel the four warps of a block have the same
// head, so the value dimension is a multiple of 128.
template <typename T, int K, bool kDelta, bool kChannels, bool kTransposed>
__global__ void __launch_bounds__(kStepThreads) step_kernel(const __grid_constant__ RecurrentStep call) {
  const unsigned tiles = call.values / kStepValues, heads = call.heads;
  const unsigned warp = blockIdx.x * (kStepThreads / 32) + threadIdx.x / 32;
  const int tile = warp % tiles, head = warp / tiles % heads;
  const unsigned number = warp / tiles / heads;
  if (number >= unsigned(call.rows) * call.sequences) return;
  StepShared<K>* shared = nullptr;
  if constexpr (kChannels) {
    __shared__ StepShared<K> memory;
    shared = &memory;
  }
  step_head<T, K, kDelta, kChannels, kTransposed>(call, walk_of(call, number), shared, tile, head, threadIdx.x % 32);
}

}  // namespace ejkernel::recurrent_step
