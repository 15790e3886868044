// What the kernel of latent attention to listed keys is called with, the work of its blocks and their shared memory.
#pragma once

#include <cuda_bf16.h>

#include <cstdint>

#include "common/tensor_core.cuh"
#include "common/warpgroup_mma.cuh"

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
  float row_max[2][kHeads];  // after block 0, after block 1
  float row_sum[2][2][kHeads];  // of alternating items, by warpgroup
  float own_max[kHeads], own_sum[kHeads];                              // of this block's split
  float split_max[kMostSplits][kHeads], split_sum[kMostSplits][kHeads];  // of all splits
  uint64_t valid[2];  // entries of the blocks that are keys
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

}  // namespace ejkernel::token_sparse_attention
