// The gradients of tokens with a gate per head, of all chunks at the same time, from what the scans stored: a token
// reads the state with its query, where the output's gradient is dO, and with its key, where the gradient is -dY. With S
// the state before the chunk, dS the gradient of the one after it, D_ij = exp2(G_i - G_j), E = exp2(G),
// F = exp2(G_last - G), P = scale D (dO X^T) on and below the diagonal and R = D (dY X^T) below it:
//   dQ = scale E dO S^T + P K                dV = beta dY
//   W = E dY S^T + R K                       dbeta = <dY, V> - <W, K>
//   dU = F X dS^T + P^T Q - (beta R)^T K     dK = dU - beta W
//   dG = <dQ, Q> - beta <W, K> - <dU, K>, and of the last token also <S after the chunk, dS>
// Without the delta rule X = V, and R, W and dY are 0. The gradient of a gate is the sum of dG from its token to the chunk's end.
//
// A block is one warpgroup, and two of them share a multiprocessor: one computes while the other one loads. Where two heads
// share queries and keys, their blocks can be a cluster, which adds up their dQ and dK: each block has half of the channels.
#pragma once

#include "delta_rule/pairs.cuh"

namespace ejkernel::delta_rule {

constexpr int kGradientThreads = 128;
constexpr float kMinLog2GateWithGradient = -57.5f;

struct TokenGradientCall {
  const float *gates, *beta;  // [B, T, H]; no gates: null
  const __nv_bfloat16* value;  // [B, T, value heads, V]; like beta, dV and dbeta only with the delta rule
  __nv_bfloat16* dvalue;  // [B, T, H, V]
  // [B, T, H, K] where heads share queries or keys, else null: maps have them. Of pairs of heads, [B, T, H / 2, K]
  float *dquery, *dkey;
  float *dgates, *dbeta;  // [B, T, H]
  const Chunk* table;  // as in DeltaCall
  int tokens, chunks, heads, query_heads, key_heads, value_heads;
  float scale;
};

struct TokenGradientMaps {
  TensorMap query, key, writes, cotangent, dwrites;  // [B, T, heads, channels]
  TensorMap states, dstates;  // [B, H, chunks, V, K]
  TensorMap dquery, dkey;
};

// Shared memory, in bytes. Gradients and the transposes of P and R take the places of tiles that were read.
template <int V>
struct GradientLayout {
  static constexpr int kQuery = 0, kKey = 2 * kTileBytes, kWrites = 4 * kTileBytes, kCotangent = 6 * kTileBytes,
                       kDwrites = 8 * kTileBytes, kStates = 10 * kTileBytes, kStateBytes = V * kKeyDim * 2;
  static constexpr int kSums = kStates + kStateBytes, kBetas = kSums + 256, kRows = kBetas + 256,
                       kPartialSums = kRows + 256, kBarriers = kPartialSums + 16, kSpan = kBarriers + 32,
                       kBytes = kSpan + sizeof(Chunk);
  static_assert(2 * (kBytes + 1024) <= 228 * 1024, "two blocks share a multiprocessor");
};

template <int V, bool Delta, bool InPairs = false>
struct TokenGradients {
  using L = GradientLayout<V>;
  static constexpr int kTiles = InPairs ? 8 : 16;  // of 8 channels of dQ and dK that a block stores
  static constexpr int kWarpBytes = InPairs ? 4096 : 2048;  // of a warp's 16 rows of 64 channels, in float32 before
  static constexpr int kSteps = V / 16, kStateLoads = L::kStateBytes / (kGradientThreads * 16);
  const TokenGradientCall& call;
  const TokenGradientMaps& maps;
  char* const memory;
  const uint32_t shared;
  const int thread, warp, lane, t, g, head, chunk, row;
  float sums[2], betas[2], dgate_sums[2];  // of the thread's rows g and g + 8 of the warp's 16
  float last_sum, gate_partial;
  uint32_t scores[4][4], key_scores[4][4];  // P and -beta R as left operands

  __device__ __forceinline__ TokenGradients(const TokenGradientCall& c, const TokenGradientMaps& m, char* shared_memory)
      : call(c),
        maps(m),
        memory(shared_memory),
        shared(shared_address(shared_memory)),
        thread(threadIdx.x),
        warp(thread / 32),
        lane(thread % 32),
        t(thread % 4),
        g(thread % 32 / 4),
        head(blockIdx.x % c.heads),
        chunk(blockIdx.x / c.heads % c.chunks),
        row(blockIdx.x / c.heads / c.chunks) {}

  // The chunk's tokens: in shared memory, since there are no registers for them.
  __device__ __forceinline__ Chunk& span() const { return *reinterpret_cast<Chunk*>(memory + L::kSpan); }
  __device__ __forceinline__ float* numbers(int offset) const { return reinterpret_cast<float*>(memory + offset); }
  __device__ __forceinline__ uint32_t barrier(int i) const { return shared + L::kBarriers + 8 * i; }
  __device__ __forceinline__ int64_t token_index(int chunk_row) const {
    return (int64_t(row) * call.tokens + span().token + chunk_row) * call.heads + head;
  }
  __device__ __forceinline__ bool is_token(int chunk_row) const { return chunk_row < span().tokens; }
  __device__ __forceinline__ bool is_stored(int chunk_row) const { return chunk_row < span().rows; }
  __device__ __forceinline__ uint64_t operand(int offset) const { return swizzled_operand(shared + offset); }
  __device__ __forceinline__ uint64_t rows_operand(int offset) const {
    return swizzled_operand(shared + offset, kTileBytes);
  }
  static __device__ __forceinline__ int column_step(int i) { return i / 4 * (kTileBytes / 16) + i % 4 * 2; }
  static __device__ __forceinline__ int row_step(int i) {
    return i / 4 * (2 * kTileBytes / 16) + i % 4 * (16 * 128 / 16);
  }

  __device__ __forceinline__ void run() {
    if (lane == 0) span() = chunk_at(call.table, call.tokens, row, chunk);  // all warps store the same
    __syncwarp();
    if (span().rows == 0) return;  // the table of a packed row has more entries than chunks
    if (thread == 0) {
      for (int i = 0; i < 3; ++i) start_barrier(barrier(i), 1);
      publish_barriers();
      load_tiles();
    }
    if (warp == 1) sum_gates();
    __syncthreads();
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const int at = warp * 16 + g + i * 8;
      sums[i] = numbers(L::kSums)[at], betas[i] = numbers(L::kBetas)[at];
    }
    last_sum = numbers(L::kSums)[63];
    float dkey_rows[16][4];  // -beta W
    uint4 states[kStateLoads];
    differentiate_reads(dkey_rows, states);
    differentiate_writes(dkey_rows, states);
    if (lane == 0) wait_for_stores();
  }

  // ---- loads ----

  __device__ __forceinline__ void load_rows(const TensorMap* map, int offset, int column, int columns, int loaded) const {
    for (int i = 0; i < columns; i += 64) {
      copy_rows(shared + offset + i / 64 * kTileBytes, map, column + i, span(), row, barrier(loaded));
    }
  }

  __device__ __forceinline__ void load_state(const TensorMap* map, int loaded) const {
    const int index = (row * call.heads + head) * call.chunks + chunk;
    for (int i = 0; i < V / 64 * 2; ++i) {
      copy_tile(shared + L::kStates + i * kTileBytes, map, i % 2 * 64, i / 2 * 64, index, barrier(loaded));
    }
  }

  __device__ __forceinline__ void load_tiles() const {
    arrive_and_expect(barrier(0), 4 * kTileBytes + 2 * V / 64 * kTileBytes + L::kStateBytes);
    load_rows(&maps.cotangent, L::kCotangent, head * V, V, 0);
    load_rows(&maps.writes, L::kWrites, (Delta ? head : head / (call.heads / call.value_heads)) * V, V, 0);
    load_state(&maps.states, 0);
    load_rows(&maps.key, L::kKey, head / (call.heads / call.key_heads) * kKeyDim, kKeyDim, 0);
    load_rows(&maps.query, L::kQuery, head / (call.heads / call.query_heads) * kKeyDim, kKeyDim, 0);
    if constexpr (Delta) {
      arrive_and_expect(barrier(1), V / 64 * kTileBytes);
      load_rows(&maps.dwrites, L::kDwrites, head * V, V, 1);
    }
  }

  // The log2 gate of a token, 0 for none.
  __device__ __forceinline__ float log2_gate(int chunk_row) const {
    return call.gates != nullptr && is_token(chunk_row) ? clamped_log2_gate(__ldg(call.gates + token_index(chunk_row)))
                                                        : 0.0f;
  }

  // One warp; a lane has two tokens.
  __device__ __forceinline__ void sum_gates() const {
    const float first = log2_gate(2 * lane), both = first + log2_gate(2 * lane + 1);
    float sum = both;
#pragma unroll
    for (int lanes = 1; lanes < 32; lanes *= 2) {
      const float earlier_sum = __shfl_up_sync(~0u, sum, lanes);
      if (lane >= lanes) sum += earlier_sum;
    }
    reinterpret_cast<float2*>(numbers(L::kSums))[lane] = {sum - both + first, sum};
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const int at = 2 * lane + i;
      numbers(L::kBetas)[at] = Delta && is_token(at) ? __ldg(call.beta + token_index(at)) : 0.0f;
    }
  }

  // ---- steps ----

  // dQ, and what the reads with keys add; keeps the state before the chunk in registers, and asks for the gradient of the one after it.
  __device__ __forceinline__ void differentiate_reads(float (&reads)[16][4], uint4 (&states)[kStateLoads]) {
    const uint64_t key_rows = rows_operand(L::kKey);
    float dquery[16][4], pairs[8][4];
    wait_for_phase(barrier(0), 0);
    multiply_by_writes_and_state(pairs, dquery, L::kCotangent);
    commit_products();
    wait_for_products<0>(pairs);
    wait_for_products<0, 16>(dquery);
    if constexpr (InPairs) arrive_at_cluster();
    decay_pairs<true>(pairs, call.scale);
    pack_pairs(scores, pairs);
    scale_rows(dquery, call.scale * exp2_fast(sums[0]), call.scale * exp2_fast(sums[1]));
    fence_products();
#pragma unroll
    for (int i = 0; i < 4; ++i) multiply_rows(dquery, scores[i], key_rows + row_step(i));
    commit_products();
    if constexpr (Delta) {
      wait_for_phase(barrier(1), 0);
      multiply_by_writes_and_state(pairs, reads, L::kDwrites);
      commit_products();
      wait_for_products<1, 16>(dquery);
    } else {
      wait_for_products<0, 16>(dquery);
    }
    synchronise_blocks();  // all warps have read the output's gradient
    multiply_and_sum(dgate_sums, dquery, L::kQuery);
    store_gradient(dquery, &maps.dquery, call.dquery, L::kCotangent);
    if constexpr (Delta) {
      wait_for_products<0>(pairs);
      wait_for_products<0, 16>(reads);
    }
    uint32_t loaded = 0;
    if (call.gates != nullptr) {
#pragma unroll
      for (int i = 0; i < kStateLoads; ++i) states[i] = state_piece(i), loaded |= states[i].w;
    }
    synchronise_loads(loaded);  // all warps have read the state
    if (thread == 0) {
      arrive_and_expect(barrier(2), L::kStateBytes);
      load_state(&maps.dstates, 2);
    }
    if constexpr (Delta) differentiate_reads_of_keys(pairs, reads);
  }

  // W, dbeta and dV, from dY X^T and dY S^T.
  __device__ __forceinline__ void differentiate_reads_of_keys(float (&pairs)[8][4], float (&reads)[16][4]) {
    const uint64_t key_rows = rows_operand(L::kKey);
    decay_pairs<false>(pairs, 1.0f);
    pack_pairs(key_scores, pairs);
    scale_rows(reads, exp2_fast(sums[0]), exp2_fast(sums[1]));
    fence_products();
#pragma unroll
    for (int i = 0; i < 4; ++i) multiply_rows(reads, key_scores[i], key_rows + row_step(i));
    commit_products();
    store_value_gradients();
    wait_for_products<0, 16>(reads);
    float key_sums[2];
    multiply_and_sum(key_sums, reads, L::kKey);
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const int at = warp * 16 + g + i * 8;
      if (t == 0 && is_stored(at)) call.dbeta[token_index(at)] = numbers(L::kRows)[at] - key_sums[i];
      dgate_sums[i] -= betas[i] * key_sums[i];
    }
    scale_rows(reads, -betas[0], -betas[1]);
#pragma unroll
    for (int i = 0; i < 32; ++i) pairs[i / 4][i % 4] *= -betas[i % 4 / 2];
    pack_pairs(key_scores, pairs);
  }

  // dK, and the gradients of gates.
  __device__ __forceinline__ void differentiate_writes(const float (&reads)[16][4],
                                                       const uint4 (&states)[kStateLoads]) {
    __syncthreads();  // all warps have read dY
    store_transposed(L::kDwrites, scores);
    if constexpr (Delta) store_transposed(L::kDwrites + kTileBytes, key_scores);
    fence_shared_stores();
    uint32_t writes[kSteps][4];
    load_decayed_writes(writes);
    if constexpr (InPairs) arrive_at_cluster();
    float dkey[16][4] = {};
    __syncthreads();
    wait_for_phase(barrier(2), 0);
    const uint64_t states_operand = rows_operand(L::kStates);
    fence_products();
#pragma unroll
    for (int i = 0; i < kSteps; ++i) multiply_rows(dkey, writes[i], states_operand + row_step(i));
    commit_products();
    gate_partial = 0.0f;
    if (call.gates != nullptr) {
#pragma unroll
      for (int i = 0; i < kStateLoads; ++i) gate_partial += product(states[i], state_piece(i));
      gate_partial *= exp2_fast(last_sum);
    }
    wait_for_products<0, 16>(dkey);
    float key_sums[2];
    multiply_and_sum(key_sums, dkey, L::kKey);
    if (t == 0) gate_partial += key_sums[0] + key_sums[1];
    const uint64_t query_rows = rows_operand(L::kQuery), key_rows = rows_operand(L::kKey);
    const uint64_t transposed = operand(L::kDwrites);
    fence_products();
#pragma unroll
    for (int i = 0; i < 4; ++i) multiply_shared_rows(dkey, transposed + i * 2, query_rows + row_step(i), 1);
    if constexpr (Delta) {
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        multiply_shared_rows(dkey, transposed + kTileBytes / 16 + i * 2, key_rows + row_step(i), 1);
      }
    }
    commit_products();
    wait_for_products<0, 16>(dkey);
    multiply_and_sum(key_sums, dkey, L::kKey);
    if (call.gates != nullptr) store_gate_gradients(key_sums);
    if constexpr (Delta) {
#pragma unroll
      for (int i = 0; i < 64; ++i) dkey[i / 4][i % 4] += reads[i / 4][i % 4];
    }
    if constexpr (InPairs) wait_for_cluster();  // all warps of both blocks have read the writes
    store_gradient(dkey, &maps.dkey, call.dkey, L::kWrites);
  }

  // Waits for the warps of the block, or of a pair's, which have arrived before.
  static __device__ __forceinline__ void synchronise_blocks() {
    if constexpr (InPairs) {
      wait_for_cluster();
    } else {
      __syncthreads();
    }
  }

  // pairs = C X^T and products = C S^T of the tokens' gradients C; not committed.
  __device__ __forceinline__ void multiply_by_writes_and_state(float (&pairs)[8][4], float (&products)[16][4],
                                                               int cotangents) const {
    const uint64_t c = operand(cotangents), x = operand(L::kWrites), s = rows_operand(L::kStates);
    fence_products();
#pragma unroll
    for (int i = 0; i < kSteps; ++i) multiply_shared(pairs, c + column_step(i), x + column_step(i), i);
#pragma unroll
    for (int i = 0; i < kSteps; ++i) multiply_shared_rows(products, c + column_step(i), s + row_step(i), i);
  }

  // Multiplies pairs with their decay and with `factor`; those above the diagonal, or on and above it, become zero.
  template <bool WithDiagonal>
  __device__ __forceinline__ void decay_pairs(float (&pairs)[8][4], float factor) const {
#pragma unroll
    for (int tile = 0; tile < 8; ++tile) {
      const float2 column_sums = reinterpret_cast<const float2*>(numbers(L::kSums))[tile * 4 + t];
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const int at = warp * 16 + g + i / 2 * 8, column = tile * 8 + t * 2 + i % 2;
        const float decay = exp2_fast(sums[i / 2] - (i % 2 ? column_sums.y : column_sums.x));
        const bool kept = WithDiagonal ? column <= at : column < at;
        pairs[tile][i] = kept ? pairs[tile][i] * (decay * factor) : 0.0f;
      }
    }
  }

  static __device__ __forceinline__ void pack_pairs(uint32_t (&left)[4][4], const float (&pairs)[8][4]) {
#pragma unroll
    for (int i = 0; i < 16; ++i) {
      const int tile = i / 4 * 2 + i % 4 / 2, pair = i % 2 * 2;
      left[i / 4][i % 4] = pack(pairs[tile][pair], pairs[tile][pair + 1]);
    }
  }

  static __device__ __forceinline__ void scale_rows(float (&d)[16][4], float first, float second) {
#pragma unroll
    for (int i = 0; i < 64; ++i) d[i / 4][i % 4] *= i % 4 < 2 ? first : second;
  }

  // Sums up products of the thread's two rows with those of queries or keys.
  __device__ __forceinline__ void multiply_and_sum(float (&row_sums)[2], const float (&d)[16][4], int offset) const {
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const int at = warp * 16 + g + i * 8;
      float sum = 0.0f;
#pragma unroll
      for (int tile = 0; tile < 16; ++tile) {
        const uint32_t pair = *reinterpret_cast<const uint32_t*>(
            memory + offset + tile / 8 * kTileBytes + at * 128 + ((tile % 8 ^ (at & 7)) << 4) + t * 4);
        sum += d[tile][2 * i] * __uint_as_float(pair << 16) + d[tile][2 * i + 1] * __uint_as_float(pair & 0xFFFF0000u);
      }
      sum += __shfl_xor_sync(~0u, sum, 1);
      row_sums[i] = sum + __shfl_xor_sync(~0u, sum, 2);
    }
  }

  // Adds up the gradients of a pair's heads, through `offset` of both blocks: this block has the sums of half of the channels.
  __device__ __forceinline__ void add_other_head(float (&sums)[8][4], const float (&d)[16][4], int offset) const {
    const bool second = head % 2 == 1;
    const int at = offset + warp * kWarpBytes + lane * 16;
    const uint32_t to = address_in_block(shared + at, second ? 0 : 1);
#pragma unroll
    for (int i = 0; i < 8; ++i) {
      float other[4];
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        sums[i][j] = second ? d[8 + i][j] : d[i][j];
        other[j] = second ? d[i][j] : d[8 + i][j];
      }
      store_in_block(to + i * 512, other[0], other[1], other[2], other[3]);
    }
    arrive_at_cluster();
    wait_for_cluster();
#pragma unroll
    for (int i = 0; i < 8; ++i) {
      const float4 x = *reinterpret_cast<const float4*>(memory + at + i * 512);
      sums[i][0] += x.x, sums[i][1] += x.y, sums[i][2] += x.z, sums[i][3] += x.w;
    }
    __syncwarp();  // all lanes have read what the stored rows overwrite
  }

  // Stores a warp's 16 rows of the gradient of queries or keys, through `offset`, of which other warps read other rows.
  __device__ __forceinline__ void store_gradient(const float (&d)[16][4], const TensorMap* map, float* array,
                                                 int offset) const {
    if constexpr (InPairs) {
      float sums[8][4];
      add_other_head(sums, d, offset);
      store_columns(sums, map, array, offset);
    } else {
      store_columns(d, map, array, offset);
    }
  }

  __device__ __forceinline__ void store_columns(const float (&d)[kTiles][4], const TensorMap* map, float* array,
                                                int offset) const {
    if (array != nullptr) {
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        const int at = warp * 16 + g + i * 8;
        if (!is_stored(at)) continue;
        // In `array`, heads follow each other; in a pair, so do the halves of the channels of each head.
        float2* const to = reinterpret_cast<float2*>(array + token_index(at) * (kTiles * 8)) + t;
#pragma unroll
        for (int tile = 0; tile < kTiles; ++tile) to[tile * 4] = {d[tile][2 * i], d[tile][2 * i + 1]};
      }
      return;
    }
#pragma unroll
    for (int i = 0; i < kTiles / 2; ++i) {
      store_matrices(shared + offset + (InPairs ? warp * kWarpBytes : 0) + i / 4 * kTileBytes +
                         block_row(InPairs ? 0 : warp * 16, i % 4 * 2, lane),
                     pack(d[2 * i][0], d[2 * i][1]), pack(d[2 * i][2], d[2 * i][3]),
                     pack(d[2 * i + 1][0], d[2 * i + 1][1]), pack(d[2 * i + 1][2], d[2 * i + 1][3]));
    }
    fence_shared_stores();
    __syncwarp();
    if (lane == 0) {
      for (int i = 0; i < kTiles / 8; ++i) {
        store_chunk_rows(map, head * kTiles * 8 + i * 64, span(), warp * 16, row,
                         shared + offset + i * kTileBytes + warp * kWarpBytes);
      }
    }
  }

  // dV = beta dY, and <dY, V> of the warp's rows.
  __device__ __forceinline__ void store_value_gradients() const {
    constexpr int kLanes = V / 8, kRowsAtOnce = 32 / kLanes;
    const int first = warp * 16 + lane / kLanes, column = lane % kLanes;
    const int64_t token = int64_t(row) * call.tokens + span().token + first;
    const int value_head = head / (call.heads / call.value_heads);
    const __nv_bfloat16* from = call.value + (token * call.value_heads + value_head) * V + column * 8;
    __nv_bfloat16* to = call.dvalue + (token * call.heads + head) * V + column * 8;
#pragma unroll 4  // more loads at once would spill
    for (int i = 0; i < 16 / kRowsAtOnce; ++i) {
      const int at = first + i * kRowsAtOnce;
      const uint4 dy = *reinterpret_cast<const uint4*>(memory + L::kDwrites + column / 8 * kTileBytes + at * 128 +
                                                       ((column % 8 ^ (at & 7)) << 4));
      uint4 value = {0, 0, 0, 0};
      if (is_token(at)) value = *reinterpret_cast<const uint4*>(from);
      float sum = product(dy, value);
#pragma unroll
      for (int lanes = 1; lanes < kLanes; lanes *= 2) sum += __shfl_xor_sync(~0u, sum, lanes);
      if (column == 0) numbers(L::kRows)[at] = sum;
      const float beta = numbers(L::kBetas)[at];
      const auto scaled = [beta](uint32_t pair) {
        return pack(beta * __uint_as_float(pair << 16), beta * __uint_as_float(pair & 0xFFFF0000u));
      };
      if (is_stored(at)) {
        *reinterpret_cast<uint4*>(to) = {scaled(dy.x), scaled(dy.y), scaled(dy.z), scaled(dy.w)};
      }
      from += kRowsAtOnce * call.value_heads * V, to += kRowsAtOnce * call.heads * V;
    }
    __syncwarp();
  }

  static __device__ __forceinline__ float product(const uint4& a, const uint4& b) {
    const auto both = [](uint32_t x, uint32_t y) {
      return __uint_as_float(x << 16) * __uint_as_float(y << 16) +
             __uint_as_float(x & 0xFFFF0000u) * __uint_as_float(y & 0xFFFF0000u);
    };
    return both(a.x, b.x) + both(a.y, b.y) + (both(a.z, b.z) + both(a.w, b.w));
  }

  __device__ __forceinline__ uint4 state_piece(int i) const {
    return reinterpret_cast<const uint4*>(memory + L::kStates)[i * kGradientThreads + thread];
  }

  // Stores the transpose of a warp's 16 rows of pairs.
  __device__ __forceinline__ void store_transposed(int offset, const uint32_t (&pairs)[4][4]) const {
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const int at = i * 16 + lane / 16 * 8 + lane % 8, column = warp * 2 + lane / 8 % 2;
      store_matrices_transposed(shared + offset + at * 128 + ((column ^ (at & 7)) << 4), pairs[i][0], pairs[i][1],
                                pairs[i][2], pairs[i][3]);
    }
  }

  // F X of the warp's rows, as left operands.
  __device__ __forceinline__ void load_decayed_writes(uint32_t (&writes)[kSteps][4]) const {
    const float decay[2] = {exp2_fast(last_sum - sums[0]), exp2_fast(last_sum - sums[1])};
#pragma unroll
    for (int i = 0; i < kSteps; ++i) {
      load_matrices(writes[i], shared + L::kWrites + i / 4 * kTileBytes + block_row(warp * 16, i % 4 * 2, lane));
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        const uint32_t pair = writes[i][j];
        writes[i][j] = pack(decay[j % 2] * __uint_as_float(pair << 16),
                            decay[j % 2] * __uint_as_float(pair & 0xFFFF0000u));
      }
    }
  }

  // Sums up dG from each token to the chunk's end.
  __device__ __forceinline__ void store_gate_gradients(const float (&key_sums)[2]) {
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      if (t == 0) numbers(L::kRows)[warp * 16 + g + i * 8] = dgate_sums[i] - key_sums[i];
    }
#pragma unroll
    for (int lanes = 1; lanes < 32; lanes *= 2) gate_partial += __shfl_xor_sync(~0u, gate_partial, lanes);
    if (lane == 0) numbers(L::kPartialSums)[warp] = gate_partial;
    __syncthreads();
    if (warp != 0) return;
    const float2 own = reinterpret_cast<const float2*>(numbers(L::kRows))[lane];
    const float both = own.x + own.y;
    float sum = both;
#pragma unroll
    for (int lanes = 1; lanes < 32; lanes *= 2) {
      const float earlier_sum = __shfl_up_sync(~0u, sum, lanes);
      if (lane >= lanes) sum += earlier_sum;
    }
    const float* const partial = numbers(L::kPartialSums);
    const float total = __shfl_sync(~0u, sum, 31) + (partial[0] + partial[1] + (partial[2] + partial[3]));
    const float gradients[2] = {total - (sum - both), total - (sum - own.y)};
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const int at = 2 * lane + i;
      if (is_stored(at)) {
        call.dgates[token_index(at)] = log2_gate(at) < kMinLog2GateWithGradient ? 0.0f : gradients[i];
      }
    }
  }
};

template <int V, bool Delta>
__global__ void __launch_bounds__(kGradientThreads, 2)
    delta_token_gradients_kernel(const TokenGradientCall call, const __grid_constant__ TokenGradientMaps maps) {
#if __CUDA_ARCH__ == 900
  extern __shared__ __align__(1024) char memory[];
  TokenGradients<V, Delta> gradients(call, maps, memory);
  gradients.run();
#endif
}

// The same with the delta rule, for pairs of heads that share queries and keys.
template <int V>
__global__ void __cluster_dims__(2, 1, 1) __launch_bounds__(kGradientThreads, 2)
    delta_pair_gradients_kernel(const TokenGradientCall call, const __grid_constant__ TokenGradientMaps maps) {
#if __CUDA_ARCH__ == 900
  extern __shared__ __align__(1024) char memory[];
  TokenGradients<V, true, true> gradients(call, maps, memory);
  gradients.run();
#endif
}

}  // namespace ejkernel::delta_rule
