// Decoding by a persistent kernel, whose blocks have equal shares of all keys, whatever the rows' lengths.
//
//   line     row 0, head 0 | row 0, head 8 | row 1, head 0 | row 1, head 8 | ...     rounds of a block's warps
//   blocks   |----- 0 -----|----- 8 -----|----- 16 ----|----- 24 ----|               cut into equal shares
//
// Heads have as many lines as `lines` says, so that neighbouring blocks, which run at the same time, read heads of the
// same keys, which are neighbours in memory too. A block attends to the segments of its share one after the other. At
// most its first segment continues what the block before began, and at most its last one is continued: two partial
// results a block. The block that ends an item merges it, after its own share, when all others have flagged their parts.
//
// A block finds its share by itself, from the lengths of all rows: no other launch has to run first, and none behind.
// Rows of one length get shares of whole items, or items a whole number of shares, where that makes shares little larger.
//
// Source: Osama et al. 2023, arXiv:2301.03598 (Stream-K: equal shares of a line of tiles).
#pragma once

#include <climits>

#include "decode.cuh"
#include "dependent_launch.cuh"

namespace ejkernel {

constexpr int kFewestKeys = 256;  // of a share, so that starting and merging a block stays cheap
constexpr int kShareGrowth = 2;   // rounds by which shares may grow, for items that stay whole
constexpr int kPrefetched = 1 << 16;  // page numbers at most
constexpr int kCombineLoads = 16;     // pieces whose numbers a thread has in registers
constexpr int kMostValues = 256;
constexpr int kMostBlocks = 65535;  // of a line: along y a grid has no more

struct PagedDecode : Decode {
  const int* starts;       // [sequences], first key; null for 0
  const int* lengths;      // [sequences], tokens, queries included
  const int* query_start;  // [sequences + 1], first query row of each sequence; null for one row each
  const int* live;         // sequences that count; null for all
  uint64_t* flags;         // [blocks, 2], of the partial results: `ticket` where one is complete
  // A number that no other launch has, so that flags need not be zeros at the start: memory that holds it by chance is
  // one case in 2^64. A launch of a CUDA graph has it each time, so the flags are cleared where they are read.
  uint64_t ticket;
  int sequences, lines;
  int group, parts, items; // query heads of a KV head, blocks' worth of those, and such in a line; `launch_paged` sets them
  bool written;            // a kernel of the same call runs before, and what ran before that one is complete
  int left, right;         // window around the query's own position; 2^30 for no end
};

// Blocks of a line follow each other along y, so that no block has to divide.
__device__ __forceinline__ int block_number() { return blockIdx.y * gridDim.x + blockIdx.x; }

// The sequence of a row, its tokens, and the row's position in it.
struct Place {
  int sequence, position;  // `sequence` is negative where the row belongs to none
  int length = 0;
};

__device__ inline Place place_of_row(const PagedDecode& call, int row) {
  // All loads at once, needed or not: a block starts with them, and nothing hides their latency.
  const bool in_range = row < call.sequences;
  int length = in_range ? call.lengths[row] : 0;
  if (call.query_start == nullptr) return {row, length - 1, length};
  const int* starts = call.query_start;
  int first = in_range ? starts[row] : 0, next = in_range ? starts[row + 1] : 0;
  const int live = call.live == nullptr ? call.sequences : min(*call.live, call.sequences);
  // Decoding: row n is the first query row of sequence n. Otherwise the last sequence that begins at the row or before,
  // which passes over sequences without queries.
  if (!(row < live && first == row && next > row)) {
    int low = -1, high = live;
    while (high - low > 1) {
      const int middle = (low + high) / 2;
      (starts[middle] <= row ? low : high) = middle;
    }
    if (low < 0 || row >= starts[low + 1]) return {-1, -1};
    length = call.lengths[low];
    return {low, length - (starts[low + 1] - row), length};
  }
  return {row, length - (next - row), length};
}

// The sequence of a row and the keys it attends to.
struct RowKeys {
  int sequence, start, end;
  __device__ int rounds(int keys) const { return max(1, (max(end - start, 0) + keys - 1) / keys); }
};

__device__ inline RowKeys keys_of_row(const PagedDecode& call, int row) {
  const auto [sequence, position, tokens] = place_of_row(call, row);
  if (sequence < 0) return {-1, 0, 0};
  const int length = min(tokens, call.columns * call.page_size);
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
__device__ __forceinline__ const Share& find_share(const PagedDecode& call, int keys) {
  const int block = blockIdx.y, blocks = gridDim.y, items = call.items;
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

// An item that a block ends and others began, and its pieces, the block's own among them.
struct Cut {
  int row, first_head, heads, pieces;
};

// A block's way through the items of its share.
struct Items {
  const Share& share;
  Cut& cut;
  RowKeys keys;         // of `row`
  int row;
  long long row_begin;  // the row's first round
  long long at;         // where the next segment begins
  uint64_t* flag;       // of the segment; null where no other block waits for it

  // The next segment, if there is one. One that ends an item of other blocks is noted, to be merged.
  __device__ __forceinline__ bool next(Segment& segment, const PagedDecode& call, int round) {
    if (at >= share.end) return false;
    int rounds = keys.rounds(round);
    if (at == row_begin + (long long)call.items * rounds) {
      row_begin = at;
      keys = keys_of_row(call, ++row);
      rounds = keys.rounds(round);
    }
    const int number = int(Share::quotient(at - row_begin, rounds)), item = number * call.lines + blockIdx.x;
    const long long item_begin = row_begin + (long long)number * rounds, item_end = item_begin + rounds;
    const long long end = min(share.end, item_end);
    segment.row = row;
    segment.sequence = keys.sequence;
    segment.kv_head = item / call.parts;
    const int skipped = (item - segment.kv_head * call.parts) * kHeads;
    segment.first_head = segment.kv_head * call.group + skipped;
    segment.count = min(kHeads, call.group - skipped);
    segment.first = keys.start + int(at - item_begin) * round;
    segment.limit = min(keys.start + int(end - item_begin) * round, keys.end);
    // The first of a block's two slots is for an item that the block before began, the other for one that it begins.
    const size_t slot = size_t(block_number()) * 2 + (at == item_begin);
    segment.partial = at == item_begin && end == item_end ? nullptr : call.partial + slot * kHeads * call.value_size;
    segment.statistics = call.statistics + slot * kHeads * 2;
    flag = end < item_end ? call.flags + slot : nullptr;
    if (at > item_begin && end == item_end && threadIdx.x == 0) {
      cut = {row, segment.first_head, segment.count, share.block_of(item_end - 1) - share.block_of(item_begin) + 1};
    }
    at = end;
    return true;
  }
};

// Says that a partial result is complete: all threads have stored their parts, and a barrier has passed.
__device__ __forceinline__ void raise(uint64_t* flag, uint64_t ticket) {
  if (flag == nullptr || threadIdx.x != 0) return;
  __threadfence();
  asm volatile("st.relaxed.gpu.global.u64 [%0], %1;" ::"l"(flag), "l"(ticket) : "memory");
}

// Waits for a flag, and clears it: the launch's memory may be that of the same launch of a graph the next time.
__device__ __forceinline__ void await(uint64_t* flag, uint64_t ticket) {
  uint64_t found;
  do {
    asm volatile("ld.acquire.gpu.global.u64 %0, [%1];" : "=l"(found) : "l"(flag) : "memory");
  } while (found != ticket);
  *flag = 0;
}

// Brings page numbers into L2 while lengths, which say which of them are needed, are read. L2 is coherent: it may be done
// before what ran before is complete.
__device__ __forceinline__ void prefetch_tables(const PagedDecode& call) {
  const int at = (block_number() * blockDim.x + threadIdx.x) * 32;  // 128 bytes a thread
  if (call.tables == nullptr || at >= min(call.sequences * call.columns, kPrefetched)) return;
  asm volatile("prefetch.global.L2 [%0];" ::"l"(call.tables + at));
}

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
    uint64_t* const flag = walk.flag;
    more = walk.next(segment, call, kRound);
    if (more) copies.begin(segment);
    leave_softmax<Size, C>(softmax, done.count, shared);  // while the first pages are looked up
    if (more) {
      copies.fetch_first();
      load_query<Size, C>(query.parts, query.factors, call, segment);
    }
    __syncthreads();
    merge_warps<Size, C>(call, done, shared);
    __syncthreads();  // hazard: the main loop refills the stages that the merge reads
    raise(flag, call.ticket);
  }
}

// The combine: merges the pieces of an item that the block has ended, a warp for each head.
template <int Warps>
__device__ void combine(const PagedDecode& call, const Cut& cut) {
  const int lane = threadIdx.x % 32;
  // The block has the last piece, piece 0 is in the second slot of its block, the others in the first of theirs.
  const auto slot = [&](int piece) {
    return (size_t(block_number()) - (cut.pieces - 1 - piece) * call.lines) * 2 + (piece == 0);
  };
  // Forward progress: blocks start in the order of their numbers, and these have lower ones; so they run, or have ended.
  for (int piece = threadIdx.x; piece < cut.pieces - 1; piece += Warps * 32) await(call.flags + slot(piece), call.ticket);
  __syncthreads();
  for (int head = threadIdx.x / 32; head < cut.heads; head += Warps) {
    const auto place_of = [&](int piece) { return slot(min(piece, cut.pieces - 1)) * kHeads + head; };
    const size_t place = size_t(cut.row) * call.heads + cut.first_head + head;
    for (int column = 0; column < call.value_size; column += 128) {
      // Four columns a lane; those behind the last one are read for nothing, from the first.
      const int own = column + lane * 4, from = own < call.value_size ? own : 0;
      // Many loads are under way together, the first beside those of the weights: the others have nothing left to do.
      float4 parts[kCombineLoads];
      const auto load = [&](int first) {
#pragma unroll
        for (int n = 0; n < kCombineLoads; ++n) {
          parts[n] = *reinterpret_cast<const float4*>(call.partial + place_of(first + n) * call.value_size + from);
        }
      };
      load(0);
      float row_max = -INFINITY, row_sum = 0.f;
      for (int piece = lane; piece < cut.pieces; piece += 32) {
        row_max = fmaxf(row_max, call.statistics[place_of(piece) * 2]);
      }
#pragma unroll
      for (int step = 16; step > 0; step /= 2) row_max = fmaxf(row_max, __shfl_xor_sync(~0u, row_max, step));
      const float shift = row_max == -INFINITY ? 0.f : row_max;
      const auto weight = [&](int piece) {
        return piece < cut.pieces ? exp2f(call.statistics[place_of(piece) * 2] - shift) : 0.f;
      };
      for (int piece = lane; piece < cut.pieces; piece += 32) {
        row_sum += weight(piece) * call.statistics[place_of(piece) * 2 + 1];
      }
#pragma unroll
      for (int step = 16; step > 0; step /= 2) row_sum += __shfl_xor_sync(~0u, row_sum, step);
      // In the order of pieces, so two runs give the same bits.
      float sum[4] = {0.f, 0.f, 0.f, 0.f};
      for (int first = 0; first < cut.pieces; first += kCombineLoads) {
        if (first > 0) load(first);
        const float weights = weight(first + lane);
#pragma unroll
        for (int n = 0; n < kCombineLoads; ++n) {
          const float w = __shfl_sync(~0u, weights, n);
          const float numbers[4] = {parts[n].x, parts[n].y, parts[n].z, parts[n].w};
#pragma unroll
          for (int i = 0; i < 4; ++i) sum[i] += w * numbers[i];
        }
      }
      const Finish finish(call, cut.row, cut.first_head + head, row_max, row_sum);
      if (lane == 0) call.lse[place] = finish.lse;
      if (own >= call.value_size) continue;
#pragma unroll
      for (int n = 0; n < 4; ++n) store_output(call, place * call.value_size + own + n, sum[n] * finish.factor);
    }
  }
}

template <int Size, typename C>
__global__ void __launch_bounds__(Shape<Size, C>::kWarps * 32, Shape<Size, C>::kResident)
    paged_kernel(const __grid_constant__ PagedDecode call) {
  using S = Shape<Size, C>;
  extern __shared__ __align__(128) unsigned char shared[];
  __shared__ Cut cut;
  if (threadIdx.x == 0) cut.pieces = 0;
  start_next_launch();
  prefetch_tables(call);
  // Lengths, which blocks find their shares by, are of launches before; new tokens are in the cache from the wait on.
  if (!call.written) wait_for_previous_launch();
  const Share& share = find_share<S::kWarps * 32>(call, S::kRound);
  if (call.written) wait_for_previous_launch();
  Items walk{share, cut, share.keys, share.row, share.row_begin, share.begin};
  if constexpr (S::kAhead) {
    attend_ahead<Size, C>(call, walk, shared);
  } else {
    Segment segment;
    while (walk.next(segment, call, S::kRound)) {
      attend_alone<Size, C>(call, segment, shared);
      __syncthreads();  // hazard: the next segment's copies overwrite what the merge reads
      raise(walk.flag, call.ticket);
    }
  }
  if (cut.pieces > 0) combine<S::kWarps>(call, cut);
}

// Launches the kernel, which waits for what ran before by itself.
template <int Size, typename C>
cudaError_t launch_paged(cudaStream_t stream, const PagedDecode& call, int blocks) {
  using S = Shape<Size, C>;
  // More than 48 KiB have to be asked for, on every device that a process launches on; so it is done each time.
  const cudaError_t error =
      cudaFuncSetAttribute(paged_kernel<Size, C>, cudaFuncAttributeMaxDynamicSharedMemorySize, S::kBytes);
  if (error != cudaSuccess) return error;
  PagedDecode made = call;
  made.group = call.heads / call.kv_heads;
  made.parts = (made.group + kHeads - 1) / kHeads;
  made.items = call.kv_heads * made.parts / call.lines;
  const dim3 grid(call.lines, blocks / call.lines);
  return launch_early(paged_kernel<Size, C>, grid, S::kWarps * 32, S::kBytes, stream, made);
}

}  // namespace ejkernel
