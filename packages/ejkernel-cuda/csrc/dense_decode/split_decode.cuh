// Decode attention over a dense cache with split-KV: the keys of each row are split equally over blocks.
//
//   keys of a row   |------- split 0 -------|------- split 1 -------| ...      one block per split and 16 query heads
//
// A block's work depends on its index only. `paged_decode.cuh` balances the work by the rows' lengths.
#pragma once

#include "common/decode.cuh"
#include "common/dependent_launch.cuh"

namespace ejkernel::dense_decode {

constexpr int kMaxSplits = 64;
constexpr int kMergeThreads = 128;

struct SplitDecodeParams : DecodeParams {
  const int* starts;  // [rows]
  const int* ends;    // [rows]
  int splits;
  int left, right;    // window around the last key
};

template <int HeadDim, typename CacheT>
__global__ void __launch_bounds__(TileShape<HeadDim, CacheT>::kWarps * 32, TileShape<HeadDim, CacheT>::kBlocksPerSm)
    split_kernel(const SplitDecodeParams call) {
  using S = TileShape<HeadDim, CacheT>;
  extern __shared__ __align__(128) unsigned char shared[];
  start_next_launch();
  const int heads_per_kv_head = call.heads / call.kv_heads;
  const int blocks_per_kv_head = (heads_per_kv_head + kHeadsPerBlock - 1) / kHeadsPerBlock;
  // Blocks that read the same keys for other query heads have consecutive indices, so that keys are read from L2.
  const int head_block = blockIdx.x % blocks_per_kv_head, kv_head = blockIdx.x / blocks_per_kv_head % call.kv_heads;
  const int split = blockIdx.x / (blocks_per_kv_head * call.kv_heads) % call.splits;
  const int row = blockIdx.x / (blocks_per_kv_head * call.kv_heads * call.splits);

  const int last = call.ends[row] - 1;
  const int start = max(max(call.starts[row], 0), call.left < 0 ? 0 : last - call.left);
  const int end = min(min(last, last + call.right) + 1, call.page_size);
  // Each row is split over its own range of keys, so that rows of any length keep all their blocks busy. The length is
  // rounded up to whole rounds of the block's warps: in all splits but the last ones, warps have the same number of
  // tiles.
  const int share = (max(end - start, 0) + call.splits - 1) / call.splits;
  const int length = (share + S::kKeysPerRound - 1) / S::kKeysPerRound * S::kKeysPerRound;

  KeySegment segment;
  segment.row = segment.sequence = row;
  segment.kv_head = kv_head;
  segment.first_head = kv_head * heads_per_kv_head + head_block * kHeadsPerBlock;
  segment.num_heads = min(kHeadsPerBlock, heads_per_kv_head - head_block * kHeadsPerBlock);
  segment.first_key = start + split * length;
  segment.end_key = min(start + (split + 1) * length, end);
  const size_t row_head = (size_t(split) * call.rows + row) * call.heads + segment.first_head;
  segment.partial = call.splits == 1 ? nullptr : call.partial + row_head * call.value_size;
  segment.statistics = call.statistics + row_head * 2;
  attend_segment<HeadDim, CacheT>(call, segment, shared);
}

// The combine of split-KV: merges the splits, one block for each head of a row.
__global__ void __launch_bounds__(kMergeThreads) merge_kernel(const SplitDecodeParams call) {
  wait_for_previous_launch();
  __shared__ float row_maxima[kMaxSplits], row_sums[kMaxSplits];
  const size_t heads = size_t(call.rows) * call.heads, row_head = blockIdx.x;
  for (int split = threadIdx.x; split < call.splits; split += kMergeThreads) {
    row_maxima[split] = call.statistics[(split * heads + row_head) * 2];
    row_sums[split] = call.statistics[(split * heads + row_head) * 2 + 1];
  }
  __syncthreads();
  // Each thread reads the maxima of all splits itself: there are at most 64, and it saves a barrier. A split without
  // keys has the maximum -INFINITY, weight 0 and a partial sum of zeros.
  float row_max = -INFINITY, row_sum = 0.f;
  for (int split = 0; split < call.splits; ++split) row_max = fmaxf(row_max, row_maxima[split]);
  const float shift = row_max == -INFINITY ? 0.f : row_max;
  for (int split = 0; split < call.splits; ++split) row_sum += exp2f(row_maxima[split] - shift) * row_sums[split];
  const OutputScale output_scale(call, row_head / call.heads, row_head % call.heads, row_max, row_sum);
  for (int column = threadIdx.x; column < call.value_size; column += kMergeThreads) {
    // In a fixed order, so that results are reproducible bit for bit. Unrolled, so that several loads are in flight.
    const float* partial = call.partial + row_head * call.value_size + column;
    float sum = 0.f;
#pragma unroll 8
    for (int split = 0; split < call.splits; ++split) {
      sum += exp2f(row_maxima[split] - shift) * partial[split * heads * call.value_size];
    }
    store_output(call, row_head * call.value_size + column, sum * output_scale.factor);
  }
  if (threadIdx.x == 0) call.lse[row_head] = output_scale.lse;
}

}  // namespace ejkernel::dense_decode
