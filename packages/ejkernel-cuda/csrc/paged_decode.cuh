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
// A block finds its share by itself, from the lengths of all rows: no other launch has to run first. Rows of one length
// get shares of whole items, or items a whole number of shares, where that makes shares little larger. The combine kernel
// is launched early, waits for the blocks to end, and leaves at once where nothing was cut.
//
// Source: Osama et al. 2023, arXiv:2301.03598 (Stream-K: equal shares of a line of tiles).
#pragma once

#include <climits>

#include "decode.cuh"
#include "dependent_launch.cuh"

namespace ejkernel {

constexpr int kFewestKeys = 256;  // of a share, so that starting and merging a block stays cheap
constexpr int kShareGrowth = 2;   // rounds by which shares may grow, for items that stay whole
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

// The sequence of a row, and the row's position in it.
struct Place {
  int sequence, position;  // `sequence` is negative where the row belongs to none
};

__device__ inline Place place_of_row(const PagedDecode& call, int row) {
  if (call.query_start == nullptr) return {row, call.lengths[row] - 1};
  const int first = row < call.sequences ? call.lengths[row] : 0;  // read beside the starts, where it is the one needed
  const int* starts = call.query_start;
  const int live = call.live == nullptr ? call.sequences : min(*call.live, call.sequences);
  int sequence = row;
  // Decoding: row n is the first query row of sequence n. Otherwise the last sequence that begins at the row or before,
  // which passes over sequences without queries.
  if (!(row < live && starts[row] == row && starts[row + 1] > row)) {
    int low = -1, high = live;
    while (high - low > 1) {
      const int middle = (low + high) / 2;
      (starts[middle] <= row ? low : high) = middle;
    }
    sequence = low;
  }
  if (sequence < 0 || row >= starts[sequence + 1]) return {-1, -1};
  const int length = sequence == row ? first : call.lengths[sequence];
  return {sequence, length - (starts[sequence + 1] - row)};
}

// The sequence of a row and the keys it attends to.
struct RowKeys {
  int sequence, start, end;
  __device__ int rounds(int keys) const { return max(1, (max(end - start, 0) + keys - 1) / keys); }
};

__device__ inline RowKeys keys_of_row(const PagedDecode& call, int row) {
  const auto [sequence, position] = place_of_row(call, row);
  if (sequence < 0) return {-1, 0, 0};
  const int length = min(call.lengths[sequence], call.columns * call.page_size);
  const int start = max(call.starts == nullptr ? 0 : max(call.starts[sequence], 0), position - call.left);
  return {sequence, start, min(length, position + call.right + 1)};
}

// A block's part of the line that it shares with others.
struct Share {
  long long size;        // rounds of each share but for the last ones
  long long begin, end;  // rounds of this one
  int row;               // has round `begin`
  long long row_begin;   // the row's first round
  RowKeys keys;          // of the row
  // The block of the line that has a round.
  __device__ int block_of(long long round) const { return int(quotient(round, size)); }
  // Divisions of 64 bits take several times as long as those of 32, and numbers are small.
  static __device__ __forceinline__ long long quotient(long long a, long long b) {
    return ((a | b) >> 32) == 0 ? (long long)(uint32_t(a) / uint32_t(b)) : a / b;
  }
};

// Rounds of a share. `rounds` are those of an item where all rows have equally many, or else 0.
__device__ inline long long share_size(long long total, int blocks, int keys, int rounds) {
  const int fewest = (kFewestKeys + keys - 1) / keys;
  blocks = int(min((long long)blocks, max(total / fewest, 1LL)));
  const long long size = Share::quotient(total + blocks - 1, blocks);
  if (rounds == 0) return size;
  // Blocks that end with their items have fewer results to store and to merge. More than a few rounds, which leave other
  // blocks idle, take longer than that.
  long long whole = size;
  if (size > rounds) {
    whole = Share::quotient(size + rounds - 1, rounds) * rounds;
  } else {
    const int shares = rounds / int(size);
    if (rounds % shares == 0) whole = rounds / shares;
  }
  return whole - size <= kShareGrowth ? whole : size;
}

template <int Threads>
__device__ __forceinline__ const Share& find_share(const PagedDecode& call, int block, int blocks, int items, int keys) {
  __shared__ long long sums[Threads / 32];
  __shared__ int least[Threads / 32], most[Threads / 32];
  __shared__ Share share;  // in shared memory it costs no registers
  // Prefix sums over rows: each thread has rows that follow each other.
  const int each = (call.rows + Threads - 1) / Threads, warp = threadIdx.x / 32;
  const int first = min(int(threadIdx.x) * each, call.rows), last = min(first + each, call.rows);
  long long own = 0;
  int fewest_rounds = INT_MAX, most_rounds = 0;
  RowKeys row_keys = {-1, 0, 0};
  for (int row = first; row < last; ++row) {
    row_keys = keys_of_row(call, row);
    const int rounds = row_keys.rounds(keys);
    own += rounds;
    fewest_rounds = min(fewest_rounds, rounds);
    most_rounds = max(most_rounds, rounds);
  }
  own *= items;
  long long up_to = own;
#pragma unroll
  for (int step = 1; step < 32; step *= 2) {
    const long long below = __shfl_up_sync(~0u, up_to, step);
    if (threadIdx.x % 32 >= step) up_to += below;
  }
  fewest_rounds = __reduce_min_sync(~0u, fewest_rounds);
  most_rounds = __reduce_max_sync(~0u, most_rounds);
  if (threadIdx.x % 32 == 31) {
    sums[warp] = up_to;
    least[warp] = fewest_rounds;
    most[warp] = most_rounds;
  }
  __syncthreads();
  long long total = 0;
#pragma unroll
  for (int w = 0; w < Threads / 32; ++w) {
    if (w < warp) up_to += sums[w];
    total += sums[w];
    fewest_rounds = min(fewest_rounds, least[w]);
    most_rounds = max(most_rounds, most[w]);
  }
  const long long size = share_size(total, blocks, keys, fewest_rounds == most_rounds ? most_rounds : 0);
  const long long begin = min(size * block, total), end = min(begin + size, total);
  if (up_to - own <= begin && begin < up_to) {
    // The last of the thread's rows that begin at the share or before: with one row a thread, nothing is read again.
    long long row_begin = up_to - own;
    int row = first;
    for (; row + 1 < last; ++row) {
      const long long rounds = (long long)items * keys_of_row(call, row).rounds(keys);
      if (begin < row_begin + rounds) break;
      row_begin += rounds;
    }
    share = {size, begin, end, row, row_begin, row + 1 == last ? row_keys : keys_of_row(call, row)};
  }
  if (begin == total && threadIdx.x == 0) share = {size, total, total, 0, 0, row_keys};
  __syncthreads();
  return share;
}

// A block's way through the items of its share.
struct Items {
  const Share& share;
  RowKeys keys;         // of `row`
  int row;
  long long row_begin;  // the row's first round
  long long at;         // where the next segment begins
  int items, line, parts;

  // The next segment, if there is one. Of an item that the block before has begun, the second block notes what is to be
  // merged.
  __device__ __forceinline__ bool next(Segment& segment, const PagedDecode& call, int round) {
    if (at >= share.end) return false;
    int rounds = keys.rounds(round);
    if (at == row_begin + (long long)items * rounds) {
      row_begin = at;
      keys = keys_of_row(call, ++row);
      rounds = keys.rounds(round);
    }
    const int group = call.heads / call.kv_heads, number = int(Share::quotient(at - row_begin, rounds));
    const int item = number * call.lines + line;
    const long long item_begin = row_begin + (long long)number * rounds, item_end = item_begin + rounds;
    const long long end = min(share.end, item_end);
    segment.row = row;
    segment.sequence = keys.sequence;
    segment.kv_head = item / parts;
    segment.first_head = segment.kv_head * group + item % parts * kHeads;
    segment.count = min(kHeads, group - item % parts * kHeads);
    segment.first = keys.start + int(at - item_begin) * round;
    segment.limit = min(keys.start + int(end - item_begin) * round, keys.end);
    // The first of a block's two slots is for an item that the block before began, the other for one that it begins.
    const size_t slot = (size_t(blockIdx.x) * 2 + (at == item_begin)) * kHeads;
    segment.partial = at == item_begin && end == item_end ? nullptr : call.partial + slot * call.value_size;
    segment.statistics = call.statistics + slot * 2;
    if (at > item_begin && threadIdx.x == 0 && share.block_of(item_begin) == share.block_of(at) - 1) {
      const int pieces = share.block_of(item_end - 1) - share.block_of(item_begin) + 1;
      reinterpret_cast<int4*>(call.cuts)[blockIdx.x] = {row, segment.first_head, segment.count, pieces};
    }
    at = end;
    return true;
  }
};

// Attends to the segments of a share. The first copies and the queries of the next one are under way while one is merged.
// Without them a block reads nothing meanwhile; and where all rows have one length, no block does.
template <int Size, typename C>
__device__ __forceinline__ void attend_ahead(const PagedDecode& call, Items& walk, unsigned char* shared) {
  constexpr int kRound = Shape<Size, C>::kRound;
  Copies<Size, C> copies(call, shared);
  Query<Size> query;
  Segment segment;
  bool more = walk.next(segment, call, kRound);
  if (more) {
    copies.begin(segment);
    copies.fetch_first();
    load_query<Size, C>(query.parts, query.factors, call, segment);
  }
  while (more) {
    Softmax<Size> softmax;
    attend(softmax, call, copies, query, segment.count);
    const Segment done = segment;
    more = walk.next(segment, call, kRound);
    if (more) copies.begin(segment);
    leave_softmax<Size, C>(softmax, shared);  // while the first pages are looked up
    if (more) {
      copies.fetch_first();
      load_query<Size, C>(query.parts, query.factors, call, segment);
    }
    __syncthreads();
    merge_warps<Size, C>(call, done, shared);
    __syncthreads();  // hazard: the main loop refills the stages that the merge reads
  }
}

template <int Size, typename C>
__global__ void __launch_bounds__(Shape<Size, C>::kWarps * 32, Shape<Size, C>::kResident)
    paged_kernel(const __grid_constant__ PagedDecode call) {
  using S = Shape<Size, C>;
  extern __shared__ __align__(128) unsigned char shared[];
  const int group = call.heads / call.kv_heads, parts = (group + kHeads - 1) / kHeads;
  const int line = blockIdx.x % call.lines, items = call.kv_heads * parts / call.lines;
  start_next_launch();
  const Share& share =
      find_share<S::kWarps * 32>(call, blockIdx.x / call.lines, gridDim.x / call.lines, items, S::kRound);
  wait_for_previous_launch();  // new tokens are in the cache from here on
  Items walk{share, share.keys, share.row, share.row_begin, share.begin, items, line, parts};
  if (threadIdx.x == 0) reinterpret_cast<int4*>(call.cuts)[blockIdx.x] = {0, 0, 0, 0};
  if constexpr (S::kAhead) {
    attend_ahead<Size, C>(call, walk, shared);
  } else {
    Segment segment;
    while (walk.next(segment, call, S::kRound)) {
      attend_alone<Size, C>(call, segment, shared);
      __syncthreads();  // hazard: the next segment's copies overwrite what the merge reads
    }
  }
}

// The combine: a block for each item that was cut, and a warp for each of its heads.
static __global__ void __launch_bounds__(kCombineWarps * 32)
    combine_kernel(const __grid_constant__ PagedDecode call) {
  wait_for_previous_launch();
  const int4 cut = reinterpret_cast<const int4*>(call.cuts)[blockIdx.x];
  const int row = cut.x, heads = cut.z, pieces = cut.w, lane = threadIdx.x % 32;
  if (pieces == 0) return;
  for (int head = threadIdx.x / 32; head < heads; head += kCombineWarps) {
    // Piece 0 is in the second slot of the block before.
    const auto slot = [&](int piece) {
      return ((size_t(blockIdx.x) + (piece - 1) * call.lines) * 2 + (piece == 0)) * kHeads + head;
    };
    float row_max = -INFINITY, row_sum = 0.f;
    for (int piece = lane; piece < pieces; piece += 32) row_max = fmaxf(row_max, call.statistics[slot(piece) * 2]);
#pragma unroll
    for (int step = 16; step > 0; step /= 2) row_max = fmaxf(row_max, __shfl_xor_sync(~0u, row_max, step));
    const float shift = row_max == -INFINITY ? 0.f : row_max;
    const auto weight = [&](int piece) {
      return piece < pieces ? exp2f(call.statistics[slot(piece) * 2] - shift) : 0.f;
    };
    for (int piece = lane; piece < pieces; piece += 32) row_sum += weight(piece) * call.statistics[slot(piece) * 2 + 1];
#pragma unroll
    for (int step = 16; step > 0; step /= 2) row_sum += __shfl_xor_sync(~0u, row_sum, step);
    const Finish finish(call, row, cut.y + head, row_max, row_sum);
    const size_t place = size_t(row) * call.heads + cut.y + head;
    if (lane == 0) call.lse[place] = finish.lse;
    for (int column = 0; column < call.value_size; column += 128) {
      // Four columns a lane; those behind the last one are read for nothing, from the first. In the order of pieces, so
      // two runs give the same bits.
      const int own = column + lane * 4, from = own < call.value_size ? own : 0;
      float4 sum = {0.f, 0.f, 0.f, 0.f};
      for (int first = 0; first < pieces; first += 32) {
        const float weights = weight(first + lane);
        // Unrolled, so that several loads are under way.
#pragma unroll 8
        for (int n = 0; n < min(32, pieces - first); ++n) {
          const float w = __shfl_sync(~0u, weights, n);
          const float4 x = *reinterpret_cast<const float4*>(call.partial + slot(first + n) * call.value_size + from);
          sum = {sum.x + w * x.x, sum.y + w * x.y, sum.z + w * x.z, sum.w + w * x.w};
        }
      }
      if (own >= call.value_size) continue;
      const float numbers[4] = {sum.x, sum.y, sum.z, sum.w};
#pragma unroll
      for (int n = 0; n < 4; ++n) store_output(call, place * call.value_size + own + n, numbers[n] * finish.factor);
    }
  }
}

// Launches both kernels, after one that writes new tokens into the cache if `written`.
template <int Size, typename C>
cudaError_t launch_paged(cudaStream_t stream, const PagedDecode& call, int blocks, bool written) {
  using S = Shape<Size, C>;
  // More than 48 KiB have to be asked for, on every device that a process launches on; so it is done each time.
  cudaError_t error =
      cudaFuncSetAttribute(paged_kernel<Size, C>, cudaFuncAttributeMaxDynamicSharedMemorySize, S::kBytes);
  if (error != cudaSuccess) return error;
  if (written) {
    error = launch_early(paged_kernel<Size, C>, blocks, S::kWarps * 32, S::kBytes, stream, call);
  } else {
    // What ran before is not ours, and may have written lengths, which blocks read before they wait.
    paged_kernel<Size, C><<<blocks, S::kWarps * 32, S::kBytes, stream>>>(call);
    error = cudaGetLastError();
  }
  if (error != cudaSuccess) return error;
  // Which items were cut follows from lengths: a block for each that can be.
  return launch_early(combine_kernel, blocks, kCombineWarps * 32, 0, stream, call);
}

}  // namespace ejkernel
