// Paged decode attention by a persistent kernel, whose blocks get equal shares of all keys for any mix of lengths
// (Stream-K).
//
//   line     row 0, head 0 | row 0, head 8 | row 1, head 0 | row 1, head 8 | ...     rounds of a block's warps
//   blocks   |----- 0 -----|----- 8 -----|----- 16 ----|----- 24 ----|               cut into equal shares
//
// The work is laid out in `lines` sequences of work items (a row with up to 16 query heads of a KV head), measured in
// rounds (one tile per warp). Consecutive heads are in different lines, so that neighbouring blocks, which run at the
// same time, read heads of the same keys, which are neighbours in memory. A block processes the segments of its share
// in order. At most its first segment continues an item of an earlier block, and at most its last one continues in a
// later block, so a block has at most two partial results. The block that ends an item merges it after its own share,
// when the flags of all other blocks of the item say that their partial results are complete.
//
// Each block computes its share from the lengths of all rows, so no planning or combine kernel is launched. If all rows
// have one length, shares grow a little to be whole items, or items are a whole number of shares.
//
// Source: Osama et al. 2023, arXiv:2301.03598 (Stream-K: equal shares of a linear order of tiles).
#pragma once

#include <climits>

#include "common/decode.cuh"
#include "common/dependent_launch.cuh"

namespace ejkernel::paged_decode {

constexpr int kFewestKeys = 256;  // per share, so that the cost of starting and merging a block is small
constexpr int kShareGrowth = 2;   // rounds by which shares may grow so that items are not cut
constexpr int kPrefetched = 1 << 16;  // page table entries to prefetch, at most
constexpr int kCombineLoads = 16;     // partial results that a thread loads at the same time
constexpr int kMostValues = 256;
constexpr int kMostBlocks = 65535;  // per line: the limit of a grid's y axis

struct PagedDecode : Decode {
  const int* starts;       // [sequences], first key; null for 0
  const int* lengths;      // [sequences], tokens, including the queries
  const int* query_start;  // [sequences + 1], first query row of each sequence; null for one row each
  const int* live;         // number of sequences that are not padding; null for all
  uint64_t* flags;         // [blocks, 2], for the partial results: `ticket` once one is complete
  // A value unique to the launch, so that flags need not be initialised: uninitialised memory equals it with
  // probability 2^-64. A CUDA graph replays a launch with the same ticket, so flags are cleared once they are read.
  uint64_t ticket;
  int sequences, lines;
  // Query heads per KV head, blocks of up to 16 of them, and work items per line; set by `launch_paged`.
  int group, parts, items;
  // whether a kernel of this call writes the cache first; launches before that kernel are complete
  bool written;          
  int left, right;         // window around the query's position; 2^30 if unbounded
};

// Consecutive blocks of a line differ in y, so that a block gets its index without a division.
__device__ __forceinline__ int block_number() { return blockIdx.y * gridDim.x + blockIdx.x; }

// A row's sequence, the sequence's length, and the row's position in it.
struct Place {
  int sequence, position;  // `sequence` is negative for a padding row
  int length = 0;
};

__device__ inline Place place_of_row(const PagedDecode& call, int row) {
  // Issues all loads at once, needed or not: this is the start of the kernel, where nothing else hides their latency.
  const bool in_range = row < call.sequences;
  int length = in_range ? call.lengths[row] : 0;
  if (call.query_start == nullptr) return {row, length - 1, length};
  const int* starts = call.query_start;
  int first = in_range ? starts[row] : 0, next = in_range ? starts[row + 1] : 0;
  const int live = call.live == nullptr ? call.sequences : min(*call.live, call.sequences);
  // Pure decoding: row n is the only query row of sequence n. Otherwise a binary search finds the last sequence that
  // begins at the row or before it, which skips sequences without queries.
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

// A row's sequence and the range of keys that it attends to.
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

// A block's share of a line.
struct Share {
  long long size;        // rounds per share; the last ones may be shorter
  long long begin, end;  // this share's range of rounds
  int row;               // the row that contains round `begin`
  long long row_begin;   // the row's first round
  RowKeys keys;          // of the row
  // The block of the line that has a round in its share.
  __device__ int block_of(long long round) const { return int(quotient(round, size)); }
  // A 32-bit division where it suffices: a 64-bit one takes several times as long.
  static __device__ __forceinline__ long long quotient(long long a, long long b) {
    return ((a | b) >> 32) == 0 ? (long long)(uint32_t(a) / uint32_t(b)) : a / b;
  }
};

// Rounds per share. `rounds` is the number per item if it is the same for all rows, otherwise 0.
__device__ inline long long share_size(long long total, int blocks, int keys, int rounds) {
  const int fewest = (kFewestKeys + keys - 1) / keys;
  blocks = int(min((long long)blocks, max(total / fewest, 1LL)));
  const long long size = Share::quotient(total + blocks - 1, blocks);
  if (rounds == 0) return size;
  // If shares end with items, fewer partial results are stored and merged. Growing by more than a few rounds, which
  // leaves other blocks idle, costs more than that.
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
  __shared__ Share share;  // in shared memory, to save registers
  // Prefix sums over rows: each thread sums consecutive rows.
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
    // The last of the thread's rows that begin at or before the share; with one row per thread nothing is read again.
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

// An item that this block ends and others began; `pieces` counts partial results, this block's included.
struct Cut {
  int row, first_head, heads, pieces;
};

// Iterates over the segments of a block's share.
struct Items {
  const Share& share;
  Cut& cut;
  RowKeys keys;         // of `row`
  int row;
  long long row_begin;  // the row's first round
  long long at;         // the round where the next segment begins
  uint64_t* flag;       // of the segment; null if its result is not partial

  // Returns whether there is a next segment. A segment that ends an item of other blocks is recorded, to be merged
  // later.
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
    // Slot 0 of a block is for an item that began in an earlier block, slot 1 for one that continues in a later block.
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

// Publishes a partial result. All threads have stored theirs, and a barrier has passed.
__device__ __forceinline__ void raise(uint64_t* flag, uint64_t ticket) {
  if (flag == nullptr || threadIdx.x != 0) return;
  __threadfence();
  asm volatile("st.relaxed.gpu.global.u64 [%0], %1;" ::"l"(flag), "l"(ticket) : "memory");
}

// Waits for a flag and clears it: if a CUDA graph replays the launch, its flags may be in the same memory.
__device__ __forceinline__ void await(uint64_t* flag, uint64_t ticket) {
  uint64_t found;
  do {
    asm volatile("ld.acquire.gpu.global.u64 %0, [%1];" : "=l"(found) : "l"(flag) : "memory");
  } while (found != ticket);
  *flag = 0;
}

// Prefetches page table entries into L2 while the lengths, which say which entries are needed, are read. L2 is
// coherent, so this is safe before the previous launch is complete.
__device__ __forceinline__ void prefetch_tables(const PagedDecode& call) {
  const int at = (block_number() * blockDim.x + threadIdx.x) * 32;  // 128 bytes per thread
  if (call.tables == nullptr || at >= min(call.sequences * call.columns, kPrefetched)) return;
  asm volatile("prefetch.global.L2 [%0];" ::"l"(call.tables + at));
}

// Attends to the segments of a share, and starts the next segment's copies and queries before merging the current one.
// Otherwise a block would read no memory during its merge and, with equal lengths, all blocks would merge at the same
// time.
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
    leave_softmax<Size, C>(softmax, done.count, shared);  // overlaps with the look-up of the first pages
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

// The combine: merges the partial results of an item that the block ended, one warp per head.
template <int Warps>
__device__ void combine(const PagedDecode& call, const Cut& cut) {
  const int lane = threadIdx.x % 32;
  // This block has the last piece. Piece 0 is in slot 1 of its block, the others in slot 0 of theirs.
  const auto slot = [&](int piece) {
    return (size_t(block_number()) - (cut.pieces - 1 - piece) * call.lines) * 2 + (piece == 0);
  };
  // Forward progress: blocks start in index order and these have lower indices, so they are running or have finished.
  for (int piece = threadIdx.x; piece < cut.pieces - 1; piece += Warps * 32) await(call.flags + slot(piece), call.ticket);
  __syncthreads();
  for (int head = threadIdx.x / 32; head < cut.heads; head += Warps) {
    const auto place_of = [&](int piece) { return slot(min(piece, cut.pieces - 1)) * kHeads + head; };
    const size_t place = size_t(cut.row) * call.heads + cut.first_head + head;
    for (int column = 0; column < call.value_size; column += 128) {
      // Four columns per lane; lanes past the last column load the first one, and discard it.
      const int own = column + lane * 4, from = own < call.value_size ? own : 0;
      // Many loads are in flight together, the first ones with those of the weights: nothing else hides their latency.
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
      // In a fixed order, so that results are reproducible bit for bit.
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
  // Shares depend on lengths, which earlier launches wrote; with new tokens, their write kernel has waited for those.
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

// Launches the kernel, which waits for previous launches itself.
template <int Size, typename C>
cudaError_t launch_paged(cudaStream_t stream, const PagedDecode& call, int blocks) {
  using S = Shape<Size, C>;
  const cudaError_t error = request_shared_memory(paged_kernel<Size, C>, S::kBytes);
  if (error != cudaSuccess) return error;
  PagedDecode made = call;
  made.group = call.heads / call.kv_heads;
  made.parts = (made.group + kHeads - 1) / kHeads;
  made.items = call.kv_heads * made.parts / call.lines;
  const dim3 grid(call.lines, blocks / call.lines);
  return launch_early(paged_kernel<Size, C>, grid, S::kWarps * 32, S::kBytes, stream, made);
}

}  // namespace ejkernel::paged_decode
