// The consumer warpgroups of grouped attention to listed keys.
#pragma once

#include <cmath>

#include "grouped_sparse_attention/call.cuh"
#include "grouped_sparse_attention/ptx.cuh"

namespace ejkernel::grouped_sparse_attention {

// A consumer thread: of its warp's 16 rows, the heads of a query, it has rows g and g + 8, and columns 2t, 2t + 1 of each
// eight.
template <int Warpgroup>
struct Consumer {
  const Call& call;
  Shared& shared;
  const int lane, warp, g, t;
  const uint32_t keys_at, values_at;  // in shared memory, in units of descriptors
  float acc[16][4];
  float scores[8][4];
  uint32_t weights[4][4];
  uint32_t queries[8][4];
  float row_max[2], row_sum[2];
  struct Tile {
    Place place;
    int number;  // of the item
  } at{};
  uint32_t item_parity = 0;
  int tiles;

  __device__ __forceinline__ Consumer(const Call& c, Shared& s)
      : call(c),
        shared(s),
        lane(threadIdx.x % 32),
        warp(threadIdx.x % kWarpgroup / 32),
        g(lane / 4),
        t(lane % 4),
        keys_at((shared_address(s.key) & 0x3FFFF) / 16),
        values_at((shared_address(s.value) & 0x3FFFF) / 16) {}

  __device__ __forceinline__ void load_queries() {
    wait_for_phase(shared_address(&shared.queries_full), item_parity);
    const int row = warp * 16 + lane % 16;
#pragma unroll
    for (int k = 0; k < 8; ++k) {
      const int piece = k % 4 * 2 + lane / 16;
      load_matrices(
          queries[k], shared_address(shared.query) + Warpgroup * kTileBytes + k / 4 * kChunkBytes + row * 128 +
                          (piece ^ row % 8) * 16);
    }
    tiles = shared.tiles;
    at.number = 0;
    arrive_with_warp(shared_address(&shared.queries_free));
    item_parity ^= 1;
  }

  // Moves on to the next tile that has keys of this warpgroup's queries, if its number is below `end`, and lets go of those
  // before it. `valid` has the keys that the warp's query lists.
  __device__ __forceinline__ bool find_tile(Tile& tile, uint64_t& valid, int end) {
    end = min(end, tiles);
    while (at.number < end) {
      tile = at;
      at.place.advance();
      ++at.number;
      const Place& place = tile.place;
      wait_for_phase(shared_address(&shared.keys_full[place.stage]), place.parity);
      const uint32_t low = shared.entries[place.stage][lane], high = shared.entries[place.stage][lane + 32];
      constexpr int kFirstBit = kKeyBits + 4 * Warpgroup;
      if (__any_sync(~0u, (low | high) >> kFirstBit & 15)) {
        const unsigned first = __ballot_sync(~0u, low >> (kFirstBit + warp) & 1);
        valid = uint64_t(__ballot_sync(~0u, high >> (kFirstBit + warp) & 1)) << 32 | first;
        return true;
      }
      wait_for_phase(shared_address(&shared.values_full[place.stage]), place.parity);
      free(tile);
    }
    return false;
  }

  __device__ __forceinline__ void free(const Tile& tile) {
    arrive_with_warp(shared_address(&shared.free[tile.place.stage]));
  }

  template <int K = 0>
  __device__ __forceinline__ void multiply_keys_of(uint32_t base) {
    multiply_keys<(K / 4 * kChunkBytes + K % 4 * 32) / 16, K != 0>(scores, queries[K], base);
    if constexpr (K < 7) multiply_keys_of<K + 1>(base);
  }
  template <int K = 0>
  __device__ __forceinline__ void add_values_of(uint32_t base) {
    add_values<K * 16 * 128 / 16>(acc, weights[K], base);
    if constexpr (K < 3) add_values_of<K + 1>(base);
  }

  // Waits for a tile's values. Copies that this thread has waited for are visible to its products then.
  __device__ __forceinline__ void wait_for_values(const Place& place) {
    wait_for_phase(shared_address(&shared.values_full[place.stage]), place.parity);
    fence_shared_stores();
  }
  __device__ __forceinline__ void start_scores(const Place& place) {
    fence_products();
    multiply_keys_of(keys_at + place.stage * (kTileBytes / 16));
    commit_products();
  }
  __device__ __forceinline__ void start_outputs(const Place& place) {
    fence_products();
    add_values_of(values_at + place.stage * (kTileBytes / 16));
    commit_products();
  }

  __device__ __forceinline__ void mask_scores(uint64_t valid) {
    if (valid == ~uint64_t(0)) return;
    // Shifted once, so that a test of a constant bit is one instruction.
    const uint32_t halves[2] = {uint32_t(valid) >> (2 * t), uint32_t(valid >> 32) >> (2 * t)};
#pragma unroll
    for (int j = 0; j < 8; ++j) {
      if (!(halves[j / 4] & 1u << j % 4 * 8)) scores[j][0] = scores[j][2] = -INFINITY;
      if (!(halves[j / 4] & 2u << j % 4 * 8)) scores[j][1] = scores[j][3] = -INFINITY;
    }
  }

  // Moves the running maximum, if a score of the warp's rows exceeds it by far. Returns the factors on what is relative to
  // the maximum before.
  __device__ __forceinline__ void update_max(float (&alpha)[2]) {
    alpha[0] = alpha[1] = 1.0f;
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
      if (top[i] > row_max[i] + kRescaleThreshold) {
        alpha[i] = exp2_fast(row_max[i] - top[i]);
        row_max[i] = top[i];
      }
    }
  }

  // Replaces scores by weights; adds them to the sums.
  __device__ __forceinline__ void exponentiate(const float (&alpha)[2]) {
    const float shift[2] = {row_max[0] == -INFINITY ? 0.0f : row_max[0], row_max[1] == -INFINITY ? 0.0f : row_max[1]};
    row_sum[0] *= alpha[0], row_sum[1] *= alpha[1];
#pragma unroll
    for (int j = 0; j < 8; ++j) {
#pragma unroll
      for (int c = 0; c < 4; ++c) {
        scores[j][c] = exp2_fast(fmaf(scores[j][c], call.score_factor, -shift[c / 2]));
      }
    }
#pragma unroll
    for (int j = 0; j < 8; ++j) {
      row_sum[0] += scores[j][0] + scores[j][1];
      row_sum[1] += scores[j][2] + scores[j][3];
    }
  }

  // Keeps the compiler from computing weights later.
  __device__ __forceinline__ void finish_weights() {
#pragma unroll
    for (int j = 0; j < 32; ++j) asm volatile("" : "+f"(scores[j / 4][j % 4]));
  }

  __device__ __forceinline__ void round_weights() {
#pragma unroll
    for (int j = 0; j < 8; ++j) {
      weights[j / 2][j % 2 * 2] = Half<__nv_bfloat16>::pack(scores[j][0], scores[j][1]);
      weights[j / 2][j % 2 * 2 + 1] = Half<__nv_bfloat16>::pack(scores[j][2], scores[j][3]);
    }
  }

  __device__ __forceinline__ void rescale(const float (&alpha)[2]) {
    if (!__any_sync(~0u, alpha[0] != 1.0f || alpha[1] != 1.0f)) return;
#pragma unroll
    for (int j = 0; j < 16; ++j) {
      acc[j][0] *= alpha[0], acc[j][1] *= alpha[0];
      acc[j][2] *= alpha[1], acc[j][3] *= alpha[1];
    }
  }

  // Computes weights from scores, relative to the maximum that the accumulators are relative to once they are rescaled.
  __device__ __forceinline__ void weigh(uint64_t valid, float (&alpha)[2]) {
    mask_scores(valid);
    update_max(alpha);
    exponentiate(alpha);
  }

  // While the products with a tile's values are in flight, so are those with the next tile's keys, whose weights are
  // computed as soon as these are there. A warpgroup holds two tiles then, and looks for a third one only among those that
  // the producer copies without the memory of the first: others follow when it holds none.
  __device__ __forceinline__ void attend() {
#pragma unroll
    for (int j = 0; j < 64; ++j) acc[j / 4][j % 4] = 0.0f;
    row_max[0] = row_max[1] = -INFINITY;
    row_sum[0] = row_sum[1] = 0.0f;
    load_queries();
    Tile tile, next, after;
    uint64_t valid;
    float alpha[2];
    while (find_tile(tile, valid, tiles)) {
      fence_shared_stores();
      start_scores(tile.place);
      wait_for_products<0>(scores);
      weigh(valid, alpha);
      rescale(alpha);
      round_weights();
      bool more = find_tile(next, valid, tile.number + kStages);
      while (more) {
        wait_for_values(tile.place);  // they were copied before the next tile's keys
        start_scores(next.place);
        start_outputs(tile.place);
        wait_for_products<1>(scores);
        weigh(valid, alpha);
        finish_weights();
        more = find_tile(after, valid, tile.number + kStages);
        wait_for_products<0>(acc);
        free(tile);
        rescale(alpha);
        round_weights();
        tile = next;
        next = after;
      }
      wait_for_values(tile.place);
      start_outputs(tile.place);
      wait_for_products<0>(acc);
      free(tile);
    }
  }

  // Stores a row. Four threads have two columns of each eight; they exchange them, so that each has eight of its own of 32.
  __device__ __forceinline__ void store_row(__nv_bfloat16* to, int i, float factor, bool inside) const {
#pragma unroll
    for (int j = 0; j < 16; j += 4) {
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

  // Stores the outputs and lse of the warp's query, if there is one.
  __device__ __forceinline__ void store(const Item& item, int token, bool exists) {
    const int group_heads = call.heads / call.kv_heads;
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      row_sum[i] += __shfl_xor_sync(~0u, row_sum[i], 1);
      row_sum[i] += __shfl_xor_sync(~0u, row_sum[i], 2);
      const int row = g + 8 * i, head = item.kv_head * group_heads + row;
      const bool inside = exists && row < group_heads;
      float sink = -INFINITY;
      if (call.sinks && inside) sink = call.sinks[item.batch * call.heads + head] * kLog2E;
      const float top = fmaxf(row_max[i], sink), shift = top == -INFINITY ? 0.0f : top;
      const float own = row_max[i] == -INFINITY ? 1.0f : exp2_fast(row_max[i] - shift);
      // 0 only for a row without keys and sinks; NaN stays NaN.
      const float denominator = exp2_fast(sink - shift) + row_sum[i] * own;
      const bool attends = denominator != 0.0f;
      const int64_t query = int64_t(item.batch) * call.tokens + token;
      store_row(call.output + (inside ? (query * call.heads + head) * kSize : 0), i, attends ? own / denominator : 0.0f,
                inside);
      if (!inside || t != 0) continue;
      call.lse[(int64_t(item.batch) * call.heads + head) * call.tokens + token] =
          attends ? (log2f(denominator) + shift) * kLn2 : -INFINITY;
    }
  }

  // A weight of 0 times a value that another query lists and that is not finite is NaN.
  __device__ __forceinline__ void report_not_finite(int item) const {
    bool found = false;
#pragma unroll
    for (int j = 0; j < 64; ++j) found |= acc[j / 4][j % 4] != acc[j / 4][j % 4];
    if (found) call.not_finite[item] = *call.any_not_finite = 1;
  }

  __device__ __forceinline__ void run_group(const Item& item, int number) {
    attend();
    const int token = item.group * kQueries + Warpgroup * 4 + warp;
    store(item, token, token < call.tokens);
    report_not_finite(number);
  }
  __device__ __forceinline__ void run_query(const Item& item, int query) {
    attend();
    store(item, query, Warpgroup == 0 && warp == 0);
  }
};

}  // namespace ejkernel::grouped_sparse_attention
