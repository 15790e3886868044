// Latent attention of queries to the keys that they list, on Hopper: two consumer warpgroups that share 64 query heads of
// a query, and a producer warpgroup that gathers keys.
//
// A step has two blocks of 64 listed keys. Each warpgroup multiplies the queries with one of them and exponentiates its
// scores; both multiply both blocks of weights with their half of the values. A latent vector is key and value, and is
// copied once.
//
//   warpgroup 0     Q K0 | softmax 0 | P0 V0 left             | P1 V1 left           acc 64 x 256, left
//   warpgroup 1          | Q K1      | P0 V0 right, softmax 1 | P1 V1 right          acc 64 x 256, right
//                              P0 and its maximum       P1 and its maximum           through shared memory
//
// The running maximum passes from block 0 to block 1, and from there to block 0 of the next step, so both accumulators
// are relative to the same one. Weights reuse the memory of their block's rotary columns, which only the product with the
// queries reads.
//
// Shared memory, chunks of 64 rows and 64 columns with the 128-byte swizzle:
//
//   Q      9 chunks       K0  9 chunks: left 0..3, right 4..7, rotary 8       K1  likewise
//
//   part 0: K0 left          read last by warpgroup 0 (P0 V0)
//   part 1: K0 right, rotary                warpgroup 1 (P0 V0)
//   part 2: K1 right                        warpgroup 1 (P1 V1)
//   part 3: K1 left, rotary                 warpgroup 0 (P1 V1)
#pragma once

#include <cuda_bf16.h>

#include <cmath>
#include <cstdint>

#include "common/dependent_launch.cuh"
#include "common/tensor_core.cuh"
#include "common/warpgroup_mma.cuh"
#include "token_sparse_attention/ptx.cuh"

namespace ejkernel::token_sparse_attention {

constexpr int kHeads = 64, kKeys = 64, kStepKeys = 2 * kKeys;
constexpr int kValueSize = 512, kRowSize = 576, kHalf = kValueSize / 2;
constexpr int kRowBytes = kRowSize * 2, kChunkBytes = 64 * 128, kChunks = kRowSize / 64, kTileBytes = kChunks * kChunkBytes;
constexpr int kRotary = kChunks - 1;
constexpr int kWarpgroup = 128, kConsumers = 2 * kWarpgroup, kThreads = 3 * kWarpgroup;
constexpr int kParts = 4;
constexpr int kMostSplits = 8;  // the largest cluster that every chip supports

// A row's maximum moves only if a score exceeds it by this much, in base 2.
constexpr float kRescaleThreshold = 8.0f;
constexpr float kLog2E = 1.4426950408889634f, kLn2 = 0.6931471805599453f;

struct LatentCall {
  const __nv_bfloat16* query;  // [batch, tokens, heads, 576]
  const __nv_bfloat16* key;    // [batch, keys, 576]
  const int* indices;          // [batch, tokens, listed], below 0 for none
  const float* sinks;          // [batch, heads]; null without
  __nv_bfloat16* output;       // [batch, tokens, heads, 512]
  float* lse;                  // [batch, heads, tokens]
  int tokens, heads, keys, listed;
  int head_tiles, splits, split_entries;  // a split has so many entries of a list, a multiple of kStepKeys
  int items;
  float score_factor;  // on scores, to base 2; above 0
};

// The work of a block: 64 heads of a query, with a split of its list.
struct LatentItem {
  int row, first_head, split, first_entry, end_entry;  // row: batch and token

  __device__ __forceinline__ LatentItem(const LatentCall& call, int item) {
    split = item % call.splits;
    first_head = item / call.splits % call.head_tiles * kHeads;
    row = item / (call.head_tiles * call.splits);
    first_entry = split * call.split_entries;
    end_entry = min(first_entry + call.split_entries, call.listed);
  }
};

struct LatentShared {
  alignas(1024) char query[kTileBytes];
  char key[2][kTileBytes];
  float row_max[2][kHeads];     // after block 0, after block 1
  float row_sum[2][2][kHeads];  // of alternating items, by warpgroup
  float split_max[kHeads], split_sum[kHeads];
  uint64_t valid[2];            // entries of the blocks that are keys
  int steps;
  uint64_t queries_full, queries_free, weights_full[2], full[kParts], free[kParts];
};

// Makes copies that this thread has waited for visible to its products.
__device__ __forceinline__ void wait_for_copied(uint32_t barrier, uint32_t phase) {
  wait_for_phase(barrier, phase);
  fence_shared_stores();
}

__device__ __forceinline__ void arrive_with_warp(uint32_t barrier) {
  __syncwarp();
  if (threadIdx.x % 32 == 0) arrive(barrier);
}

// Gathers the queries and the listed keys of all items of a block.
template <bool Split>
struct LatentProducer {
  const LatentCall& call;
  LatentShared& shared;
  const int thread, piece, row;  // a thread copies 16 bytes of rows `row` + 16 i
  const uint32_t place;
  uint32_t step_parity = 1, item_parity = 1;

  __device__ __forceinline__ LatentProducer(const LatentCall& c, LatentShared& s)
      : call(c),
        shared(s),
        thread(threadIdx.x - kConsumers),
        piece(thread % 8),
        row(thread / 8),
        place(row * 128 + (piece ^ row % 8) * 16) {}

  // Steps up to the last entry that is a key. Every warp finds it alone, usually in the last entries of the list.
  __device__ __forceinline__ int count_steps(const int* list, const LatentItem& item) const {
    constexpr int kLoads = 4;
    for (int end = item.end_entry; end > item.first_entry; end -= 32 * kLoads) {
      int last = -1;
#pragma unroll
      for (int i = 0; i < kLoads; ++i) {
        const int entry = end - 32 * kLoads + i * 32 + thread % 32;
        const int index = entry >= item.first_entry ? __ldg(list + entry) : -1;
        const unsigned found = __ballot_sync(~0u, is_key(index));
        if (found) last = end - 32 * kLoads + i * 32 + 31 - __clz(found);
      }
      if (last >= 0) return (last - item.first_entry) / kStepKeys + 1;
    }
    return 0;
  }

  __device__ __forceinline__ bool is_key(int index) const {
    return static_cast<unsigned>(index) < static_cast<unsigned>(call.keys);
  }

  __device__ __forceinline__ void load_indices(int (&index)[4], int& own, const int* list, int entry, int end) const {
#pragma unroll
    for (int i = 0; i < 4; ++i) index[i] = entry + row + 16 * i < end ? __ldg(list + entry + row + 16 * i) : -1;
    own = thread < kKeys && entry + thread < end ? __ldg(list + entry + thread) : -1;
  }

  __device__ __forceinline__ void copy_chunk(uint32_t to, const char* const (&from)[4], const int (&bytes)[4],
                                             int chunk) const {
#pragma unroll
    for (int i = 0; i < 4; ++i) copy_async(to + chunk * kChunkBytes + place + i * 2048, from[i] + chunk * 128, bytes[i]);
  }

  __device__ __forceinline__ void copy_queries(const LatentItem& item, int steps) {
    wait_for_phase(shared_address(&shared.queries_free), item_parity);
    if (thread == 0) {
      shared.steps = steps;
      arrive(shared_address(&shared.queries_full));
    }
    const char* from[4];
    int bytes[4];
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const int head = item.first_head + row + 16 * i;
      bytes[i] = head < call.heads ? 16 : 0;
      from[i] = reinterpret_cast<const char*>(call.query) +
                (int64_t(item.row) * call.heads + min(head, call.heads - 1)) * kRowBytes + piece * 16;
    }
#pragma unroll
    for (int chunk = 0; chunk < kChunks; ++chunk) copy_chunk(shared_address(shared.query), from, bytes, chunk);
    arrive_after_copies(shared_address(&shared.queries_full));
    item_parity ^= 1;
  }

  template <int Block>
  __device__ __forceinline__ void copy_block(const char* keys, const int (&index)[4], int own) const {
    const char* from[4];
    int bytes[4];
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      bytes[i] = is_key(index[i]) ? 16 : 0;
      from[i] = keys + int64_t(bytes[i] ? index[i] : 0) * kRowBytes;
    }
    const unsigned valid = __ballot_sync(~0u, is_key(own));
    const uint32_t to = shared_address(shared.key[Block]);
#pragma unroll
    for (int n = 0; n < 2; ++n) {
      constexpr int kFirstPart = 2 * Block;
      const uint32_t full = shared_address(&shared.full[kFirstPart + n]);
      wait_for_phase(shared_address(&shared.free[kFirstPart + n]), step_parity);
      const int half = Block == 0 ? n : 1 - n;
#pragma unroll
      for (int chunk = 0; chunk < 4; ++chunk) copy_chunk(to, from, bytes, half * 4 + chunk);
      if (n == 1) copy_chunk(to, from, bytes, kRotary);
      if (n == 0 && thread < kKeys && thread % 32 == 0) {
        reinterpret_cast<unsigned*>(&shared.valid[Block])[thread / 32] = valid;
        arrive(full);
      }
      arrive_after_copies(full);
    }
  }

  __device__ __forceinline__ void run() {
    for (int i = blockIdx.x; i < call.items; i += gridDim.x) {
      const LatentItem item(call, i);
      const int* list = call.indices + int64_t(item.row) * call.listed;
      const char* keys =
          reinterpret_cast<const char*>(call.key) + int64_t(item.row / call.tokens) * call.keys * kRowBytes + piece * 16;
      int index[4], own;
      load_indices(index, own, list, item.first_entry, item.end_entry);
      const int steps = count_steps(list, item);
      copy_queries(item, steps);
      for (int step = 0; step < steps; ++step) {
        const int entry = item.first_entry + step * kStepKeys;
        int next[4], next_own;
        load_indices(next, next_own, list, entry + kKeys, item.end_entry);
        copy_block<0>(keys, index, own);
        load_indices(index, own, list, entry + kStepKeys, item.end_entry);
        copy_block<1>(keys, next, next_own);
        step_parity ^= 1;
      }
      // The consumers of the cluster merge their splits.
      for (int i = 0; Split && i < 3; ++i) synchronise_cluster();
    }
  }
};

// A consumer thread: of its warp's 16 rows (heads), it has rows g and g + 8, and columns 2t, 2t + 1 of each eight.
template <int Warpgroup, bool Split, bool Early, int RegisterChunks>
struct LatentConsumer {
  const LatentCall& call;
  LatentShared& shared;
  const int lane, warp, g, t, first_row;
  const uint32_t base;  // of shared memory, in units of descriptors
  float acc[32][4];
  float scores[8][4];
  uint32_t weights[4][4];
  uint32_t queries[RegisterChunks ? RegisterChunks : 1][4][4];  // the last chunks of the queries
  float row_max[2], row_sum[2];
  uint32_t step_parity = 0, item_parity = 0;

  __device__ __forceinline__ LatentConsumer(const LatentCall& c, LatentShared& s)
      : call(c),
        shared(s),
        lane(threadIdx.x % 32),
        warp(threadIdx.x % kWarpgroup / 32),
        g(lane / 4),
        t(lane % 4),
        first_row(warp * 16 + g),
        base((shared_address(&s) & 0x3FFFF) / 16) {}

  // The address at which ldmatrix and stmatrix have 16 columns of the warp's rows.
  __device__ __forceinline__ uint32_t fragment_address(uint32_t chunk, int column_step) const {
    const int row = warp * 16 + lane % 16, piece = column_step * 2 + lane / 16;
    return chunk + row * 128 + (piece ^ row % 8) * 16;
  }

  __device__ __forceinline__ void load_queries() {
#pragma unroll
    for (int c = 0; c < RegisterChunks; ++c) {
#pragma unroll
      for (int k = 0; k < 4; ++k) {
        load_matrices(queries[c][k],
                      fragment_address(shared_address(shared.query) + (kRotary - c) * kChunkBytes, k));
      }
    }
  }

  // Adds the products of the queries with a chunk of keys, from 16 columns on.
  template <int Block, int Chunk, bool First, int K = 0>
  __device__ __forceinline__ void multiply_chunk() {
    constexpr uint32_t kOffset = (Chunk * kChunkBytes + K * 32) / 16, kKeysAt = kTileBytes / 16 * (1 + Block) + kOffset;
    if constexpr (kRotary - Chunk < RegisterChunks) {
      add_product_of_rows<kKeysAt>(scores, queries[kRotary - Chunk][K], base);
    } else {
      multiply_rows<kOffset, kKeysAt, !First || K != 0>(scores, base);
    }
    if constexpr (K < 3) multiply_chunk<Block, Chunk, First, K + 1>();
  }

  // Issues the products of the queries with the part of the keys that arrives first, and with the other one.
  template <int Block>
  __device__ __forceinline__ void multiply_first_part() {
    constexpr int kFirst = Block == 0 ? 0 : 4;
    multiply_chunk<Block, kFirst, true>();
    multiply_chunk<Block, kFirst + 1, false>();
    multiply_chunk<Block, kFirst + 2, false>();
    multiply_chunk<Block, kFirst + 3, false>();
  }
  template <int Block>
  __device__ __forceinline__ void multiply_second_part() {
    constexpr int kFirst = Block == 0 ? 4 : 0;
    multiply_chunk<Block, kFirst, false>();
    multiply_chunk<Block, kFirst + 1, false>();
    multiply_chunk<Block, kFirst + 2, false>();
    multiply_chunk<Block, kFirst + 3, false>();
    multiply_chunk<Block, kRotary, false>();
  }

  __device__ __forceinline__ void wait_part(int part) {
    wait_for_copied(shared_address(&shared.full[part]), step_parity);
  }

  // acc += weights values, weights of this warpgroup in registers or of the other in shared memory.
  template <int Block, int K = 0>
  __device__ __forceinline__ void multiply_values() {
    constexpr uint32_t kBlockAt = kTileBytes / 16 * (1 + Block);
    constexpr uint32_t kValuesAt = kBlockAt + (Warpgroup * 4 * kChunkBytes + K * 16 * 128) / 16;
    if constexpr (Block == Warpgroup) {
      add_product<kValuesAt>(acc, weights[K], base);
    } else {
      add_product<kBlockAt + (kRotary * kChunkBytes + K * 32) / 16, kValuesAt>(acc, base);
    }
    if constexpr (K < 3) multiply_values<Block, K + 1>();
  }

  __device__ __forceinline__ void mask_scores(uint64_t valid) {
    if (valid == ~uint64_t(0)) return;
#pragma unroll
    for (int j = 0; j < 8; ++j) {
      const unsigned bits = static_cast<unsigned>(valid >> (j * 8)) >> (2 * t);
      if (!(bits & 1)) scores[j][0] = scores[j][2] = -INFINITY;
      if (!(bits & 2)) scores[j][1] = scores[j][3] = -INFINITY;
    }
  }

  // Moves the running maximum, if a score of the warp's rows exceeds it by far.
  __device__ __forceinline__ void update_max() {
    float top[2] = {-INFINITY, -INFINITY};
#pragma unroll
    for (int j = 0; j < 8; ++j) {
      top[0] = fmaxf(top[0], fmaxf(scores[j][0], scores[j][1]));
      top[1] = fmaxf(top[1], fmaxf(scores[j][2], scores[j][3]));
    }
    const bool above = top[0] * call.score_factor > row_max[0] + kRescaleThreshold ||
                       top[1] * call.score_factor > row_max[1] + kRescaleThreshold;
    if (!__any_sync(~0u, above)) return;
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      top[i] = fmaxf(top[i], __shfl_xor_sync(~0u, top[i], 1));
      top[i] = fmaxf(top[i], __shfl_xor_sync(~0u, top[i], 2)) * call.score_factor;
      if (top[i] > row_max[i] + kRescaleThreshold) row_max[i] = top[i];
    }
  }

  // Replaces scores by weights; adds them to the sums.
  __device__ __forceinline__ void exponentiate() {
    const float shift[2] = {row_max[0] == -INFINITY ? 0.0f : row_max[0], row_max[1] == -INFINITY ? 0.0f : row_max[1]};
#pragma unroll
    for (int j = 0; j < 8; ++j) {
#pragma unroll
      for (int c = 0; c < 4; ++c) {
        scores[j][c] = exp2_approximate(fmaf(scores[j][c], call.score_factor, -shift[c / 2]));
      }
    }
#pragma unroll
    for (int j = 0; j < 8; ++j) {
      row_sum[0] += scores[j][0] + scores[j][1];
      row_sum[1] += scores[j][2] + scores[j][3];
    }
#pragma unroll
    for (int j = 0; j < 8; ++j) {
      weights[j / 2][j % 2 * 2] = Half<__nv_bfloat16>::pack(scores[j][0], scores[j][1]);
      weights[j / 2][j % 2 * 2 + 1] = Half<__nv_bfloat16>::pack(scores[j][2], scores[j][3]);
    }
  }

  // Passes this warpgroup's weights and the maximum that they are relative to to the other one.
  __device__ __forceinline__ void publish_weights() {
    const uint32_t chunk = shared_address(shared.key[Warpgroup]) + kRotary * kChunkBytes;
#pragma unroll
    for (int k = 0; k < 4; ++k) store_matrices(fragment_address(chunk, k), weights[k]);
    if (t == 0) {
      shared.row_max[Warpgroup][first_row] = row_max[0];
      shared.row_max[Warpgroup][first_row + 8] = row_max[1];
    }
    fence_shared_stores();
    arrive_with_warp(shared_address(&shared.weights_full[Warpgroup]));
  }

  static __device__ __forceinline__ void find_alpha(float (&alpha)[2], const float (&from)[2], const float (&to)[2]) {
#pragma unroll
    for (int i = 0; i < 2; ++i) alpha[i] = from[i] == to[i] ? 1.0f : exp2_approximate(from[i] - to[i]);
  }

  __device__ __forceinline__ void rescale(const float (&alpha)[2]) {
    if (!__any_sync(~0u, alpha[0] != 1.0f || alpha[1] != 1.0f)) return;
#pragma unroll
    for (int j = 0; j < 32; ++j) {
      acc[j][0] *= alpha[0], acc[j][1] *= alpha[0];
      acc[j][2] *= alpha[1], acc[j][3] *= alpha[1];
    }
  }

  __device__ __forceinline__ void read_max(float (&to)[2], int block) const {
    to[0] = shared.row_max[block][first_row], to[1] = shared.row_max[block][first_row + 8];
  }

  __device__ __forceinline__ void free_part(int part) { arrive_with_warp(shared_address(&shared.free[part])); }

  // A step of warpgroup 0, which scores block 0 and accumulates the left half.
  __device__ __forceinline__ void first_step(bool is_last) {
    if (!Early) {
      wait_part(0);
      fence_products();
      multiply_first_part<0>();
      commit_products();
    }
    wait_part(1);
    fence_products();
    multiply_second_part<0>();
    commit_products();
    arrive_at<2, kConsumers>();
    wait_for_products<0>(scores);
    if (is_last) arrive_with_warp(shared_address(&shared.queries_free));
    mask_scores(shared.valid[0]);
    float alpha[2], before[2] = {row_max[0], row_max[1]};
    update_max();
    find_alpha(alpha, before, row_max);
    row_sum[0] *= alpha[0], row_sum[1] *= alpha[1];
    exponentiate();
    publish_weights();
    rescale(alpha);
    fence_products();
    multiply_values<0>();
    commit_products();
    wait_for_products<0>(acc);
    free_part(0);
    wait_for_phase(shared_address(&shared.weights_full[1]), step_parity);
    before[0] = row_max[0], before[1] = row_max[1];
    read_max(row_max, 1);
    find_alpha(alpha, before, row_max);
    row_sum[0] *= alpha[0], row_sum[1] *= alpha[1];
    rescale(alpha);
    fence_products();
    multiply_values<1>();
    commit_products();
    step_parity ^= 1;
    if (Early) {
      // Also after the last step, where its result is not used: in a branch, ptxas would serialise products.
      if (!is_last) wait_part(0);
      fence_products();
      multiply_first_part<0>();
      commit_products();
      wait_for_products<1>(acc);
    } else {
      wait_for_products<0>(acc);
    }
    free_part(3);
  }

  // A step of warpgroup 1, which scores block 1 and accumulates the right half.
  __device__ __forceinline__ void second_step(bool is_last) {
    wait_part(2);
    synchronise_at<2, kConsumers>();
    fence_products();
    multiply_first_part<1>();
    wait_part(3);
    multiply_second_part<1>();
    commit_products();
    wait_for_phase(shared_address(&shared.weights_full[0]), step_parity);
    float alpha[2], before[2] = {row_max[0], row_max[1]};
    read_max(row_max, 0);
    find_alpha(alpha, before, row_max);
    row_sum[0] *= alpha[0], row_sum[1] *= alpha[1];
    rescale(alpha);
    fence_products();
    multiply_values<0>();
    commit_products();
    wait_for_products<1>(scores);
    if (is_last) arrive_with_warp(shared_address(&shared.queries_free));
    mask_scores(shared.valid[1]);
    before[0] = row_max[0], before[1] = row_max[1];
    update_max();
    find_alpha(alpha, before, row_max);
    row_sum[0] *= alpha[0], row_sum[1] *= alpha[1];
    exponentiate();
    publish_weights();
    wait_for_products<0>(acc);
    free_part(1);
    rescale(alpha);
    fence_products();
    multiply_values<1>();
    commit_products();
    wait_for_products<0>(acc);
    free_part(2);
    step_parity ^= 1;
  }

  // Adds up both warpgroups' sums.
  __device__ __forceinline__ void add_up_sums() {
    auto& sums = shared.row_sum[item_parity];
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      row_sum[i] += __shfl_xor_sync(~0u, row_sum[i], 1);
      row_sum[i] += __shfl_xor_sync(~0u, row_sum[i], 2);
      if (t == 0) sums[Warpgroup][first_row + 8 * i] = row_sum[i];
    }
    synchronise_at<1, kConsumers>();
#pragma unroll
    for (int i = 0; i < 2; ++i) row_sum[i] += sums[1 - Warpgroup][first_row + 8 * i];
  }

  // The factor on a row of the accumulator, and the row's lse, with the splits of the cluster.
  __device__ __forceinline__ void normalise(const LatentItem& item, int i, float& factor, float& lse) const {
    const int row = first_row + 8 * i, head = item.first_head + row, splits = Split ? call.splits : 1;
    float sink = -INFINITY;
    if (call.sinks && head < call.heads) sink = call.sinks[item.row / call.tokens * call.heads + head] * kLog2E;
    float top = fmaxf(row_max[i], sink);
    for (int n = 0; Split && n < splits; ++n) top = fmaxf(top, load_of_block(&shared.split_max[row], n));
    const float shift = top == -INFINITY ? 0.0f : top;
    // Not 0 but for a row without keys and sinks; NaN stays NaN.
    float denominator = exp2_approximate(sink - shift);
    for (int n = 0; n < splits; ++n) {
      const float own_max = Split ? load_of_block(&shared.split_max[row], n) : row_max[i];
      const float sum = Split ? load_of_block(&shared.split_sum[row], n) : row_sum[i];
      denominator += own_max == -INFINITY ? sum : sum * exp2_approximate(own_max - shift);
    }
    const bool attends = denominator != 0.0f;
    factor = attends ? (row_max[i] == -INFINITY ? 1.0f : exp2_approximate(row_max[i] - shift)) / denominator : 0.0f;
    lse = attends ? (log2f(denominator) + shift) * kLn2 : -INFINITY;
  }

  __device__ __forceinline__ void store_lse(const LatentItem& item, int head, float lse) const {
    if (Warpgroup != 0 || t != 0 || item.split != 0) return;
    const int batch = item.row / call.tokens, token = item.row % call.tokens;
    call.lse[(int64_t(batch) * call.heads + head) * call.tokens + token] = lse;
  }

  __device__ __forceinline__ void store(const LatentItem& item) {
    add_up_sums();
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      float factor, lse;
      normalise(item, i, factor, lse);
      const int head = item.first_head + first_row + 8 * i;
      const bool inside = head < call.heads;
      store_row(
          call.output + (int64_t(item.row) * call.heads + head) * kValueSize + Warpgroup * kHalf, i, factor, inside);
      if (inside) store_lse(item, head, lse);
    }
  }

  // The place of eight columns of a row in shared memory, in an order in which a warp's stores are in different banks.
  __device__ __forceinline__ float* merged_place(int row, int eight) const {
    return reinterpret_cast<float*>(shared.key) + row * kValueSize + (eight ^ row % 8) * 8;
  }

  // Merges the splits of a cluster: every block leaves its share of the output in its shared memory, relative to the
  // denominator of all, and adds up some of the columns of all blocks.
  __device__ __forceinline__ void merge(const LatentItem& item) {
    add_up_sums();
    if (Warpgroup == 0 && t == 0) {
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        shared.split_max[first_row + 8 * i] = row_max[i];
        shared.split_sum[first_row + 8 * i] = row_sum[i];
      }
    }
    synchronise_cluster();  // all products have read the keys, too
    int opaque_row = first_row;
    asm volatile("" : "+r"(opaque_row));  // addresses computed before the loop over keys would be spilled
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const int row = opaque_row + 8 * i, head = item.first_head + row;
      float factor, lse;
      normalise(item, i, factor, lse);
      if (head >= call.heads) continue;
      store_lse(item, head, lse);
#pragma unroll
      for (int j = 0; j < 32; ++j) {
        *reinterpret_cast<float2*>(merged_place(row, Warpgroup * 32 + j) + 2 * t) = {
            acc[j][2 * i] * factor, acc[j][2 * i + 1] * factor};
      }
    }
    synchronise_cluster();
    const int eights = min(kHeads, call.heads - item.first_head) * (kValueSize / 8);
    __nv_bfloat16* const to = call.output + (int64_t(item.row) * call.heads + item.first_head) * kValueSize;
    for (int i = item.split * kConsumers + threadIdx.x; i < eights; i += call.splits * kConsumers) {
      const float* const from = merged_place(i / 64, i % 64);
      float4 sum[2] = {};
      for (int n = 0; n < call.splits; ++n) {
#pragma unroll
        for (int k = 0; k < 2; ++k) {
          const float4 more = load_four_of_block(from + 4 * k, n);
          sum[k].x += more.x, sum[k].y += more.y, sum[k].z += more.z, sum[k].w += more.w;
        }
      }
      using Pair = Half<__nv_bfloat16>;
      reinterpret_cast<uint4*>(to)[i] = {
          Pair::pack(sum[0].x, sum[0].y), Pair::pack(sum[0].z, sum[0].w), Pair::pack(sum[1].x, sum[1].y),
          Pair::pack(sum[1].z, sum[1].w)};
    }
    synchronise_cluster();  // other blocks may still be reading this block's share
  }

  // Stores half of a row. Four threads have two columns of each eight; they exchange them, so that each has eight of its
  // own of 32.
  __device__ __forceinline__ void store_row(__nv_bfloat16* to, int i, float factor, bool inside) const {
#pragma unroll
    for (int j = 0; j < 32; j += 4) {
      uint32_t own[4];
#pragma unroll
      for (int n = 0; n < 4; ++n) {
        own[n] = Half<__nv_bfloat16>::pack(acc[j + n][2 * i] * factor, acc[j + n][2 * i + 1] * factor);
      }
      // Transposes a 4 x 4 matrix over four threads.
#pragma unroll
      for (int n = 0; n < 4; n += 2) {
        const uint32_t received = __shfl_xor_sync(~0u, t & 1 ? own[n] : own[n + 1], 1);
        (t & 1 ? own[n] : own[n + 1]) = received;
      }
#pragma unroll
      for (int n = 0; n < 2; ++n) {
        const uint32_t received = __shfl_xor_sync(~0u, t & 2 ? own[n] : own[n + 2], 2);
        (t & 2 ? own[n] : own[n + 2]) = received;
      }
      if (inside) *reinterpret_cast<uint4*>(to + (j + t) * 8) = {own[0], own[1], own[2], own[3]};
    }
  }

  __device__ __forceinline__ void run() {
    for (int i = blockIdx.x; i < call.items; i += gridDim.x) {
      const LatentItem item(call, i);
#pragma unroll
      for (int j = 0; j < 128; ++j) acc[j / 4][j % 4] = 0.0f;
      row_max[0] = row_max[1] = -INFINITY;
      row_sum[0] = row_sum[1] = 0.0f;
      wait_for_copied(shared_address(&shared.queries_full), item_parity);
      const int steps = shared.steps;
      if (steps == 0) {
        arrive_with_warp(shared_address(&shared.queries_free));
      } else {
        load_queries();
        if (Early && Warpgroup == 0) {
          wait_part(0);
          fence_products();
          multiply_first_part<0>();
          commit_products();
        }
        for (int step = 0; step < steps; ++step) {
          const bool is_last = step + 1 == steps;
          if constexpr (Warpgroup == 0) {
            first_step(is_last);
          } else {
            second_step(is_last);
          }
        }
        if (Early && Warpgroup == 0) wait_for_products<0>(scores);
      }
      Split ? merge(item) : store(item);
      item_parity ^= 1;
    }
  }
};

template <bool Split, bool Early, int RegisterChunks>
__global__ void __launch_bounds__(kThreads, 1) latent_kernel(const LatentCall call) {
#if __CUDA_ARCH__ == 900
  extern __shared__ __align__(1024) char memory[];
  LatentShared& shared = *reinterpret_cast<LatentShared*>(memory);
  if (threadIdx.x == 0) {
    start_barrier(shared_address(&shared.queries_full), kWarpgroup + 1);
    start_barrier(shared_address(&shared.queries_free), kConsumers / 32);
    for (int i = 0; i < 2; ++i) start_barrier(shared_address(&shared.weights_full[i]), kWarpgroup / 32);
    for (int i = 0; i < kParts; ++i) {
      start_barrier(shared_address(&shared.full[i]), kWarpgroup + (i % 2 ? 0 : kKeys / 32));
      start_barrier(shared_address(&shared.free[i]), kWarpgroup / 32);
    }
    publish_barriers();
  }
  __syncthreads();
  if constexpr (Split) wait_for_previous_launch();
  const int warpgroup = threadIdx.x / kWarpgroup;
  if (warpgroup == 2) {
    give_registers<40>();
    LatentProducer<Split>(call, shared).run();
  } else {
    take_registers<232>();
    if (warpgroup == 0) {
      LatentConsumer<0, Split, Early, RegisterChunks>(call, shared).run();
    } else {
      LatentConsumer<1, Split, Early, RegisterChunks>(call, shared).run();
    }
  }
#endif
}

}  // namespace ejkernel::token_sparse_attention
