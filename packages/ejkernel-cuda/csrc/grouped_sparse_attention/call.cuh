// What the kernels of grouped attention to listed keys are called with, and the shared memory of a block.
#pragma once

#include <cuda_bf16.h>

#include <cstdint>

#include "common/tensor_core.cuh"
#include "common/warpgroup_mma.cuh"

namespace ejkernel::grouped_sparse_attention {

constexpr int kQueries = 8, kHeads = 16;  // of a group: a warp has the heads of a query
constexpr int kKeys = 64, kSize = 128;    // of a tile
constexpr int kRowBytes = kSize * 2, kChunkBytes = 64 * 128, kTileBytes = 2 * kChunkBytes;
constexpr int kStages = 6;
constexpr int kWarpgroup = 128, kConsumers = 2 * kWarpgroup, kThreads = 3 * kWarpgroup;

// An entry of a group's list: a key, and which queries list it. No query of the group lists the key of an entry 0.
constexpr int kKeyBits = 24, kMostKeys = 1 << kKeyBits;

// A row's maximum moves only if a score exceeds it by this much, in base 2.
constexpr float kRescaleThreshold = 8.0f;
constexpr float kLog2E = 1.4426950408889634f, kLn2 = 0.6931471805599453f;

struct Call {
  const __nv_bfloat16* query;  // [batch, tokens, heads, 128]
  const __nv_bfloat16* key;    // [batch, keys, KV heads, 128]
  const __nv_bfloat16* value;  // the same
  const int* indices;          // [batch, tokens, lists, listed], below 0 for none
  const float* sinks;          // [batch, heads]; null without
  __nv_bfloat16* output;       // [batch, tokens, heads, 128]
  float* lse;                  // [batch, heads, tokens]
  uint32_t* entries;           // [batch, lists, groups, tiles of a list, 64]
  int* tiles;                  // [batch, lists, groups], those that have entries
  int* not_finite;             // [batch, KV heads, groups], 1 where an output is NaN
  int* any_not_finite;         // the same of all
  int batch, tokens, heads, keys, listed, lists, kv_heads, groups, list_tiles, items;
  int window;          // keys whose bits fit shared memory, a multiple of 32
  float score_factor;  // on scores, to base 2; above 0
};

// The work of a block: a group of queries and a KV head. Groups of a KV head follow each other, so that its keys stay in L2.
struct Item {
  int batch, kv_head, group;

  __device__ __forceinline__ Item(const Call& call, int item)
      : batch(item / (call.groups * call.kv_heads)),
        kv_head(item / call.groups % call.kv_heads),
        group(item % call.groups) {}

  // The list that the KV head reads.
  __device__ __forceinline__ int list(const Call& call) const {
    return (batch * call.lists + (call.lists == 1 ? 0 : kv_head)) * call.groups + group;
  }
};

struct Shared {
  alignas(1024) char query[2 * kTileBytes];  // by warpgroup
  char key[kStages][kTileBytes], value[kStages][kTileBytes];
  uint32_t entries[kStages][kKeys];
  int tiles;
  uint64_t queries_full, queries_free, keys_full[kStages], values_full[kStages], free[kStages];
};

// A place in the ring of tiles, and how often the ring has been passed, modulo two.
struct Place {
  int stage = 0;
  uint32_t parity = 0;

  __device__ __forceinline__ void advance() {
    if (++stage == kStages) stage = 0, parity ^= 1;
  }
};

__device__ __forceinline__ void arrive_with_warp(uint32_t barrier) {
  __syncwarp();
  if (threadIdx.x % 32 == 0) arrive(barrier);
}

}  // namespace ejkernel::grouped_sparse_attention
