// The arguments of a decode step, and its work items: 32 values of one head of a sequence.
#pragma once

#include "recurrent_step/numbers.cuh"
#include "recurrent_step/state.cuh"

namespace ejkernel::recurrent_step {

struct RecurrentStep {
  const void *query, *key, *value;
  Numbers decay, beta, dt, skip;
  const int *bounds, *slots;
  const int* parents;  // of tokens in trees, by position in their request; -1 is the state before them
  const float* initial;  // nullptr for zeros
  float* final;
  void* output;
  int rows, tokens, sequences, heads, values, slot_count;
  int query_heads, key_heads, value_heads;
  int a_query, a_key, a_value;  // state heads per query, key and value head
  float scale;
  int multiprocessors;  // of the device
};

// A warp's work item, with the range of its sequence's tokens and the index of its state.
struct StepItem {
  int row, sequence, head, tile;
  int first, end, state;
  bool has_state;  // whether the sequence has a slot, if states are in slots
};

__host__ __device__ __forceinline__ unsigned count_items(const RecurrentStep& call) {
  return unsigned(call.rows) * call.sequences * call.heads * (call.values / kStepValues);
}

__device__ __forceinline__ StepItem load_item(const RecurrentStep& call, unsigned index) {
  const unsigned tiles = call.values / kStepValues, heads = call.heads, sequences = call.sequences;
  const unsigned number = index / tiles / heads;
  StepItem item{
      int(number / sequences), int(number % sequences), int(index / tiles % heads), int(index % tiles), 0, call.tokens,
      int(number), true};
  if (call.bounds != nullptr) item.first = call.bounds[item.sequence], item.end = call.bounds[item.sequence + 1];
  if (call.slots != nullptr) {
    item.state = call.slots[item.sequence];
    // A sequence without tokens does not touch its slot, which may belong to another sequence too.
    item.has_state = item.state >= 0 && item.state < call.slot_count && item.end > item.first;
  }
  return item;
}

// The offset of the first element of an item's state in its head's state.
template <int K, bool kTransposed>
__device__ __forceinline__ long long offset_in_head(const StepItem& item) {
  return (long long)item.tile * kStepValues * (kTransposed ? K : 1);
}

// The same in all states.
template <int K, bool kTransposed>
__device__ __forceinline__ long long state_offset(const RecurrentStep& call, const StepItem& item) {
  return ((long long)item.state * call.heads + item.head) * K * call.values + offset_in_head<K, kTransposed>(item);
}

// Up to eight tokens that are processed together, which a lane has by their positions in the chunk.
struct StepChunk {
  int count;
  int row_token;        // index of token lane / 4 in the row
  int column_token[2];  // of tokens 2 (lane % 4) and the next
  int scalar_token;     // of token lane % 8
  // Of trees: the token lane % 8 and its ancestors as bits, whether the chunk is followed by another one, which continues
  // the state after it, and the first position whose output is stored.
  unsigned path;
  bool has_successor;
  int first_output;
};

__device__ __forceinline__ StepChunk consecutive_tokens(const StepItem& item, int token, int lane) {
  const int c = lane % 4, count = min(item.end - token, kStepTokens);
  return {count, token + lane / 4, {token + 2 * c, token + 2 * c + 1}, token + lane % 8, 0, false, 0};
}

// The index of a head's scalar of the lane's token lane % 8.
__device__ __forceinline__ long long scalar_index(const Numbers& numbers, const StepItem& item, const StepChunk& chunk) {
  return item.row * numbers.row + chunk.scalar_token * numbers.token + item.head;
}

// Pointers to a head's tokens, and their strides.
template <typename T>
struct StepHead {
  const T *query, *key, *value;
  const float* gates;  // per key channel
  T* output;
  long long query_stride, key_stride, value_stride, gate_stride, output_stride;
};

template <typename T, int K, bool kChannels>
__device__ __forceinline__ StepHead<T> head_of(const RecurrentStep& call, const StepItem& item) {
  const long long start = (long long)item.row * call.tokens;
  const int head = item.head, column = item.tile * kStepValues;
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
    at.gates = static_cast<const float*>(call.decay.data) + item.row * call.decay.row + (long long)head * K;
    at.gate_stride = call.decay.token;
  }
  return at;
}

// A lane's part of a chunk's tokens: pieces of four keys of token lane / 4, values 4 r to 4 r + 3 of tokens 2 c and
// 2 c + 1, and words with scalars of token lane % 8: a gate, and beta or dt.
template <int K>
struct StepTokens {
  uint2 query[K / 16], key[K / 16], values[2];
  uint32_t gate, factor;
};

// Loads a chunk's values, gates of heads, and beta or dt, without waiting for them; zeros for missing tokens.
template <typename T, int K, bool kDelta>
__device__ __forceinline__ void load_values(
    StepTokens<K>& tokens, const RecurrentStep& call, const StepItem& item, const StepChunk& chunk, int lane) {
  const int r = lane / 4, c = lane % 4, n = lane % 8;
  const StepHead<T> at = head_of<T, K, false>(call, item);
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    const T* value = at.value + chunk.column_token[i] * at.value_stride + 4 * r;
    tokens.values[i] = 2 * c + i < chunk.count ? *reinterpret_cast<const uint2*>(value) : uint2{0, 0};
  }
  const Numbers& factors = kDelta ? call.beta : call.dt;
  tokens.gate = tokens.factor = 0;
  if (n < chunk.count && call.decay.data != nullptr) {
    tokens.gate = *word_address(call.decay, scalar_index(call.decay, item, chunk));
  }
  if (n < chunk.count && factors.data != nullptr) {
    tokens.factor = *word_address(factors, scalar_index(factors, item, chunk));
  }
}

// Loads a chunk's tokens without waiting for them.
template <typename T, int K, bool kDelta>
__device__ __forceinline__ void load_tokens(
    StepTokens<K>& tokens, const RecurrentStep& call, const StepItem& item, const StepChunk& chunk, int lane) {
  const int r = lane / 4, c = lane % 4;
  const StepHead<T> at = head_of<T, K, false>(call, item);
  const T* query = at.query + chunk.row_token * at.query_stride + 4 * c;
  const T* key = at.key + chunk.row_token * at.key_stride + 4 * c;
#pragma unroll
  for (int t = 0; t < K / 16; ++t) {
    tokens.key[t] = r < chunk.count ? *reinterpret_cast<const uint2*>(key + 16 * t) : uint2{0, 0};
  }
#pragma unroll
  for (int t = 0; t < K / 16; ++t) {
    tokens.query[t] = r < chunk.count ? *reinterpret_cast<const uint2*>(query + 16 * t) : uint2{0, 0};
  }
  load_values<T, K, kDelta>(tokens, call, item, chunk, lane);
}

}  // namespace ejkernel::recurrent_step
