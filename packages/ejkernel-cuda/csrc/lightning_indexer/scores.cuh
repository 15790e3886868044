// Scores of the lightning indexer with queries and keys in e4m3, on Hopper: a producer warp copies, and two consumer
// warpgroups take turns with the tensor cores. While one multiplies, the other sums over its heads.
//
//   Q  [256 = queries x heads, 128]   two buffers: the next item's are copied during this one
//   K  [128 keys, 128]                a ring of six stages; warpgroup w multiplies keys 64 w to 64 w + 63
//   w  [256]                          registers, 64 per thread
//
//   warpgroup 0   | K Q^T, four steps |  sum of w max(0, x)   | K Q^T        |
//   warpgroup 1           epilogue    |  K Q^T                | sum ...      |
//                                   ^ the turn passes before the last step of 32 channels is complete
//
// Keys are the rows of a product and heads its columns, so that a thread has a quarter of the heads of two keys. Lanes
// exchange halves: of four lanes, each ends with the sums of its queries.
//
// Hopper's tensor cores add e4m3 products with about 14 bits (docs/lab/fp8_indexer.md): scores differ from float32 sums.
//
// Source: the lightning indexer of DeepSeek Sparse Attention, DeepSeek-V3.2-Exp (DeepSeek-AI, 2025).
#pragma once

#include "common/tensor_core.cuh"
#include "common/warpgroup_mma.cuh"
#include "lightning_indexer/call.cuh"
#include "lightning_indexer/ptx.cuh"

namespace ejkernel::lightning_indexer {

struct ScoresShared {
  alignas(1024) char query[kQueryBuffers][kColumns * kChannels];
  char key[kStages][kStepKeys * kChannels];
  alignas(16) float weights[kQueryBuffers][kColumns];
  int first_key[kQueryBuffers], steps[kQueryBuffers];
  uint64_t query_full[kQueryBuffers], query_free[kQueryBuffers], key_full[kStages], key_free[kStages];
};

struct KeyRange {
  int first, end;
};

// The position in a ring of slots, and the phase of its barriers.
template <int Slots>
struct Ring {
  int slot = 0;
  uint32_t phase = 0;

  __device__ __forceinline__ void advance() {
    if (++slot == Slots) {
      slot = 0;
      phase ^= 1;
    }
  }
};

// The work of a block at a time: a group of queries, with a split of the keys. Groups that run together share keys.
template <int Heads>
struct ScoresItem {
  static constexpr int kQueries = kColumns / Heads;
  int batch, first_query, first_key, end_key;

  __device__ __forceinline__ ScoresItem(const ScoresCall& call, int item) {
    first_query = item % call.groups * kQueries;
    first_key = item / call.groups % call.splits * call.split_keys;
    batch = item / (call.groups * call.splits);
    end_key = min(first_key + call.split_keys, call.keys);
  }
};

// The thread that copies.
template <int Heads>
struct ScoresProducer {
  static constexpr int kQueries = kColumns / Heads;
  const ScoresCall& call;
  ScoresShared& shared;
  Ring<kQueryBuffers> queries;
  Ring<kStages> keys;

  // Keys of the item that any of its queries may select, from a multiple of 128 on.
  __device__ __forceinline__ KeyRange selectable(const ScoresItem<Heads>& item) const {
    const int64_t row = int64_t(item.batch) * call.tokens;
    int first = item.end_key, end = item.first_key;
#pragma unroll
    for (int i = 0; i < kQueries; ++i) {
      const int query = min(item.first_query + i, call.tokens - 1);
      const int start = __ldg(call.key_starts + row + query), stop = __ldg(call.key_ends + row + query);
      if (start < stop) {
        first = min(first, start);
        end = max(end, stop);
      }
    }
    first = max(first, item.first_key) / kStepKeys * kStepKeys;
    return {first, min(end, item.end_key)};
  }

  __device__ __forceinline__ int copy_queries(const ScoresItem<Heads>& item, KeyRange range) {
    const int steps = range.first < range.end ? (range.end - range.first + kStepKeys - 1) / kStepKeys : 0;
    const uint32_t full = shared_address(&shared.query_full[queries.slot]);
    wait_for_phase(shared_address(&shared.query_free[queries.slot]), queries.phase ^ 1);
    shared.first_key[queries.slot] = range.first;
    shared.steps[queries.slot] = steps;
    if (steps == 0) {
      arrive(full);
    } else {
      const int64_t row = (int64_t(item.batch) * call.tokens + item.first_query) * Heads;
      const int bytes = min(kQueries, call.tokens - item.first_query) * Heads * 4;
      arrive_and_expect(full, kColumns * kChannels + bytes);
      copy_tile(shared_address(shared.query[queries.slot]), &call.query, 0, static_cast<int>(row), full);
      copy_bulk(shared_address(shared.weights[queries.slot]), call.weights + row, bytes, full);
    }
    queries.advance();
    return steps;
  }

  __device__ __forceinline__ void run() {
    for (int i = blockIdx.x; i < call.items; i += gridDim.x) {
      const ScoresItem<Heads> item(call, i);
      const KeyRange range = selectable(item);
      const int steps = copy_queries(item, range);
      const int first_row = item.batch * call.keys + range.first;
      for (int step = 0; step < steps; ++step) {
        const uint32_t full = shared_address(&shared.key_full[keys.slot]);
        wait_for_phase(shared_address(&shared.key_free[keys.slot]), keys.phase ^ 1);
        arrive_and_expect(full, kStepKeys * kChannels);
        copy_tile(shared_address(shared.key[keys.slot]), &call.key, 0, first_row + step * kStepKeys, full);
        keys.advance();
      }
    }
  }
};

template <int Heads, bool Rectify>
struct ScoresConsumer {
  static constexpr int kQueries = kColumns / Heads, kOwnQueries = kQueries / 4;
  const ScoresCall& call;
  ScoresShared& shared;
  const int warpgroup, lane, row;  // row: of the first of a thread's two keys in a step
  Ring<kQueryBuffers> queries;
  Ring<kStages> keys;
  float w[32][2];  // of the thread's columns, 8 i + 2 (lane % 4) and the next

  __device__ __forceinline__ ScoresConsumer(const ScoresCall& c, ScoresShared& s)
      : call(c),
        shared(s),
        warpgroup(threadIdx.x / kWarpgroup),
        lane(threadIdx.x % 32),
        row(threadIdx.x / 32 * 16 + lane / 4) {}

  __device__ __forceinline__ void release(uint64_t& barrier) const {
    __syncwarp();
    if (lane == 0) arrive(shared_address(&barrier));
  }

  __device__ __forceinline__ void load_weights() {
#pragma unroll
    for (int i = 0; i < 32; ++i) {
      const float2 pair = *reinterpret_cast<const float2*>(&shared.weights[queries.slot][8 * i + lane % 4 * 2]);
      w[i][0] = pair.x;
      w[i][1] = pair.y;
    }
  }

  // Products of 64 keys with all queries and heads.
  __device__ __forceinline__ void multiply(float (&d)[32][4]) {
    const uint32_t a = shared_address(shared.key[keys.slot]) / 16 + warpgroup * (kTileKeys * kChannels / 16);
    const uint32_t b = shared_address(shared.query[queries.slot]) / 16;
    wait_for_phase(shared_address(&shared.key_full[keys.slot]), keys.phase);
    await_turn(warpgroup);
    fence_products();
    multiply_rows<0, false>(d, a, b);
    multiply_rows<1, true>(d, a, b);
    multiply_rows<2, true>(d, a, b);
    commit_products();
    multiply_rows<3, true>(d, a, b);
    commit_products();
    // The other warpgroup's products queue up after the last step: passed on at its end, the turn would leave a gap.
    wait_for_products<1>();
    pass_turn(warpgroup);
    wait_for_products<0>(d);
    release(shared.key_free[keys.slot]);
    keys.advance();
  }

  // Sums over a quarter of the heads, of two keys.
  __device__ __forceinline__ void sum_heads(float (&sum)[kQueries][2], const float (&d)[32][4]) const {
#pragma unroll
    for (int i = 0; i < 32; ++i) {
#pragma unroll
      for (int e = 0; e < 4; ++e) {
        const float x = Rectify ? rectify(d[i][e]) : d[i][e];
        float& own = sum[i * 8 / Heads][e / 2];
        own = i % (Heads / 8) == 0 && e % 2 == 0 ? w[i][e % 2] * x : fmaf(w[i][e % 2], x, own);
      }
    }
  }

  // Adds up what four lanes have. Lane n of them ends with queries n kOwnQueries and those after it.
  template <int Count>
  __device__ __forceinline__ void exchange_halves(float (&sum)[kQueries][2], int distance) const {
    const bool upper = lane & distance;
#pragma unroll
    for (int q = 0; q < Count / 2; ++q) {
#pragma unroll
      for (int r = 0; r < 2; ++r) {
        const float other = __shfl_xor_sync(~0u, upper ? sum[q][r] : sum[q + Count / 2][r], distance);
        sum[q][r] = (upper ? sum[q + Count / 2][r] : sum[q][r]) + other;
      }
    }
  }

  __device__ __forceinline__ void store(
      const float (&sum)[kQueries][2], const float (&scale)[2], const ScoresItem<Heads>& item, int first_key) const {
#pragma unroll
    for (int q = 0; q < kOwnQueries; ++q) {
      const int query = item.first_query + lane % 4 * kOwnQueries + q;
      if (query >= call.tokens) continue;
      int* const scores = call.ordered_scores + (int64_t(item.batch) * call.tokens + query) * call.pitch;
#pragma unroll
      for (int r = 0; r < 2; ++r) {
        const int key = first_key + row + 8 * r;
        if (key < call.keys) scores[key] = ordered_integer(sum[q][r] * scale[r]);
      }
    }
  }

  __device__ __forceinline__ void run() {
    if (warpgroup == 1) pass_turn(1);
    for (int i = blockIdx.x; i < call.items; i += gridDim.x) {
      const ScoresItem<Heads> item(call, i);
      wait_for_phase(shared_address(&shared.query_full[queries.slot]), queries.phase);
      const int steps = shared.steps[queries.slot], first_key = shared.first_key[queries.slot];
      if (steps > 0) load_weights();
      for (int step = 0; step < steps; ++step) {
        const int key = first_key + step * kStepKeys;
        float scale[2] = {1, 1};
        if (call.key_scales) {
          const float* const scales = call.key_scales + int64_t(item.batch) * call.keys;
#pragma unroll
          for (int r = 0; r < 2; ++r) scale[r] = __ldg(scales + min(key + row + 8 * r, call.keys - 1));
        }
        float d[32][4], sum[kQueries][2];
        multiply(d);
        sum_heads(sum, d);
        exchange_halves<kQueries>(sum, 2);
        exchange_halves<kQueries / 2>(sum, 1);
        store(sum, scale, item, key);
      }
      release(shared.query_free[queries.slot]);
      queries.advance();
    }
    if (warpgroup == 0) await_turn(0);  // that the other one has passed on last
  }
};

template <int Heads, bool Rectify>
__global__ void __launch_bounds__(kThreads, 1) scores_kernel(const __grid_constant__ ScoresCall call) {
#if __CUDA_ARCH__ == 900
  extern __shared__ __align__(1024) char memory[];
  ScoresShared& shared = *reinterpret_cast<ScoresShared*>(memory);
  if (threadIdx.x == 0) {
    for (int i = 0; i < kQueryBuffers; ++i) {
      start_barrier(shared_address(&shared.query_full[i]), 1);
      start_barrier(shared_address(&shared.query_free[i]), kConsumers / 32);
    }
    for (int i = 0; i < kStages; ++i) {
      start_barrier(shared_address(&shared.key_full[i]), 1);
      start_barrier(shared_address(&shared.key_free[i]), kConsumers / 32);
    }
    publish_barriers();
  }
  __syncthreads();
  if (threadIdx.x >= kConsumers) {
    give_registers<24>();
    if (threadIdx.x == kConsumers) ScoresProducer<Heads>{call, shared}.run();
  } else {
    take_registers<240>();
    ScoresConsumer<Heads, Rectify>(call, shared).run();
  }
#endif
}

}  // namespace ejkernel::lightning_indexer
