// The gradients of tokens with gates per key channel, of all chunks at the same time, from what the scans stored. As in
// token_gradients.cuh, with a, E and F per channel (channel_pairs.cuh), P = scale dO X^T on and below the diagonal and
// R = dY X^T below it, both without decay:
//   dQ_i = scale E_i (dO S^T)_i + sum over j <= i of P_ij a(j + 1..i) k_j
//   W_i = E_i (dY S^T)_i + sum over j < i of R_ij a(j + 1..i) k_j
//   dU_j = F_j (X dS^T)_j + sum over i >= j of a(j + 1..i) (P_ij q_i - beta_i R_ij k_i)
//   dK = dU - beta W,   dV = beta dY,   dbeta = <dY, V> - <W, K>,   dG = dQ Q - (beta W + dU) K per channel
// The gradient of a log gate is the sum of dG from its token to the chunk's end, and of <S after the chunk, dS>.
//
// The sums over pairs are those of levels of blocks, as in the scans: in the tile of a level, a token of a second block
// has its query times a(first of the block..i), and one of a first block its key times a(j + 1..last of the block). The
// product of P, or of its transpose, and the tile is a sum that only lacks the factor of the token itself.
//
// A block is one warpgroup with 64 key channels, and two of them share a multiprocessor.
#pragma once

#include "delta_rule/channel_ptx.cuh"
#include "delta_rule/token_gradients.cuh"

namespace ejkernel::delta_rule {

constexpr int kBlockChannels = 64, kGradientTokens = 16;

struct ChannelGradientCall {
  const float* gates;  // [B, T, H, K]
  const float* beta;   // [B, T, H]; like V, dV and dbeta only with the delta rule
  const __nv_bfloat16* value;  // [B, T, value heads, V]
  __nv_bfloat16* dvalue;       // [B, T, H, V]
  float *dquery, *dkey;        // [B, T, H, K] where heads share queries or keys, else null: maps have them
  float *dgates, *dbeta;       // [B, T, H, K], and [2, B, T, H], the sums over both halves of the channels
  const Chunk* table;  // as in DeltaCall
  int batch, tokens, chunks, heads, query_heads, key_heads, value_heads;
  float scale;
};

struct ChannelGradientMaps {
  TensorMap query, key;                 // [B, T, heads, K]
  TensorMap gates;                      // [B, T, H, 2 K], halves of float32 numbers
  TensorMap writes, cotangent, dwrites;  // [B, T, heads, V]
  TensorMap states, dstates;             // [B, H, chunks, V, K]
  TensorMap dquery, dkey;
};

// Offsets in shared memory, in bytes. Pairs, and the tiles of levels, overwrite loaded tiles that have been read.
template <int V, bool Delta>
struct ChannelGradientLayout {
  static constexpr int kValueBytes = V / 64 * kTileBytes;  // 64 tokens, or the state's V rows of 64 channels
  static constexpr int kQuery = 0, kKey = kTileBytes, kGates = 2 * kTileBytes, kWrites = 4 * kTileBytes,
                       kCotangent = kWrites + kValueBytes, kStates = kCotangent + kValueBytes,
                       kDstates = kStates + kValueBytes, kDwrites = kDstates + kValueBytes,
                       kLoadedEnd = kDwrites + (Delta ? kValueBytes : 0);
  static constexpr int kPairs = kWrites, kKeyPairs = kPairs + kTileBytes, kBetaPairs = kKeyPairs + kTileBytes,
                       kLevels = kPairs + (Delta ? 3 : 1) * kTileBytes, kKeyLevels = kLevels + kTileBytes,
                       kFactors = kLevels + (Delta ? 2 : 1) * kTileBytes, kRowFloats = 72,
                       kGateGradients = kFactors + kTileBytes,
                       kTotals = kGateGradients + kChunkTokens * kRowFloats * 4, kTotalsEnd = kTotals + 5 * 256;
  static constexpr int kEnd = kLoadedEnd > kTotalsEnd ? kLoadedEnd : kTotalsEnd;
  static constexpr int kBetas = kEnd, kStateSums = kBetas + 256, kBarriers = kStateSums + 512, kBytes = kBarriers + 16;
  static_assert(2 * (kBytes + 1024) <= 228 * 1024, "two blocks share a multiprocessor");
};

template <int V, bool Delta>
struct ChannelGradients {
  using L = ChannelGradientLayout<V, Delta>;
  static constexpr int kSteps = V / 16;
  const ChannelGradientCall& call;
  const ChannelGradientMaps& maps;
  char* const memory;
  const uint32_t shared;
  const int thread, warp, lane, t, g, half, head, chunk, row, first_channel;
  const Chunk span;  // the chunk's tokens
  float gates[kGradientTokens][2];              // a of the warp's tokens, and of two channels per lane
  float dquery[8][4], reads[8][4], dkey[8][4];  // dQ, W and dU: rows g and g + 8 of the warp's 16
  float betas[2];

  __device__ __forceinline__ ChannelGradients(const ChannelGradientCall& c, const ChannelGradientMaps& m, char* shared_memory)
      : call(c),
        maps(m),
        memory(shared_memory),
        shared(shared_address(shared_memory)),
        thread(threadIdx.x),
        warp(thread / 32),
        lane(thread % 32),
        t(thread % 4),
        g(thread % 32 / 4),
        half(blockIdx.x % 2),
        head(blockIdx.x / 2 % c.heads),
        chunk(blockIdx.x / 2 / c.heads % c.chunks),
        row(blockIdx.x / 2 / c.heads / c.chunks),
        first_channel(half * kBlockChannels),
        span(chunk_at(c.table, c.tokens, row, chunk)) {}

  __device__ __forceinline__ float* floats(int offset) const { return reinterpret_cast<float*>(memory + offset); }
  __device__ __forceinline__ uint32_t barrier(int i) const { return shared + L::kBarriers + 8 * i; }
  __device__ __forceinline__ int64_t token_index(int chunk_row) const {
    return (int64_t(row) * call.tokens + span.token + chunk_row) * call.heads + head;
  }
  __device__ __forceinline__ bool is_token(int chunk_row) const { return chunk_row < span.tokens; }
  __device__ __forceinline__ bool is_stored(int chunk_row) const { return chunk_row < span.rows; }
  // The row of accumulators' element i, and a pair of 16-bit elements in a tile of 64 columns.
  __device__ __forceinline__ int row_of(int i) const { return warp * kGradientTokens + g + i / 2 * 8; }
  __device__ __forceinline__ uint32_t pair_at(int offset, int at, int tile) const {
    return *reinterpret_cast<const uint32_t*>(memory + offset + at * 128 + ((tile ^ (at & 7)) << 4) + t * 4);
  }
  static __device__ __forceinline__ float low(uint32_t pair) { return __uint_as_float(pair << 16); }
  static __device__ __forceinline__ float high(uint32_t pair) { return __uint_as_float(pair & 0xFFFF0000u); }

  __device__ __forceinline__ void run() {
    if (span.rows == 0) return;  // the table of a packed row has more entries than chunks
    if (thread == 0) {
      start_barrier(barrier(0), 1), start_barrier(barrier(1), 1);
      publish_barriers();
      load_tiles();
    }
    if (thread < kChunkTokens) {
      floats(L::kBetas)[thread] = Delta && is_token(thread) ? __ldg(call.beta + token_index(thread)) : 0.0f;
    }
    __syncthreads();
    betas[0] = floats(L::kBetas)[row_of(0)], betas[1] = floats(L::kBetas)[row_of(2)];
    multiply_states();
    add_chunk();
    add_level<0>();
    add_level<1>();
    add_level<2>();
    add_level<3>();
    add_blocks<4>();
    add_blocks<5>();
    store_gradients();
    if (lane == 0) wait_for_stores();
  }

  // ---- loads ----

  __device__ __forceinline__ void load_values(const TensorMap* map, int offset, int column) const {
    for (int i = 0; i < V; i += 64) {
      copy_rows(shared + offset + i / 64 * kTileBytes, map, column + i, span, row, barrier(0));
    }
  }
  __device__ __forceinline__ void load_state(const TensorMap* map, int offset) const {
    const int index = (row * call.heads + head) * call.chunks + chunk;
    for (int i = 0; i < V; i += 64) {
      copy_tile(shared + offset + i / 64 * kTileBytes, map, first_channel, i, index, barrier(0));
    }
  }

  __device__ __forceinline__ void load_tiles() const {
    arrive_and_expect(barrier(0), (Delta ? 5 : 4) * L::kValueBytes);
    load_values(&maps.cotangent, L::kCotangent, head * V);
    const int write_head = Delta ? head : head / (call.heads / call.value_heads);
    load_values(&maps.writes, L::kWrites, write_head * V);
    load_state(&maps.states, L::kStates);
    if constexpr (Delta) load_values(&maps.dwrites, L::kDwrites, head * V);
    load_state(&maps.dstates, L::kDstates);
    arrive_and_expect(barrier(1), 4 * kTileBytes);
    const int query_head = head / (call.heads / call.query_heads), key_head = head / (call.heads / call.key_heads);
    copy_rows(shared + L::kGates, &maps.gates, 2 * (head * kKeyDim + first_channel), span, row, barrier(1));
    copy_rows(shared + L::kKey, &maps.key, key_head * kKeyDim + first_channel, span, row, barrier(1));
    copy_rows(shared + L::kQuery, &maps.query, query_head * kKeyDim + first_channel, span, row, barrier(1));
  }

  // ---- the states' part ----

  __device__ __forceinline__ uint64_t operand(int offset) const { return swizzled_operand(shared + offset); }
  __device__ __forceinline__ uint64_t rows_operand(int offset) const {
    return swizzled_operand(shared + offset, kTileBytes);
  }
  static __device__ __forceinline__ int column_step(int i) { return i / 4 * (kTileBytes / 16) + i % 4 * 2; }
  static __device__ __forceinline__ int row_step(int i) { return i * (16 * 128 / 16); }

  // Products of the tokens' gradients and of their writes with states, without decay; P and R.
  __device__ __forceinline__ void multiply_states() {
    float pairs[8][4], key_pairs[8][4];
    wait_for_phase(barrier(0), 0);
    const uint64_t writes = operand(L::kWrites), states = rows_operand(L::kStates);
    const uint64_t cotangents = operand(L::kCotangent), dwrites = operand(L::kDwrites);
    fence_products();
#pragma unroll
    for (int i = 0; i < kSteps; ++i) {
      multiply_shared(pairs, cotangents + column_step(i), writes + column_step(i), i);
      multiply_shared_rows(dquery, cotangents + column_step(i), states + row_step(i), i);
      multiply_shared_rows(dkey, writes + column_step(i), rows_operand(L::kDstates) + row_step(i), i);
      if constexpr (Delta) {
        multiply_shared(key_pairs, dwrites + column_step(i), writes + column_step(i), i);
        multiply_shared_rows(reads, dwrites + column_step(i), states + row_step(i), i);
      }
    }
    commit_products();
    float2 state_sums = {0.0f, 0.0f};
#pragma unroll 8
    for (int i = 0; i < V / 4; ++i) {
      const int offset = (warp * (V / 4) + i) * 128 + lane * 4;  // both tiles have the same swizzle
      const uint32_t s = *reinterpret_cast<const uint32_t*>(memory + L::kStates + swizzled(offset));
      const uint32_t ds = *reinterpret_cast<const uint32_t*>(memory + L::kDstates + swizzled(offset));
      state_sums.x += low(s) * low(ds), state_sums.y += high(s) * high(ds);
    }
    if constexpr (Delta) store_value_gradients();
    wait_for_products<0>(pairs);
    wait_for_products<0>(dquery);
    wait_for_products<0>(dkey);
    if constexpr (Delta) {
      wait_for_products<0>(key_pairs);
      wait_for_products<0>(reads);
    }
    __syncthreads();  // all warps have read the tiles
    reinterpret_cast<float2*>(floats(L::kGateGradients) + warp * kBlockChannels)[lane] = state_sums;
    store_pairs<true>(L::kPairs, pairs, call.scale, call.scale);
    if constexpr (Delta) {
      store_pairs<false>(L::kKeyPairs, key_pairs, 1.0f, 1.0f);
      store_pairs<false>(L::kBetaPairs, key_pairs, -betas[0], -betas[1]);
    }
  }

  static __device__ __forceinline__ int swizzled(int offset) { return offset ^ (offset >> 7 & 7) << 4; }

  // Stores a warp's 16 rows of pairs times factors; those above the diagonal, or on and above it, are zero.
  template <bool WithDiagonal>
  __device__ __forceinline__ void store_pairs(int offset, const float (&pairs)[8][4], float first, float second) const {
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      uint32_t packed[4];
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        const int tile = 2 * i + j / 2, at = row_of(j % 2 * 2), column = tile * 8 + t * 2;
        const float factor = j % 2 ? second : first;
        const float* const pair = &pairs[tile][j % 2 * 2];
        const bool low_kept = WithDiagonal ? column <= at : column < at;
        const bool high_kept = WithDiagonal ? column + 1 <= at : column + 1 < at;
        packed[j] = pack(low_kept ? pair[0] * factor : 0.0f, high_kept ? pair[1] * factor : 0.0f);
      }
      store_matrices(shared + offset + block_row(warp * kGradientTokens, 2 * i, lane), packed[0], packed[1], packed[2],
                     packed[3]);
    }
  }

  // dV = beta dY and <dY, V> of 32 tokens: each of the two blocks of a chunk has half of them.
  __device__ __forceinline__ void store_value_gradients() const {
    constexpr int kLanes = V / 8, kRowsAtOnce = kGradientThreads / kLanes;
    const int column = thread % kLanes, value_head = head / (call.heads / call.value_heads);
#pragma unroll 2
    for (int i = 0; i < kChunkTokens / 2 / kRowsAtOnce; ++i) {
      const int at = half * (kChunkTokens / 2) + i * kRowsAtOnce + thread / kLanes;
      const int64_t token = int64_t(row) * call.tokens + span.token + at;
      const uint4 dy = *reinterpret_cast<const uint4*>(memory + L::kDwrites + column / 8 * kTileBytes +
                                                       swizzled(at * 128 + column % 8 * 16));
      uint4 value = {0, 0, 0, 0};
      if (is_token(at)) value = *reinterpret_cast<const uint4*>(call.value + (token * call.value_heads + value_head) * V + column * 8);
      float sum = product(dy.x, value.x) + product(dy.y, value.y) + (product(dy.z, value.z) + product(dy.w, value.w));
#pragma unroll
      for (int lanes = 1; lanes < kLanes; lanes *= 2) sum += __shfl_xor_sync(~0u, sum, lanes);
      if (column == 0) floats(L::kStateSums)[at] = sum;
      const float beta = floats(L::kBetas)[at];
      const auto scaled = [beta](uint32_t pair) { return pack(beta * low(pair), beta * high(pair)); };
      if (is_stored(at)) {
        *reinterpret_cast<uint4*>(call.dvalue + (token * call.heads + head) * V + column * 8) = {
            scaled(dy.x), scaled(dy.y), scaled(dy.z), scaled(dy.w)};
      }
    }
  }
  static __device__ __forceinline__ float product(uint32_t x, uint32_t y) { return low(x) * low(y) + high(x) * high(y); }

  // ---- factors: rows of the warp's tokens, two channels per lane ----

  __device__ __forceinline__ int lane_offset(int token) const {
    return (warp * kGradientTokens + token) * 128 + ((lane / 4 ^ (token & 7)) << 4) + lane % 4 * 4;
  }
  __device__ __forceinline__ void multiply_by_gates(float2& factors, int token) const {
    factors.x *= gates[token][0], factors.y *= gates[token][1];
  }
  __device__ __forceinline__ void store_factors(int to, int token, const float2& factors) const {
    *reinterpret_cast<uint32_t*>(memory + to + lane_offset(token)) = pack(factors.x, factors.y);
  }
  __device__ __forceinline__ uint32_t multiplied(int from, int token, const float2& factors) const {
    const uint32_t x = *reinterpret_cast<const uint32_t*>(memory + from + lane_offset(token));
    return pack(low(x) * factors.x, high(x) * factors.y);
  }
  __device__ __forceinline__ void store_level(int to, int token, uint32_t x) const {
    *reinterpret_cast<uint32_t*>(memory + to + lane_offset(token)) = x;
  }

  // Tokens of a first block, with `factors` of what comes after the block of a warp.
  __device__ __forceinline__ void store_firsts(float2 factors, int first, int tokens) const {
#pragma unroll
    for (int i = tokens - 1; i >= 0; --i) {
      const uint32_t key = multiplied(L::kKey, first + i, factors);
      store_level(L::kLevels, first + i, key);
      if constexpr (Delta) store_level(L::kKeyLevels, first + i, key);
      store_factors(L::kFactors, first + i, factors);
      multiply_by_gates(factors, first + i);
    }
  }

  // Tokens of a second block, with `factors` of what comes before.
  __device__ __forceinline__ void store_seconds(float2 factors, int first, int tokens) const {
#pragma unroll
    for (int i = 0; i < tokens; ++i) {
      multiply_by_gates(factors, first + i);
      store_level(L::kLevels, first + i, multiplied(L::kQuery, first + i, factors));
      if constexpr (Delta) store_level(L::kKeyLevels, first + i, multiplied(L::kKey, first + i, factors));
      store_factors(L::kFactors, first + i, factors);
    }
  }

  __device__ __forceinline__ float2& total(int of_warp) const {
    return reinterpret_cast<float2*>(floats(L::kTotals) + of_warp * kBlockChannels)[lane];
  }
  __device__ __forceinline__ void multiply_by_total(float2& factors, int of_warp) const {
    const float2 x = total(of_warp);
    factors.x *= x.x, factors.y *= x.y;
  }

  // Reads the gates; multiplies what came from states with E and F, and starts the sums of gates' gradients.
  __device__ __forceinline__ void add_chunk() {
    wait_for_phase(barrier(1), 0);
    float2 own = {1.0f, 1.0f};
#pragma unroll
    for (int i = 0; i < kGradientTokens; ++i) {
      const float2 log_gates =
          reinterpret_cast<const float2*>(floats(L::kGates) + (warp * kGradientTokens + i) * kBlockChannels)[lane];
      gates[i][0] = exp2_fast(log_gates.x * kLog2e), gates[i][1] = exp2_fast(log_gates.y * kLog2e);
      multiply_by_gates(own, i);
    }
    total(warp) = own;
    __syncthreads();
    float2 before = {1.0f, 1.0f}, after = {1.0f, 1.0f}, all = {1.0f, 1.0f};
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      if (i < warp) multiply_by_total(before, i);
      if (i > warp) multiply_by_total(after, i);
      multiply_by_total(all, i);
    }
#pragma unroll
    for (int i = 0; i < kGradientTokens; ++i) {
      multiply_by_gates(before, i);
      store_factors(L::kFactors, i, before);
    }
#pragma unroll
    for (int i = kGradientTokens - 1; i >= 0; --i) {
      store_factors(L::kLevels, i, after);
      multiply_by_gates(after, i);
    }
    if (warp == 0) {  // E of the last token times <S, dS>
      float2 sum = {0.0f, 0.0f};
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const float2 x = reinterpret_cast<const float2*>(floats(L::kGateGradients) + i * kBlockChannels)[lane];
        sum.x += x.x, sum.y += x.y;
      }
      reinterpret_cast<float2*>(last_sums())[lane] = {sum.x * all.x, sum.y * all.y};
    }
    __syncthreads();
    add_states();
    __syncthreads();
    add_sums_of_writes();
  }

  // Sums of gates' gradients that belong to the chunk's end.
  __device__ __forceinline__ float* last_sums() const { return floats(L::kTotals) + 4 * kBlockChannels; }

  // Applies E and F to what came from states, and adds pairs of a query and a key of the same token.
  __device__ __forceinline__ void add_states() {
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      const int at = row_of(2 * h);
      const float same = __bfloat162float(*reinterpret_cast<const __nv_bfloat16*>(
          memory + L::kPairs + swizzled(at * 128 + at * 2)));
#pragma unroll
      for (int tile = 0; tile < 8; ++tile) {
        const uint32_t query = pair_at(L::kQuery, at, tile), key = pair_at(L::kKey, at, tile);
        const uint32_t from_start = pair_at(L::kFactors, at, tile), to_end = pair_at(L::kLevels, at, tile);
        float* const dq = &dquery[tile][2 * h];
        float* const dk = &dkey[tile][2 * h];
        dk[0] *= low(to_end), dk[1] *= high(to_end);
        *reinterpret_cast<float2*>(floats(L::kGateGradients) + at * L::kRowFloats + tile * 8 + t * 2) = {
            dk[0] * low(key), dk[1] * high(key)};
        dq[0] = dq[0] * (call.scale * low(from_start)) + same * low(key);
        dq[1] = dq[1] * (call.scale * high(from_start)) + same * high(key);
        dk[0] += same * low(query), dk[1] += same * high(query);
        if constexpr (Delta) reads[tile][2 * h] *= low(from_start), reads[tile][2 * h + 1] *= high(from_start);
      }
    }
  }

  __device__ __forceinline__ void add_sums_of_writes() const {
    if (thread >= kBlockChannels) return;
    float sum = last_sums()[thread];
#pragma unroll 8
    for (int at = 0; at < kChunkTokens; ++at) sum += floats(L::kGateGradients)[at * L::kRowFloats + thread];
    last_sums()[thread] = sum;
  }

  // ---- pairs ----

  // Loads a block of pairs as a left operand, its transpose if its rows are those of the other tokens.
  __device__ __forceinline__ void load_pairs(uint32_t (&a)[4], int offset, int of_warp, bool transposed) const {
    if (transposed) {
      load_matrices_transposed(a, shared + offset + block_row(of_warp * kGradientTokens, 2 * warp, lane));
      const uint32_t upper_right = a[1];
      a[1] = a[2], a[2] = upper_right;
    } else {
      load_matrices(a, shared + offset + block_row(warp * kGradientTokens, 2 * of_warp, lane));
    }
  }

  // The warp's own block of a level: pairs below the diagonal, and above it the transposed ones of another tile.
  template <int Level>
  __device__ __forceinline__ void load_own_pairs(uint32_t (&a)[4], int below, int above) const {
    uint32_t b[4];
    load_pairs(a, below, warp, false);
    load_pairs(b, above, warp, true);
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const int at = g + i % 2 * 8, column = i / 2 * 8 + t * 2;
      const uint32_t low_mask = (at ^ column) >> Level == 1 ? 0xFFFFu : 0u;
      const uint32_t high_mask = (at ^ (column + 1)) >> Level == 1 ? 0xFFFF0000u : 0u;
      a[i] = ((column < at ? a[i] : b[i]) & low_mask) | ((column + 1 < at ? a[i] : b[i]) & high_mask);
    }
  }

  // Adds products of pairs and rows of a level's tiles, of `Blocks` warps, with the factors of the warp's own tokens.
  template <int Blocks>
  __device__ __forceinline__ void add_products(const uint32_t (&pairs)[Blocks][4], const uint32_t (&key_pairs)[Blocks][4],
                                               int first_warp, const bool (&is_second)[2]) {
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      float products[2][4] = {}, key_products[2][4] = {};
#pragma unroll
      for (int block = 0; block < Blocks; ++block) {
        uint32_t b[4];
        const uint32_t at = block_row((first_warp + block) * kGradientTokens, 2 * i, lane);
        load_matrices_transposed(b, shared + L::kLevels + at);
        multiply_16(products, pairs[block], b);
        if constexpr (Delta) {
          load_matrices_transposed(b, shared + L::kKeyLevels + at);
          multiply_16(key_products, key_pairs[block], b);
        }
      }
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        const int tile = 2 * i + j / 2, h = j % 2;
        const uint32_t factors = pair_at(L::kFactors, row_of(2 * h), tile);
        const uint32_t second = is_second[h] ? factors : 0, first = is_second[h] ? 0 : factors;
#pragma unroll
        for (int e = 0; e < 2; ++e) {
          const float product = products[j / 2][2 * h + e], key_product = key_products[j / 2][2 * h + e];
          const float second_factor = e ? high(second) : low(second), first_factor = e ? high(first) : low(first);
          dquery[tile][2 * h + e] += product * second_factor;
          dkey[tile][2 * h + e] += (Delta ? product + key_product : product) * first_factor;
          if constexpr (Delta) reads[tile][2 * h + e] += key_product * second_factor;
        }
      }
    }
  }

  // Pairs of tokens in neighbouring blocks of 2^Level tokens, of a warp.
  template <int Level>
  __device__ __forceinline__ void add_level() {
    constexpr int kTokens = 1 << Level;
    __syncwarp();  // all lanes have read the tiles before
#pragma unroll
    for (int first = 0; first < kGradientTokens; first += 2 * kTokens) {
      store_firsts({1.0f, 1.0f}, first, kTokens);
      store_seconds({1.0f, 1.0f}, first + kTokens, kTokens);
    }
    __syncwarp();
    uint32_t pairs[1][4], key_pairs[1][4];
    load_own_pairs<Level>(pairs[0], L::kPairs, L::kPairs);
    if constexpr (Delta) load_own_pairs<Level>(key_pairs[0], L::kKeyPairs, L::kBetaPairs);
    add_products<1>(pairs, key_pairs, warp, {(g >> Level & 1) == 1, (g + 8 >> Level & 1) == 1});
  }

  // The same for blocks of whole warps.
  template <int Level>
  __device__ __forceinline__ void add_blocks() {
    constexpr int kBlocks = Level == 4 ? 1 : 2;
    const bool is_second = (warp >> (Level - 4) & 1) == 1;
    __syncthreads();  // all warps have read the tiles before
    float2 factors = {1.0f, 1.0f};
    if (Level == 5 && (warp == 0 || warp == 3)) multiply_by_total(factors, warp == 0 ? 1 : 2);
    if (is_second) {
      store_seconds(factors, 0, kGradientTokens);
    } else {
      store_firsts(factors, 0, kGradientTokens);
    }
    __syncthreads();
    const int first_warp = Level == 4 ? warp ^ 1 : is_second ? 0 : 2;
    uint32_t pairs[kBlocks][4], key_pairs[kBlocks][4];
#pragma unroll
    for (int i = 0; i < kBlocks; ++i) {
      load_pairs(pairs[i], L::kPairs, first_warp + i, !is_second);
      if constexpr (Delta) {
        load_pairs(key_pairs[i], is_second ? L::kKeyPairs : L::kBetaPairs, first_warp + i, !is_second);
      }
    }
    add_products<kBlocks>(pairs, key_pairs, first_warp, {is_second, is_second});
  }

  // ---- results ----

  __device__ __forceinline__ void store_gradients() {
    float read_sums[2] = {0.0f, 0.0f};
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      const int at = row_of(2 * h);
#pragma unroll
      for (int tile = 0; tile < 8; ++tile) {
        const uint32_t query = pair_at(L::kQuery, at, tile), key = pair_at(L::kKey, at, tile);
        float gradients[2];
#pragma unroll
        for (int e = 0; e < 2; ++e) {
          const float k = e ? high(key) : low(key), q = e ? high(query) : low(query);
          float& dk = dkey[tile][2 * h + e];
          float decayed = dk;
          if constexpr (Delta) {
            const float read = betas[h] * reads[tile][2 * h + e];
            read_sums[h] += reads[tile][2 * h + e] * k;
            decayed += read, dk -= read;
          }
          gradients[e] = dquery[tile][2 * h + e] * q - decayed * k;
        }
        *reinterpret_cast<float2*>(floats(L::kGateGradients) + at * L::kRowFloats + tile * 8 + t * 2) = {gradients[0],
                                                                                                         gradients[1]};
      }
    }
    if constexpr (Delta) store_beta_gradients(read_sums);
    __syncwarp();  // all lanes have read queries and keys
    store_gradient(dquery, &maps.dquery, call.dquery, L::kQuery);
    store_gradient(dkey, &maps.dkey, call.dkey, L::kKey);
    __syncthreads();
    store_gate_gradients();
  }

  __device__ __forceinline__ void store_beta_gradients(const float (&read_sums)[2]) const {
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      float sum = read_sums[h];
      sum += __shfl_xor_sync(~0u, sum, 1);
      sum += __shfl_xor_sync(~0u, sum, 2);
      const int at = row_of(2 * h);
      if (t != 0 || !is_stored(at)) continue;
      const float of_values = at / (kChunkTokens / 2) == half ? floats(L::kStateSums)[at] : 0.0f;
      call.dbeta[int64_t(half) * call.batch * call.tokens * call.heads + token_index(at)] = of_values - sum;
    }
  }

  // Stores a warp's 16 rows of the gradient of queries or keys, through `offset`, of which other warps read other rows.
  __device__ __forceinline__ void store_gradient(const float (&d)[8][4], const TensorMap* map, float* array,
                                                 int offset) const {
    if (array != nullptr) {
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        const int at = row_of(2 * h);
        if (!is_stored(at)) continue;
        float2* const to = reinterpret_cast<float2*>(array + token_index(at) * kKeyDim + first_channel) + t;
#pragma unroll
        for (int tile = 0; tile < 8; ++tile) to[tile * 4] = {d[tile][2 * h], d[tile][2 * h + 1]};
      }
      return;
    }
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      store_matrices(shared + offset + block_row(warp * kGradientTokens, i * 2, lane),
                     pack(d[2 * i][0], d[2 * i][1]), pack(d[2 * i][2], d[2 * i][3]),
                     pack(d[2 * i + 1][0], d[2 * i + 1][1]), pack(d[2 * i + 1][2], d[2 * i + 1][3]));
    }
    fence_shared_stores();
    __syncwarp();
    if (lane == 0) {
      store_chunk_rows(map, head * kKeyDim + first_channel, span, warp * kGradientTokens, row,
                       shared + offset + warp * kGradientTokens * 128);
    }
  }

  // Sums up dG from each token to the chunk's end: a thread has a channel of half of the tokens.
  __device__ __forceinline__ void store_gate_gradients() const {
    constexpr int kTokens = kChunkTokens / 2;
    const int channel = thread % kBlockChannels, first = thread / kBlockChannels * kTokens;
    const float* const from = floats(L::kGateGradients) + first * L::kRowFloats + channel;
    float sum = 0.0f;
#pragma unroll 8
    for (int i = 0; i < kTokens; ++i) sum += from[i * L::kRowFloats];
    if (first != 0) floats(L::kTotals)[channel] = sum;
    __syncthreads();
    sum = last_sums()[channel] + (first == 0 ? floats(L::kTotals)[channel] : 0.0f);
#pragma unroll 8
    for (int i = kTokens - 1; i >= 0; --i) {
      sum += from[i * L::kRowFloats];
      const int at = first + i;
      const bool differentiable = floats(L::kGates)[at * kBlockChannels + channel] * kLog2e >= kMinLog2GateWithGradient;
      if (is_stored(at)) call.dgates[token_index(at) * kKeyDim + first_channel + channel] = differentiable ? sum : 0.0f;
    }
  }
};

template <int V, bool Delta>
__global__ void __launch_bounds__(kGradientThreads, 2)
    channel_token_gradients_kernel(const ChannelGradientCall call, const __grid_constant__ ChannelGradientMaps maps) {
#if __CUDA_ARCH__ == 900
  extern __shared__ __align__(1024) char memory[];
  ChannelGradients<V, Delta> gradients(call, maps, memory);
  gradients.run();
#endif
}

}  // namespace ejkernel::delta_rule
