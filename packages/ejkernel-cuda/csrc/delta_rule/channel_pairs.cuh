// Gates per key channel: prepares chunks for the scans (channel_scan.cuh and channel_reverse.cuh), all at the same time. With
// a = exp2 of a token's log gates in powers of two, and a(i..j) the product of a of tokens i to j, per channel:
//   A_ij = sum over channels of q_i k_j a(j + 1..i), on and below the diagonal
//   M_ij = beta_i times the same sum with k_i in place of q_i, below the diagonal, and T = (I + M)^-1
//   E_i = a(first..i),  F_i = a(i + 1..last)
// The kernel stores A, T, q E, k E, k F and E of the last token. Only products of gates are taken, never a ratio, so
// gates down to -inf are exact, and the time does not depend on them.
//
// For pairs, two neighbouring blocks of 1, 2, 4, 8, 16 and 32 tokens are joined: in the tile of a level, a token i of a
// second block has its query times a(first of the block..i), and a token j of a first block has its key times
// a(j + 1..last of the block). The product of the tile with itself has the level's pairs. The four smallest levels are
// the warp's own, which has 16 tokens.
//
// With the delta rule a block has a warpgroup for queries, with A, q E and k F, and one for keys, with T and k E.
#pragma once

#include "delta_rule/pairs.cuh"

namespace ejkernel::delta_rule {

constexpr int kWarpTokens = 16, kLevelTileBytes = kWarpTokens * 128, kLevelBytes = 2 * kLevelTileBytes;

struct PrepareCall {
  const float* beta;  // [B, T, H]; null without the delta rule
  float* decay;       // [B, H, chunks, K], E of the last token
  int tokens, chunks, heads, query_heads, key_heads;
  const Chunk* table;  // as in DeltaCall
};

struct PrepareMaps {
  TensorMap query, key;                                // [B, T, heads, K]
  TensorMap gates;                                     // [B, T, H, 2 K], halves of float32 numbers
  TensorMap decayed_query, decayed_key, key_to_end;    // [B, T, H, K]: q E, k E and k F
  TensorMap scores, inverse;                           // [B, H, chunks, 64, 64]: A and T
};

// Shared memory, in bytes: operands in two tiles of 64 channels each. k E and k F take the place of gates, and T that
// of levels.
template <bool Delta>
struct PrepareLayout {
  static constexpr bool kDelta = Delta;
  static constexpr int kStages = 1;  // a block has one chunk
  static constexpr int kThreads = Delta ? 256 : 128, kBlocks = Delta ? 2 : 3;  // per multiprocessor
  static constexpr int kQuery = 0, kKey = 2 * kTileBytes, kGates = 4 * kTileBytes;
  static constexpr int kDecayedKey = kGates, kKeyToEnd = kGates + 2 * kTileBytes, kScores = kGates + 4 * kTileBytes;
  static constexpr int kQueryLevels = Delta ? kScores + kTileBytes : kGates;
  static constexpr int kKeyLevels = kScores + 3 * kTileBytes, kScratch = kKeyLevels, kScratchOffset = kScratch;
  static constexpr int kInverse = kKeyLevels + 2 * kTileBytes - kTileBytes;
  static constexpr int kTotals = Delta ? kKeyLevels + 2 * kTileBytes : kScores + kTileBytes;  // a of a warp's tokens
  static constexpr int kBetas = kTotals + (Delta ? 2 : 1) * 4 * kKeyDim * 4, kBarrier = kBetas + kChunkTokens * 4;
  static constexpr int kBytes = kBarrier + 16;
  static_assert(kBlocks * (kBytes + 1024) <= 228 * 1024, "blocks share a multiprocessor");
};

template <bool Delta>
struct Block<PrepareLayout<Delta>> {
  uint32_t shared;
  char* memory;
  int head, row, chunk, thread;

  __device__ __forceinline__ float* floats(int offset) const { return reinterpret_cast<float*>(memory + offset); }
};

// A warpgroup of queries or keys. A warp has 16 tokens, a lane four channels of them.
template <typename L, bool Keys>
struct ChannelPairs : Pairs<L> {
  using Base = Pairs<L>;
  using Base::block, Base::warp, Base::lane, Base::t, Base::g, Base::strictly_lower;
  const PrepareCall& call;
  const PrepareMaps& maps;
  float gates[kWarpTokens][4];

  __device__ __forceinline__ ChannelPairs(const Block<L>& b, const DeltaCall& scan, const PrepareCall& c,
                                          const PrepareMaps& m)
      : Base(b, scan, Keys ? 1 : 0), call(c), maps(m) {}

  __device__ __forceinline__ void run() {
    load_gates();
    __syncthreads();  // all warps have read the gates
    float diagonal[2][4] = {};
    if constexpr (Keys) {
      add_levels(diagonal);
      store_from_first(L::kDecayedKey, L::kKey, &maps.decayed_key);
      multiply_by_betas(diagonal);
      this->synchronise_group();  // all warps have read the levels
      store_zeros(L::kInverse);
      this->invert_diagonal(diagonal);
      this->invert_rest(block.shared + L::kInverse, 0);
      store_pairs_of_chunk(L::kInverse, &maps.inverse);
    } else {
      store_zeros(L::kScores);
      add_equal_tokens(diagonal);
      add_levels(diagonal);
      store_scores(diagonal, warp);
      store_pairs_of_chunk(L::kScores, &maps.scores);
      store_to_last();
      __syncwarp();  // all lanes have read the queries
      store_from_first(L::kQuery, L::kQuery, &maps.decayed_query);
    }
    if (lane == 0) wait_for_stores();
  }

  __device__ __forceinline__ void add_levels(float (&diagonal)[2][4]) {
    add_level<0>(diagonal);
    add_level<1>(diagonal);
    add_level<2>(diagonal);
    add_level<3>(diagonal);
    add_blocks();
  }

  // ---- rows of the warp's tokens: the lane's four channels of them ----

  __device__ __forceinline__ char* lane_rows(char* rows, int tile_bytes) const {
    return rows + lane / 16 * tile_bytes + lane % 2 * 8;
  }
  __device__ __forceinline__ char* token_rows(int operand) const {
    return lane_rows(block.memory + operand + warp * kLevelTileBytes, kTileBytes);
  }
  __device__ __forceinline__ int level_offset(int of_warp) const {
    return (Keys ? L::kKeyLevels : L::kQueryLevels) + of_warp * kLevelBytes;
  }
  __device__ __forceinline__ char* level_rows() const {
    return lane_rows(block.memory + level_offset(warp), kLevelTileBytes);
  }

  __device__ __forceinline__ void load_gates() {
    const float* const from = block.floats(L::kGates) + warp * kWarpTokens * kKeyDim;
#pragma unroll
    for (int row = 0; row < kWarpTokens; ++row) {
      const float4 log_gates = reinterpret_cast<const float4*>(from + row * kKeyDim)[lane];
      gates[row][0] = exp2_fast(log_gates.x * kLog2e), gates[row][1] = exp2_fast(log_gates.y * kLog2e);
      gates[row][2] = exp2_fast(log_gates.z * kLog2e), gates[row][3] = exp2_fast(log_gates.w * kLog2e);
    }
  }

  __device__ __forceinline__ void multiply_by_gates(float (&factors)[4], int row) const {
#pragma unroll
    for (int i = 0; i < 4; ++i) factors[i] *= gates[row][i];
  }

  __device__ __forceinline__ void multiply_row(char* to, const char* from, int row, const float (&factors)[4]) const {
    const int offset = row * 128 + ((lane % 16 / 2 ^ (row & 7)) << 4);
    const uint2 x = *reinterpret_cast<const uint2*>(from + offset);
    *reinterpret_cast<uint2*>(to + offset) = {
        pack(__uint_as_float(x.x << 16) * factors[0], __uint_as_float(x.x & 0xFFFF0000u) * factors[1]),
        pack(__uint_as_float(x.y << 16) * factors[2], __uint_as_float(x.y & 0xFFFF0000u) * factors[3])};
  }

  // Multiplies rows with `factors` and the gates from `first` up to their own; afterwards factors include all of them.
  __device__ __forceinline__ void multiply_from_first(char* to, const char* from, float (&factors)[4], int first = 0,
                                                      int rows = kWarpTokens) const {
#pragma unroll
    for (int i = 0; i < rows; ++i) {
      multiply_by_gates(factors, first + i);
      multiply_row(to, from, first + i, factors);
    }
  }

  // Multiplies rows with `factors` and the gates after their own; afterwards factors include all of them.
  __device__ __forceinline__ void multiply_to_last(char* to, const char* from, float (&factors)[4], int first = 0,
                                                   int rows = kWarpTokens) const {
#pragma unroll
    for (int i = rows - 1; i >= 0; --i) {
      multiply_row(to, from, first + i, factors);
      multiply_by_gates(factors, first + i);
    }
  }

  // ---- pairs ----

  // c += a b^T of 16 rows each, in two tiles of 64 channels that are `tile_bytes` apart.
  __device__ __forceinline__ void multiply_block(float (&c)[2][4], uint32_t a, uint32_t b, int tile_bytes) const {
#pragma unroll
    for (int i = 0; i < 8; ++i) {
      uint32_t left[4], right[4];
      const int at = i / 4 * tile_bytes + block_row(0, i % 4 * 2, lane);
      load_matrices(left, a + at);
      load_matrices(right, b + at);
      Half<__nv_bfloat16>::multiply(c[0], left, right[0], right[2]);
      Half<__nv_bfloat16>::multiply(c[1], left, right[1], right[3]);
    }
  }

  // Pairs of a query and a key of the same token.
  __device__ __forceinline__ void add_equal_tokens(float (&pairs)[2][4]) const {
    const uint32_t rows = block.shared + warp * kLevelTileBytes;
    multiply_block(pairs, rows + L::kQuery, rows + L::kKey, kTileBytes);
#pragma unroll
    for (int i = 0; i < 8; ++i) {
      if (g + i % 4 / 2 * 8 != i / 4 * 8 + t * 2 + i % 2) pairs[i / 4][i % 4] = 0.0f;
    }
  }

  // Pairs of tokens in neighbouring blocks of 2^Level tokens.
  template <int Level>
  __device__ __forceinline__ void add_level(float (&pairs)[2][4]) const {
    constexpr int kTokens = 1 << Level;
    const char* const keys = token_rows(L::kKey);
    const char* const seconds = Keys ? keys : token_rows(L::kQuery);
    char* const to = level_rows();
    __syncwarp();  // all lanes have read the tile before
#pragma unroll
    for (int first = 0; first < kWarpTokens; first += 2 * kTokens) {
      float after[4] = {1.0f, 1.0f, 1.0f, 1.0f}, before[4] = {1.0f, 1.0f, 1.0f, 1.0f};
      multiply_to_last(to, keys, after, first, kTokens);
      multiply_from_first(to, seconds, before, first + kTokens, kTokens);
    }
    __syncwarp();
    float products[2][4] = {};
    const uint32_t tile = block.shared + level_offset(warp);
    multiply_block(products, tile, tile, kLevelTileBytes);
#pragma unroll
    for (int i = 0; i < 8; ++i) {
      const int row = g + i % 4 / 2 * 8, column = i / 4 * 8 + t * 2 + i % 2;
      if (column < row && (row ^ column) >> Level == 1) pairs[i / 4][i % 4] = products[i / 4][i % 4];
    }
  }

  // Pairs of tokens of different warps.
  __device__ __forceinline__ void add_blocks() {
    const char* const keys = token_rows(L::kKey);
    const char* const seconds = Keys ? keys : token_rows(L::kQuery);
    const uint32_t own_tile = block.shared + level_offset(warp);
    float factors[4] = {1.0f, 1.0f, 1.0f, 1.0f};
    __syncwarp();
    if (warp % 2 == 1) {
      multiply_from_first(level_rows(), seconds, factors);
    } else {
      multiply_to_last(level_rows(), keys, factors);
    }
    store_total(factors);
    this->synchronise_group();
    if (warp % 2 == 1) {
      float products[2][4] = {};
      multiply_block(products, own_tile, own_tile - kLevelBytes, kLevelTileBytes);
      if constexpr (Keys) {
        // For the inverse: warp 1 has the pairs with tokens of warp 0, and warp 3 those with tokens of warp 2.
        put_system(products, 0);
        put_system(products, 2);
      } else {
        store_scores(products, warp - 1);
      }
    }
    this->synchronise_group();
#pragma unroll
    for (int i = 0; i < 4; ++i) factors[i] = 1.0f;
    if (warp == 0 || warp == 3) multiply_by_total(factors, warp == 0 ? 1 : 2);
    if (warp >= 2) {
      multiply_from_first(level_rows(), seconds, factors);
    } else {
      multiply_to_last(level_rows(), keys, factors);
    }
    this->synchronise_group();
    if (warp >= 2) {
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        float products[2][4] = {};
        multiply_block(products, own_tile, block.shared + level_offset(i), kLevelTileBytes);
        if constexpr (Keys) {
          put_system(products, i);
        } else {
          store_scores(products, i);
        }
      }
    }
  }

  // ---- results ----

  __device__ __forceinline__ void store_scores(const float (&pairs)[2][4], int column_block) const {
    uint32_t packed[4];
    pack_16(packed, pairs);
    this->store_block(block.shared + L::kScores, warp * kWarpTokens, 2 * column_block, packed);
  }

  __device__ __forceinline__ void multiply_by_betas(float (&pairs)[2][4]) const {
    const float* const betas = block.floats(L::kBetas) + warp * kWarpTokens + g;
#pragma unroll
    for (int i = 0; i < 8; ++i) pairs[i / 4][i % 4] *= betas[i % 4 / 2 * 8];
  }

  __device__ __forceinline__ void put_system(const float (&pairs)[2][4], int column_block) {
    const float* const betas = block.floats(L::kBetas) + warp * kWarpTokens + g;
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const float beta = betas[i % 2 * 8];
      const int pair = i % 2 * 2;
      strictly_lower[2 * column_block + i / 2][i % 2] = pack(beta * pairs[i / 2][pair], beta * pairs[i / 2][pair + 1]);
    }
  }

  // Blocks above the diagonal are zeros.
  __device__ __forceinline__ void store_zeros(int pairs) const {
    uint4* const rows = reinterpret_cast<uint4*>(block.memory + pairs + warp * kLevelTileBytes);
#pragma unroll
    for (int i = 0; i < 4; ++i) rows[i * 32 + lane] = {0, 0, 0, 0};
    __syncwarp();
  }

  // Stores the warp's 16 rows by TMA.
  __device__ __forceinline__ void store_pairs_of_chunk(int pairs, const TensorMap* map) const {
    fence_shared_stores();
    __syncwarp();
    if (lane != 0) return;
    const int index = (block.row * call.heads + block.head) * call.chunks + block.chunk;
    store_tile(map, 0, warp * kWarpTokens, index, block.shared + pairs + warp * kLevelTileBytes);
  }
  __device__ __forceinline__ void store_tokens(int operand, const TensorMap* map) const {
    fence_shared_stores();
    __syncwarp();
    if (lane != 0) return;
    const Chunk span = chunk_at(call.table, call.tokens, block.row, block.chunk);
    for (int i = 0; i < 2; ++i) {
      store_chunk_rows(map, block.head * kKeyDim + i * 64, span, warp * kWarpTokens, block.row,
                       block.shared + operand + i * kTileBytes + warp * kLevelTileBytes);
    }
  }

  // ---- gates of 16 tokens ----

  __device__ __forceinline__ float4& total(int of_warp) const {
    return reinterpret_cast<float4*>(block.floats(L::kTotals) + ((Keys ? 4 : 0) + of_warp) * kKeyDim)[lane];
  }
  __device__ __forceinline__ void store_total(const float (&factors)[4]) const {
    total(warp) = {factors[0], factors[1], factors[2], factors[3]};
  }
  __device__ __forceinline__ void multiply_by_total(float (&factors)[4], int of_warp) const {
    const float4 x = total(of_warp);
    factors[0] *= x.x, factors[1] *= x.y, factors[2] *= x.z, factors[3] *= x.w;
  }

  // ---- operands of the scans ----

  // q E or k E.
  __device__ __forceinline__ void store_from_first(int to, int from, const TensorMap* map) const {
    float factors[4] = {1.0f, 1.0f, 1.0f, 1.0f};
    for (int i = 0; i < warp; ++i) multiply_by_total(factors, i);
    multiply_from_first(token_rows(to), token_rows(from), factors);
    store_tokens(to, map);
  }

  // k F, and E of the last token.
  __device__ __forceinline__ void store_to_last() const {
    float factors[4] = {1.0f, 1.0f, 1.0f, 1.0f};
    for (int i = 3; i > warp; --i) multiply_by_total(factors, i);
    multiply_to_last(token_rows(L::kKeyToEnd), token_rows(L::kKey), factors);
    store_tokens(L::kKeyToEnd, &maps.key_to_end);
    if (warp != 0) return;
    const int64_t index = (int64_t(block.row) * call.heads + block.head) * call.chunks + block.chunk;
    reinterpret_cast<float4*>(call.decay + index * kKeyDim)[lane] = {factors[0], factors[1], factors[2], factors[3]};
  }
};

template <bool Delta>
__global__ void __launch_bounds__(PrepareLayout<Delta>::kThreads, PrepareLayout<Delta>::kBlocks)
    channel_prepare_kernel(const PrepareCall call, const __grid_constant__ PrepareMaps maps) {
#if __CUDA_ARCH__ == 900
  extern __shared__ __align__(1024) char memory[];
  using L = PrepareLayout<Delta>;
  const int head = blockIdx.x % call.heads, row_and_chunk = blockIdx.x / call.heads, thread = threadIdx.x;
  const Block<L> block{shared_address(memory), memory, head, row_and_chunk / call.chunks, row_and_chunk % call.chunks,
                       thread};
  const uint32_t barrier = block.shared + L::kBarrier;
  const Chunk span = chunk_at(call.table, call.tokens, block.row, block.chunk);
  if (span.mark < 0) return;  // the table of a packed row has more entries than chunks
  if (thread == 0) {
    start_barrier(barrier, 1);
    publish_barriers();
    arrive_and_expect(barrier, 8 * kTileBytes);
    const int query = head / (call.heads / call.query_heads) * kKeyDim;
    const int key = head / (call.heads / call.key_heads) * kKeyDim;
    copy_rows(block.shared + L::kGates, &maps.gates, 2 * head * kKeyDim, span, block.row, barrier);
    for (int i = 0; i < 2; ++i) {
      copy_rows(block.shared + L::kKey + i * kTileBytes, &maps.key, key + i * 64, span, block.row, barrier);
      copy_rows(block.shared + L::kQuery + i * kTileBytes, &maps.query, query + i * 64, span, block.row, barrier);
    }
  }
  if (Delta && thread < kChunkTokens) {
    const int64_t at = (int64_t(block.row) * call.tokens + span.token + thread) * call.heads + head;
    block.floats(L::kBetas)[thread] = thread < span.tokens ? __ldg(call.beta + at) : 0.0f;
  }
  __syncthreads();
  wait_for_phase(barrier, 0);
  const DeltaCall scan{};  // nothing of it is read: the inverse is that of other scans' pairs
  if (thread < 128) {
    ChannelPairs<L, false> pairs(block, scan, call, maps);
    pairs.run();
  } else if constexpr (Delta) {
    ChannelPairs<L, true> pairs(block, scan, call, maps);
    pairs.run();
  }
#endif
}

}  // namespace ejkernel::delta_rule
