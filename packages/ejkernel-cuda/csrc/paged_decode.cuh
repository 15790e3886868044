// Decoding by a persistent kernel, whose blocks have equal shares of all keys, whatever the rows' lengths.
//
//   line     row 0, head 0 | row 0, head 8 | row 1, head 0 | row 1, head 8 | ...     rounds of a block's warps
//   blocks   |----- 0 -----|----- 8 -----|----- 16 ----|----- 24 ----|               cut into equal shares
//
// Heads have as many lines as `lines` says, so that neighbouring blocks, which run at the same time, read heads of the
// same keys, which are neighbours in memory too. A block attends to the segments of its share one after the other. At
// most its first segment continues what the block before began, and at most its last one is continued: two partial
// results a block, which the combine kernel merges.
//
// A block finds its share by itself, from the lengths of all rows: no other launch has to run first.
//
// Source: Osama et al. 2023, arXiv:2301.03598 (Stream-K: equal shares of a line of tiles).
#pragma once

#include "decode.cuh"

namespace ejkernel {

constexpr int kFewestKeys = 256;  // of a share, so that starting and merging a block stays cheap
constexpr int kCombineWarps = 4;
constexpr int kMostValues = 256;

struct PagedDecode : Decode {
  const int* starts;       // [sequences], first key; null for 0
  const int* lengths;      // [sequences], tokens, queries included
  const int* query_start;  // [sequences + 1], first query row of each sequence; null for one row each
  const int* live;         // [1], sequences that count; null for all
  int* cuts;               // [blocks, 4], what the combine kernel merges: row, first head, heads, pieces
  int sequences, lines;
  int left, right;         // window around the query's own position; 2^30 for no end
};

// The sequence of a row and the keys it attends to.
struct RowKeys {
  int sequence, start, end;
  __device__ int rounds(int keys) const { return max(1, (max(end - start, 0) + keys - 1) / keys); }
};

__device__ inline RowKeys keys_of_row(const PagedDecode& call, int row) {
  int sequence = row, after = 0;  // query rows of the sequence behind this one
  if (call.query_start != nullptr) {
    const int* starts = call.query_start;
    const int live = call.live == nullptr ? call.sequences : min(*call.live, call.sequences);
    // Decoding: row n is the one query row of sequence n. Otherwise the last sequence that begins at the row or before,
    // which passes over sequences without queries.
    if (!(row < live && starts[row] == row && starts[row + 1] > row)) {
      int low = -1, high = live;
      while (high - low > 1) {
        const int middle = (low + high) / 2;
        (starts[middle] <= row ? low : high) = middle;
      }
      sequence = low;
    }
    if (sequence < 0 || row >= starts[sequence + 1]) return {-1, 0, 0};
    after = starts[sequence + 1] - 1 - row;
  }
  const int length = min(call.lengths[sequence], call.columns * call.page_size);
  const int position = call.lengths[sequence] - 1 - after;
  const int start = max(call.starts == nullptr ? 0 : max(call.starts[sequence], 0), position - call.left);
  return {sequence, start, min(length, position + call.right + 1)};
}

// The line that a block shares with others, its part of it, and where that begins.
struct Share {
  long long total, begin, end;  // rounds
  int blocks, row;              // of the line; `row` has round `begin`
  long long row_begin;          // the row's first round
};

template <int Threads>
__device__ __forceinline__ Share find_share(const PagedDecode& call, int block, int blocks, int items, int keys) {
  __shared__ long long sums[Threads / 32];
  __shared__ Share share;
  // Prefix sums over rows: each thread has rows that follow each other.
  const int each = (call.rows + Threads - 1) / Threads;
  const int first = min(int(threadIdx.x) * each, call.rows), last = min(first + each, call.rows);
  long long own = 0;
  for (int row = first; row < last; ++row) own += keys_of_row(call, row).rounds(keys);
  own *= items;
  long long up_to = own;
#pragma unroll
  for (int step = 1; step < 32; step *= 2) {
    const long long below = __shfl_up_sync(~0u, up_to, step);
    if (threadIdx.x % 32 >= step) up_to += below;
  }
  if (threadIdx.x % 32 == 31) sums[threadIdx.x / 32] = up_to;
  __syncthreads();
  long long total = 0;
#pragma unroll
  for (int warp = 0; warp < Threads / 32; ++warp) {
    if (warp < threadIdx.x / 32) up_to += sums[warp];
    total += sums[warp];
  }
  const long long fewest = (kFewestKeys + keys - 1) / keys;
  blocks = int(min((long long)blocks, max(total / fewest, 1LL)));
  const long long begin = total * block / blocks, end = total * (block + 1) / blocks;
  if (block < blocks && up_to - own <= begin && begin < up_to) {
    long long row_begin = up_to - own;
    int row = first;
    for (;; ++row) {
      const long long rounds = (long long)items * keys_of_row(call, row).rounds(keys);
      if (begin < row_begin + rounds) break;
      row_begin += rounds;
    }
    share = {total, begin, end, blocks, row, row_begin};
  }
  if (block >= blocks && threadIdx.x == 0) share = {total, 0, 0, blocks, 0, 0};
  __syncthreads();
  return share;
}

// The block of a line that has a round: the inverse of `total * block / blocks`.
__device__ __forceinline__ int block_of(const Share& share, long long round) {
  return int(((round + 1) * share.blocks + share.total - 1) / share.total) - 1;
}

template <int Size, typename C>
__global__ void __launch_bounds__(Shape<Size, C>::kWarps * 32, Shape<Size, C>::kResident)
    paged_kernel(const __grid_constant__ PagedDecode call) {
  using S = Shape<Size, C>;
  extern __shared__ __align__(128) unsigned char shared[];
  const int group = call.heads / call.kv_heads, parts = (group + kHeads - 1) / kHeads;
  const int line = blockIdx.x % call.lines, items = call.kv_heads * parts / call.lines;
  const Share share =
      find_share<S::kWarps * 32>(call, blockIdx.x / call.lines, gridDim.x / call.lines, items, S::kRound);
  int row = share.row;
  long long row_begin = share.row_begin;
  RowKeys keys = keys_of_row(call, row);
  int rounds = keys.rounds(S::kRound);
  int4 cut = {0, 0, 0, 0};
  for (long long at = share.begin; at < share.end;) {
    if (at == row_begin + (long long)items * rounds) {
      row_begin = at;
      keys = keys_of_row(call, ++row);
      rounds = keys.rounds(S::kRound);
    }
    const int number = int((at - row_begin) / rounds), item = number * call.lines + line;
    const long long item_begin = row_begin + (long long)number * rounds, item_end = item_begin + rounds;
    const long long end = min(share.end, item_end);
    Segment segment;
    segment.row = row;
    segment.sequence = keys.sequence;
    segment.kv_head = item / parts;
    segment.first_head = segment.kv_head * group + item % parts * kHeads;
    segment.count = min(kHeads, group - item % parts * kHeads);
    segment.first = keys.start + int(at - item_begin) * S::kRound;
    segment.limit = min(keys.start + int(end - item_begin) * S::kRound, keys.end);
    // The first of a block's two slots is for an item that the block before began, the other for one that it begins.
    const size_t slot = (size_t(blockIdx.x) * 2 + (at == item_begin)) * kHeads;
    segment.partial = at == item_begin && end == item_end ? nullptr : call.partial + slot * call.value_size;
    segment.statistics = call.statistics + slot * 2;
    if (at > item_begin && block_of(share, item_begin) == block_of(share, at) - 1) {
      // The second block of an item says what is to be merged.
      cut = {row, segment.first_head, segment.count, block_of(share, item_end - 1) - block_of(share, item_begin) + 1};
    }
    attend<Size, C>(call, segment, shared);
    __syncthreads();  // hazard: the next segment's copies overwrite what the merge reads
    at = end;
  }
  if (threadIdx.x == 0) reinterpret_cast<int4*>(call.cuts)[blockIdx.x] = cut;
}

// The combine: one block for each head of an item that was cut, of which warps have every fourth piece each.
static __global__ void __launch_bounds__(kCombineWarps * 32)
    combine_kernel(const __grid_constant__ PagedDecode call) {
  // The launch before on the same stream has written all of it.
  const int4 cut = reinterpret_cast<const int4*>(call.cuts)[blockIdx.x];
  const int row = cut.x, head = blockIdx.y, pieces = cut.w;
  if (head >= cut.z || pieces == 0) return;
  __shared__ float maxima[kCombineWarps], sums[kCombineWarps], accs[kCombineWarps][kMostValues];
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  float row_max = -INFINITY, row_sum = 0.f, acc[kMostValues / 32] = {};
#pragma unroll 2
  for (int piece = warp; piece < pieces; piece += kCombineWarps) {
    // Piece 0 is in the second slot of the block before.
    const size_t slot =
        ((size_t(blockIdx.x) + (piece - 1) * call.lines) * 2 + (piece == 0)) * kHeads + head;
    const float piece_max = call.statistics[slot * 2], new_max = fmaxf(row_max, piece_max);
    const float shift = new_max == -INFINITY ? 0.f : new_max;
    const float alpha = exp2f(row_max - shift), beta = exp2f(piece_max - shift);
    row_sum = row_sum * alpha + call.statistics[slot * 2 + 1] * beta;
#pragma unroll
    for (int n = 0; n < kMostValues / 32; ++n) {
      const int column = n * 32 + lane;
      if (column < call.value_size) acc[n] = acc[n] * alpha + call.partial[slot * call.value_size + column] * beta;
    }
    row_max = new_max;
  }
  if (lane == 0) {
    maxima[warp] = row_max;
    sums[warp] = row_sum;
  }
#pragma unroll
  for (int n = 0; n < kMostValues / 32; ++n) accs[warp][n * 32 + lane] = acc[n];
  __syncthreads();
  row_max = -INFINITY;
  row_sum = 0.f;
#pragma unroll
  for (int w = 0; w < kCombineWarps; ++w) row_max = fmaxf(row_max, maxima[w]);
  const float shift = row_max == -INFINITY ? 0.f : row_max;
  // In the order of warps, so two runs give the same bits.
#pragma unroll
  for (int w = 0; w < kCombineWarps; ++w) row_sum += sums[w] * exp2f(maxima[w] - shift);
  const Finish finish(call, row, cut.y + head, row_max, row_sum);
  const size_t place = size_t(row) * call.heads + cut.y + head;
  for (int column = threadIdx.x; column < call.value_size; column += kCombineWarps * 32) {
    float sum = 0.f;
#pragma unroll
    for (int w = 0; w < kCombineWarps; ++w) sum += accs[w][column] * exp2f(maxima[w] - shift);
    store_output(call, place * call.value_size + column, sum * finish.factor);
  }
  if (threadIdx.x == 0) call.lse[place] = finish.lse;
}

}  // namespace ejkernel
