// The consumer warpgroups of latent attention to listed keys.
#pragma once

#include <cmath>

#include "token_sparse_attention/call.cuh"
#include "token_sparse_attention/ptx.cuh"

namespace ejkernel::token_sparse_attention {

// A consumer thread: of its warp's 16 rows (heads), it has rows g and g + 8, and columns 2t, 2t + 1 of each eight.
template <int Warpgroup, bool Split>
struct LatentConsumer {
  const LatentCall& call;
  LatentShared& shared;
  const int lane, warp, g, t, first_row;
  const uint32_t base;  // of shared memory, in units of descriptors
  float acc[32][4];
  float scores[8][4];
  uint32_t weights[4][4];
  uint32_t queries[4][4];  // the rotary columns
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

  __device__ __forceinline__ void load_rotary_queries() {
    const uint32_t chunk = shared_address(shared.query) + kRotary * kChunkBytes;
#pragma unroll
    for (int k = 0; k < 4; ++k) load_matrices(queries[k], fragment_address(chunk, k));
  }

  // Adds the products of the queries with a chunk of keys, from 16 columns on.
  template <int Block, int Chunk, bool First, int K = 0>
  __device__ __forceinline__ void multiply_chunk() {
    constexpr uint32_t kOffset = (Chunk * kChunkBytes + K * 32) / 16, kKeysAt = kTileBytes / 16 * (1 + Block) + kOffset;
    if constexpr (Chunk == kRotary) {
      add_product_of_rows<kKeysAt>(scores, queries[K], base);
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

  // A step of warpgroup 0, which scores block 0 and accumulates the left half. Its products with the first part of the keys
  // are in flight: the step before has issued them, so that the tensor cores need not wait.
  __device__ __forceinline__ void first_step(bool is_last) {
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
    // Also after the last step, where its result is not used: in a branch, ptxas would serialise products.
    if (!is_last) wait_part(0);
    fence_products();
    multiply_first_part<0>();
    commit_products();
    wait_for_products<1>(acc);
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
    for (int n = 0; Split && n < splits; ++n) top = fmaxf(top, shared.split_max[n][row]);
    const float shift = top == -INFINITY ? 0.0f : top;
    // 0 only for a row without keys and sinks; NaN stays NaN.
    float denominator = exp2_approximate(sink - shift);
    for (int n = 0; n < splits; ++n) {
      const float own_max = Split ? shared.split_max[n][row] : row_max[i];
      const float sum = Split ? shared.split_sum[n][row] : row_sum[i];
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

  // The offset of eight columns of a row in shared memory, in an order in which a warp's stores are in different banks.
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
        shared.own_max[first_row + 8 * i] = row_max[i];
        shared.own_sum[first_row + 8 * i] = row_sum[i];
      }
    }
    synchronise_cluster();  // all products have read the keys, too
    for (int i = threadIdx.x; i < call.splits * kHeads; i += kConsumers) {
      const int n = i / kHeads, row = i % kHeads;
      shared.split_max[n][row] = load_of_block(&shared.own_max[row], n);
      shared.split_sum[n][row] = load_of_block(&shared.own_sum[row], n);
    }
    synchronise_at<1, kConsumers>();
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
      constexpr int kBatch = 4;  // loads in flight, as each takes long
      float4 sum[2] = {};
#pragma unroll
      for (int k = 0; k < 2; ++k) {
        for (int first = 0; first < call.splits; first += kBatch) {
          float4 shares[kBatch] = {};
#pragma unroll
          for (int n = 0; n < kBatch; ++n) {
            if (first + n < call.splits) shares[n] = load_four_of_block(from + 4 * k, first + n);
          }
#pragma unroll
          for (int n = 0; n < kBatch; ++n) {
            sum[k].x += shares[n].x, sum[k].y += shares[n].y, sum[k].z += shares[n].z, sum[k].w += shares[n].w;
          }
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
        load_rotary_queries();
        if (Warpgroup == 0) {
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
        if (Warpgroup == 0) wait_for_products<0>(scores);
      }
      Split ? merge(item) : store(item);
      item_parity ^= 1;
    }
  }
};

}  // namespace ejkernel::token_sparse_attention
