// Decode attention over a dense cache with split-KV: the keys of each row are split equally over blocks.
//
//   keys of a row   |------- split 0 -------|------- split 1 -------| ...      one block per split and 16 query heads
//
// A block's work depends on its index only. `paged_decode.cuh` balances the work by the rows' lengths.
#pragma once

#include "common/decode.cuh"
#include "common/dependent_launch.cuh"

namespace ejkernel::dense_decode {

constexpr int kMostSplits = 64;
constexpr int kMergeThreads = 128;

struct SplitDecode : Decode {
  const int* starts;  // [rows]
  const int* ends;    // [rows]
  int splits;
  int left, right;    // window around the last key
};

template <int Size, typename C>
__global__ void __launch_bounds__(Shape<Size, C>::kWarps * 32, Shape<Size, C>::kResident)
    split_kernel(const SplitDecode call) {
  using S = Shape<Size, C>;
  extern __shared__ __align__(128) unsigned char shared[];
  start_next_launch();
  const int group = call.heads / call.kv_heads, parts = (group + kHeads - 1) / kHeads;
  // Blocks that read the same keys for other query heads have consecutive indices, so that keys are read from L2.
  const int part = blockIdx.x % parts, kv_head = blockIdx.x / parts % call.kv_heads;
  const int split = blockIdx.x / (parts * call.kv_heads) % call.splits;
  const int row = blockIdx.x / (parts * call.kv_heads * call.splits);

  const int last = call.ends[row] - 1;
  const int start = max(max(call.starts[row], 0), call.left < 0 ? 0 : last - call.left);
  const int end = min(min(last, last + call.right) + 1, call.page_size);
  // Each row is split over its own range of keys, so that rows of any length keep all their blocks busy. The length is
  // rounded up to whole rounds of the block's warps: in all splits but the last ones, warps have the same number of
  // tiles.
  const int share = (max(end - start, 0) + call.splits - 1) / call.splits;
  const int length = (share + S::kRound - 1) / S::kRound * S::kRound;

  Segment segment;
  segment.row = segment.sequence = row;
  segment.kv_head = kv_head;
  segment.first_head = kv_head * group + part * kHeads;
  segment.count = min(kHeads, group - part * kHeads);
  segment.first = start + split * length;
  segment.limit = min(start + (split + 1) * length, end);
  const size_t place = (size_t(split) * call.rows + row) * call.heads + segment.first_head;
  segment.partial = call.splits == 1 ? nullptr : call.partial + place * call.value_size;
  segment.statistics = call.statistics + place * 2;
  attend_alone<Size, C>(call, segment, shared);
}

// The combine of split-KV: merges the splits, one block for each head of a row.
__global__ void __launch_bounds__(kMergeThreads) merge_kernel(const SplitDecode call) {
  wait_for_previous_launch();
  __shared__ float row_maxima[kMostSplits], row_sums[kMostSplits];
  const size_t heads = size_t(call.rows) * call.heads, place = blockIdx.x;
  for (int split = threadIdx.x; split < call.splits; split += kMergeThreads) {
    row_maxima[split] = call.statistics[(split * heads + place) * 2];
    row_sums[split] = call.statistics[(split * heads + place) * 2 + 1];
  }
  __syncthreads();
  // Each thread reads the maxima of all splits itself: there are at most 64, and it saves a barrier. A split without
  // keys has the maximum -INFINITY, weight 0 and a partial sum of zeros.
  float row_max = -INFINITY, row_sum = 0.f;
  for (int split = 0; split < call.splits; ++split) row_max = fmaxf(row_max, row_maxima[split]);
  const float shift = row_max == -INFINITY ? 0.f : row_max;
  for (int split = 0; split < call.splits; ++split) row_sum += exp2f(row_maxima[split] - shift) * row_sums[split];
  const Finish finish(call, place / call.heads, place % call.heads, row_max, row_sum);
  for (int column = threadIdx.x; column < call.value_size; column += kMergeThreads) {
    // In a fixed order, so that results are reproducible bit for bit. Unrolled, so that several loads are in flight.
    const float* partial = call.partial + place * call.value_size + column;
    float sum = 0.f;
#pragma unroll 8
    for (int split = 0; split < call.splits; ++split) {
      sum += exp2f(row_maxima[split] - shift) * partial[split * heads * call.value_size];
    }
    store_output(call, place * call.value_size + column, sum * finish.factor);
  }
  if (threadIdx.x == 0) call.lse[place] = finish.lse;
}

}  // namespace ejkernel::dense_decode
