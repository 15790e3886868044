// Paged decode attention by a persistent kernel, whose blocks get equal shares of all keys for any mix of lengths
// (Stream-K).
//
//   queue    row 0, head 0 | row 0, head 8 | row 1, head 0 | row 1, head 8 | ...     rounds of a block's warps
//   blocks   |----- 0 -----|----- 8 -----|----- 16 ----|----- 24 ----|               cut into equal shares
//
// There are `num_queues` work queues of items (a row with up to 16 query heads of a KV head), whose length is measured
// in rounds (one tile per warp). Consecutive heads are in different queues, so that neighbouring blocks, which run at
// the same time, read heads of the same keys, which are neighbours in memory. A block processes the segments of its
// share in order. At most its first segment continues an item of an earlier block, and at most its last one continues
// in a later block, so a block has at most two partial results. The block that ends an item merges it after its own
// share, when the flags of all other blocks of the item say that their partial results are complete.
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

constexpr int kMinKeysPerShare = 256;  // so that the cost of starting and merging a block is small
constexpr int kMaxShareGrowth = 2;     // rounds by which shares may grow so that they end with an item
constexpr int kMaxPrefetchedEntries = 1 << 16;  // page table entries to prefetch, at most
constexpr int kLoadsInFlight = 16;     // partial results that a thread loads at the same time
constexpr int kMaxHeadDim = 256;
constexpr int kMaxBlocksPerQueue = 65535;  // the limit of a grid's y axis

struct PagedDecodeParams : DecodeParams {
  const int* starts;       // [sequences], first key; null for 0
  const int* lengths;      // [sequences], tokens, including the queries
  const int* query_start;  // [sequences + 1], first query row of each sequence; null for one row each
  const int* num_valid_seqs;  // number of sequences that are not padding; null for all
  uint64_t* flags;         // [blocks, 2], for the partial results: `ticket` once one is complete
  // A value unique to the launch, so that flags need not be initialised: uninitialised memory equals it with
  // probability 2^-64. A CUDA graph replays a launch with the same ticket, so flags are cleared once they are read.
  uint64_t ticket;
  int sequences, num_queues;
  // Query heads per KV head, blocks of up to 16 of them, and work items per queue and row; set by `launch_paged`.
  int heads_per_kv_head, blocks_per_kv_head, items_per_queue;
  // whether a kernel of this call writes the cache first; launches before that kernel are complete
  bool writes_cache;
  int left, right;         // window around the query's position; 2^30 if unbounded
};

// Consecutive blocks of a queue differ in y, so that a block gets its index without a division.
__device__ __forceinline__ int block_index() { return blockIdx.y * gridDim.x + blockIdx.x; }

// A row's sequence, the sequence's length, and the row's position in it.
struct RowPosition {
  int sequence, position;  // `sequence` is negative for a padding row
  int length = 0;
};

__device__ inline RowPosition find_row_position(const PagedDecodeParams& call, int row) {
  // Issues all loads at once, needed or not: this is the start of the kernel, where nothing else hides their latency.
  const bool in_range = row < call.sequences;
  int length = in_range ? call.lengths[row] : 0;
  if (call.query_start == nullptr) return {row, length - 1, length};
  const int* starts = call.query_start;
  int first = in_range ? starts[row] : 0, next = in_range ? starts[row + 1] : 0;
  const int num_valid_seqs =
      call.num_valid_seqs == nullptr ? call.sequences : min(*call.num_valid_seqs, call.sequences);
  // Pure decoding: row n is the only query row of sequence n. Otherwise a binary search finds the last sequence that
  // begins at the row or before it, which skips sequences without queries.
  if (!(row < num_valid_seqs && first == row && next > row)) {
    int low = -1, high = num_valid_seqs;
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
struct KeyRange {
  int sequence, start, end;
  __device__ int rounds(int keys) const { return max(1, (max(end - start, 0) + keys - 1) / keys); }
};

__device__ inline KeyRange find_key_range(const PagedDecodeParams& call, int row) {
  const auto [sequence, position, tokens] = find_row_position(call, row);
  if (sequence < 0) return {-1, 0, 0};
  const int length = min(tokens, call.columns * call.page_size);
  const int start = max(call.starts == nullptr ? 0 : max(call.starts[sequence], 0), position - call.left);
  return {sequence, start, min(length, position + call.right + 1)};
}

// A block's share of a work queue, as a range of rounds.
struct WorkShare {
  long long size;        // rounds per share; the last ones may be shorter
  long long begin, end;  // this share's range of rounds
  int row;               // the row that contains round `begin`
  long long row_begin;   // the row's first round
  KeyRange keys;          // of the row
  // The index, within the queue, of the block whose share has a round.
  __device__ int block_of(long long round) const { return int(quotient(round, size)); }
  // A 32-bit division where it suffices: a 64-bit one takes several times as long.
  static __device__ __forceinline__ long long quotient(long long a, long long b) {
    return ((a | b) >> 32) == 0 ? (long long)(uint32_t(a) / uint32_t(b)) : a / b;
  }
};

// Rounds per share. `rounds` is the number per item if it is the same for all rows, otherwise 0.
__device__ inline long long rounds_per_share(long long total, int blocks, int keys, int rounds) {
  const int min_rounds = (kMinKeysPerShare + keys - 1) / keys;
  blocks = int(min((long long)blocks, max(total / min_rounds, 1LL)));
  const long long size = WorkShare::quotient(total + blocks - 1, blocks);
  if (rounds == 0) return size;
  // If shares end with items, fewer partial results are stored and merged. Growing by more than a few rounds, which
  // leaves other blocks idle, costs more than that.
  long long adjusted_size = size;
  if (size > rounds) {
    adjusted_size = WorkShare::quotient(size + rounds - 1, rounds) * rounds;
  } else {
    const int shares = rounds / int(size);
    if (rounds % shares == 0) adjusted_size = rounds / shares;
  }
  return adjusted_size - size <= kMaxShareGrowth ? adjusted_size : size;
}

template <int Threads>
__device__ __forceinline__ const WorkShare& find_share(const PagedDecodeParams& call, int keys) {
  const int block = blockIdx.y, blocks = gridDim.y, items_per_queue = call.items_per_queue;
  __shared__ long long warp_sums[Threads / 32];
  __shared__ int warp_min_rounds[Threads / 32], warp_max_rounds[Threads / 32];
  __shared__ WorkShare share;  // in shared memory, to save registers
  // Prefix sums over rows: each thread sums consecutive rows.
  const int rows_per_thread = (call.rows + Threads - 1) / Threads, warp = threadIdx.x / 32;
  const int first_row = min(int(threadIdx.x) * rows_per_thread, call.rows);
  const int end_row = min(first_row + rows_per_thread, call.rows);
  long long thread_rounds = 0;
  int min_rounds = INT_MAX, max_rounds = 0;
  KeyRange row_keys = {-1, 0, 0};
  for (int row = first_row; row < end_row; ++row) {
    row_keys = find_key_range(call, row);
    const int rounds = row_keys.rounds(keys);
    thread_rounds += rounds;
    min_rounds = min(min_rounds, rounds);
    max_rounds = max(max_rounds, rounds);
  }
  thread_rounds *= items_per_queue;
  long long prefix_sum = thread_rounds;
#pragma unroll
  for (int step = 1; step < 32; step *= 2) {
    const long long lower_sum = __shfl_up_sync(~0u, prefix_sum, step);
    if (threadIdx.x % 32 >= step) prefix_sum += lower_sum;
  }
  min_rounds = __reduce_min_sync(~0u, min_rounds);
  max_rounds = __reduce_max_sync(~0u, max_rounds);
  if (threadIdx.x % 32 == 31) {
    warp_sums[warp] = prefix_sum;
    warp_min_rounds[warp] = min_rounds;
    warp_max_rounds[warp] = max_rounds;
  }
  __syncthreads();
  long long total = 0;
#pragma unroll
  for (int w = 0; w < Threads / 32; ++w) {
    if (w < warp) prefix_sum += warp_sums[w];
    total += warp_sums[w];
    min_rounds = min(min_rounds, warp_min_rounds[w]);
    max_rounds = max(max_rounds, warp_max_rounds[w]);
  }
  const long long size = rounds_per_share(total, blocks, keys, min_rounds == max_rounds ? max_rounds : 0);
  const long long begin = min(size * block, total), end = min(begin + size, total);
  if (prefix_sum - thread_rounds <= begin && begin < prefix_sum) {
    // The last of the thread's rows that begin at or before the share; with one row per thread nothing is read again.
    long long row_begin = prefix_sum - thread_rounds;
    int row = first_row;
    for (; row + 1 < end_row; ++row) {
      const long long rounds = (long long)items_per_queue * find_key_range(call, row).rounds(keys);
      if (begin < row_begin + rounds) break;
      row_begin += rounds;
    }
    share = {size, begin, end, row, row_begin, row + 1 == end_row ? row_keys : find_key_range(call, row)};
  }
  if (begin == total && threadIdx.x == 0) share = {size, total, total, 0, 0, row_keys};
  __syncthreads();
  return share;
}

// A work item that several blocks share and this one ends; `num_partials` counts partial results, its own included.
struct SharedItem {
  int row, first_head, num_heads, num_partials;
};

// Iterates over the segments of a block's share, of at most `Heads` query heads each.
template <int Heads>
struct SegmentIterator {
  const WorkShare& share;
  SharedItem& last_item;
  KeyRange keys;          // of `row`
  int row;
  long long row_begin;  // the row's first round
  long long round_index;  // the round where the next segment begins
  uint64_t* flag;       // of the segment; null if its result is not partial

  // Returns whether there is a next segment. If a segment ends an item of other blocks, that item is recorded in
  // `last_item`, to be merged later.
  __device__ __forceinline__ bool next(KeySegment& segment, const PagedDecodeParams& call, int round) {
    if (round_index >= share.end) return false;
    int rounds = keys.rounds(round);
    if (round_index == row_begin + (long long)call.items_per_queue * rounds) {
      row_begin = round_index;
      keys = find_key_range(call, ++row);
      rounds = keys.rounds(round);
    }
    const int item_index = int(WorkShare::quotient(round_index - row_begin, rounds));
    const int item = item_index * call.num_queues + blockIdx.x;
    const long long item_begin = row_begin + (long long)item_index * rounds, item_end = item_begin + rounds;
    const long long end = min(share.end, item_end);
    segment.row = row;
    segment.sequence = keys.sequence;
    segment.kv_head = item / call.blocks_per_kv_head;
    const int heads_before = (item - segment.kv_head * call.blocks_per_kv_head) * Heads;
    segment.first_head = segment.kv_head * call.heads_per_kv_head + heads_before;
    segment.num_heads = min(Heads, call.heads_per_kv_head - heads_before);
    segment.first_key = keys.start + int(round_index - item_begin) * round;
    segment.end_key = min(keys.start + int(end - item_begin) * round, keys.end);
    // Slot 0 of a block is for an item that began in an earlier block, slot 1 for one that continues in a later block.
    const size_t slot = size_t(block_index()) * 2 + (round_index == item_begin);
    segment.partial = round_index == item_begin && end == item_end
                          ? nullptr
                          : call.partial + slot * kHeadsPerBlock * call.value_size;
    segment.statistics = call.statistics + slot * kHeadsPerBlock * 2;
    flag = end < item_end ? call.flags + slot : nullptr;
    if (round_index > item_begin && end == item_end && threadIdx.x == 0) {
      last_item = {
          row, segment.first_head, segment.num_heads, share.block_of(item_end - 1) - share.block_of(item_begin) + 1};
    }
    round_index = end;
    return true;
  }
};

// Publishes a partial result. All threads have stored theirs, and a barrier has passed.
__device__ __forceinline__ void publish_partial(uint64_t* flag, uint64_t ticket) {
  if (flag == nullptr || threadIdx.x != 0) return;
  __threadfence();
  asm volatile("st.relaxed.gpu.global.u64 [%0], %1;" ::"l"(flag), "l"(ticket) : "memory");
}

// Waits for a flag and clears it: if a CUDA graph replays the launch, its flags may be in the same memory.
__device__ __forceinline__ void wait_for_partial(uint64_t* flag, uint64_t ticket) {
  uint64_t flag_value;
  do {
    asm volatile("ld.acquire.gpu.global.u64 %0, [%1];" : "=l"(flag_value) : "l"(flag) : "memory");
  } while (flag_value != ticket);
  *flag = 0;
}

// Prefetches page table entries into L2 while the lengths, which say which entries are needed, are read. L2 is
// coherent, so this is safe before the previous launch is complete.
__device__ __forceinline__ void prefetch_tables(const PagedDecodeParams& call) {
  const int entry = (block_index() * blockDim.x + threadIdx.x) * 32;  // 128 bytes per thread
  if (call.tables == nullptr || entry >= min(call.sequences * call.columns, kMaxPrefetchedEntries)) return;
  asm volatile("prefetch.global.L2 [%0];" ::"l"(call.tables + entry));
}

// The record of a call by the format of its cache, and what blocks do before they find their share, before they load a
// segment's query, when its first copies are in flight, and after the last segment.
template <typename CacheT>
struct CallFormat {
  using Params = PagedDecodeParams;
  template <typename S>
  static __device__ __forceinline__ void prepare(const Params&, unsigned char*) {}
  template <typename Query>
  static __device__ __forceinline__ void make_query(const Query&, const Params&, const WorkShare&, void*) {}
  static __device__ __forceinline__ void finish_share(const Params&, const WorkShare&) {}
};

// Attends to the segments of a share, and starts the next segment's copies and queries before merging the current one.
// Otherwise a block would read no memory during its merge and, with equal lengths, all blocks would merge at the same
// time.
template <int HeadDim, typename CacheT, typename Params, typename Segments>
__device__ __forceinline__ void attend_prefetching(
    const Params& call, Segments& segments, unsigned char* shared) {
  constexpr int kKeysPerRound = TileShape<HeadDim, CacheT>::kKeysPerRound;
  TileLoader<HeadDim, CacheT> loader(call, shared);
  using Format = CacheFormat<HeadDim, CacheT>;
  typename Format::Query query;
  KeySegment segment;
  bool has_next = segments.next(segment, call, kKeysPerRound);
  if (has_next) {
    loader.start_segment(segment);
    loader.prefetch_tiles();
    CallFormat<CacheT>::make_query(query, call, segments.share, shared);
    Format::load(query, call, segment, shared);
  }
  while (has_next) {
    typename Format::Softmax softmax;
    attend_tiles(softmax, call, loader, query, segment.num_heads);
    const KeySegment finished = segment;
    uint64_t* const flag = segments.flag;
    has_next = segments.next(segment, call, kKeysPerRound);
    if (has_next) loader.start_segment(segment);
    // Overlaps with the look-up of the next segment's first pages.
    Format::store(softmax, finished.num_heads, shared);
    if (has_next) {
      loader.prefetch_tiles();
      CallFormat<CacheT>::make_query(query, call, segments.share, shared);
      Format::load(query, call, segment, shared);
    }
    __syncthreads();
    merge_warps<HeadDim, CacheT>(call, finished, shared);
    __syncthreads();  // hazard: the main loop refills the stages that the merge reads
    publish_partial(flag, call.ticket);
  }
}

// The combine: merges the partial results of an item that the block ended, one warp per head.
template <int Warps>
__device__ void combine(const PagedDecodeParams& call, const SharedItem& last_item) {
  const int lane = threadIdx.x % 32;
  // This block has the last partial result. Partial 0 is in slot 1 of its block, the others in slot 0 of theirs.
  const auto slot = [&](int partial) {
    return (size_t(block_index()) - (last_item.num_partials - 1 - partial) * call.num_queues) * 2 + (partial == 0);
  };
  // Forward progress: blocks start in index order and these have lower indices, so they are running or have finished.
  for (int partial = threadIdx.x; partial < last_item.num_partials - 1; partial += Warps * 32) {
    wait_for_partial(call.flags + slot(partial), call.ticket);
  }
  __syncthreads();
  for (int head = threadIdx.x / 32; head < last_item.num_heads; head += Warps) {
    const auto partial_index = [&](int partial) {
      return slot(min(partial, last_item.num_partials - 1)) * kHeadsPerBlock + head;
    };
    const size_t row_head = size_t(last_item.row) * call.heads + last_item.first_head + head;
    for (int column = 0; column < call.value_size; column += 128) {
      // Four columns per lane; lanes past the last column load the first one, and discard it.
      const int lane_column = column + lane * 4, load_column = lane_column < call.value_size ? lane_column : 0;
      // Many loads are in flight together, the first ones with those of the weights: nothing else hides their latency.
      float4 partials[kLoadsInFlight];
      const auto load = [&](int first) {
#pragma unroll
        for (int n = 0; n < kLoadsInFlight; ++n) {
          partials[n] = *reinterpret_cast<const float4*>(
              call.partial + partial_index(first + n) * call.value_size + load_column);
        }
      };
      load(0);
      float row_max = -INFINITY, row_sum = 0.f;
      for (int partial = lane; partial < last_item.num_partials; partial += 32) {
        row_max = fmaxf(row_max, call.statistics[partial_index(partial) * 2]);
      }
#pragma unroll
      for (int step = 16; step > 0; step /= 2) row_max = fmaxf(row_max, __shfl_xor_sync(~0u, row_max, step));
      const float shift = row_max == -INFINITY ? 0.f : row_max;
      const auto partial_weight = [&](int partial) {
        return partial < last_item.num_partials ? exp2f(call.statistics[partial_index(partial) * 2] - shift) : 0.f;
      };
      for (int partial = lane; partial < last_item.num_partials; partial += 32) {
        row_sum += partial_weight(partial) * call.statistics[partial_index(partial) * 2 + 1];
      }
#pragma unroll
      for (int step = 16; step > 0; step /= 2) row_sum += __shfl_xor_sync(~0u, row_sum, step);
      // In a fixed order, so that results are reproducible bit for bit.
      float sum[4] = {0.f, 0.f, 0.f, 0.f};
      for (int first = 0; first < last_item.num_partials; first += kLoadsInFlight) {
        if (first > 0) load(first);
        const float weights = partial_weight(first + lane);
#pragma unroll
        for (int n = 0; n < kLoadsInFlight; ++n) {
          const float w = __shfl_sync(~0u, weights, n);
          const float values[4] = {partials[n].x, partials[n].y, partials[n].z, partials[n].w};
#pragma unroll
          for (int i = 0; i < 4; ++i) sum[i] += w * values[i];
        }
      }
      const OutputScale output_scale(call, last_item.row, last_item.first_head + head, row_max, row_sum);
      if (lane == 0) call.lse[row_head] = output_scale.lse;
      if (lane_column >= call.value_size) continue;
#pragma unroll
      for (int n = 0; n < 4; ++n) {
        store_output(call, row_head * call.value_size + lane_column + n, sum[n] * output_scale.factor);
      }
    }
  }
}

template <int HeadDim, typename CacheT>
__global__ void __launch_bounds__(TileShape<HeadDim, CacheT>::kWarps * 32, TileShape<HeadDim, CacheT>::kBlocksPerSm)
    paged_kernel(const __grid_constant__ typename CallFormat<CacheT>::Params call) {
  using S = TileShape<HeadDim, CacheT>;
  extern __shared__ __align__(128) unsigned char shared[];
  __shared__ SharedItem last_item;
  if (threadIdx.x == 0) last_item.num_partials = 0;
  start_next_launch();
  prefetch_tables(call);
  // Shares depend on lengths, which earlier launches wrote; with new tokens, their write kernel has waited for those.
  if (!call.writes_cache) wait_for_previous_launch();
  CallFormat<CacheT>::template prepare<S>(call, shared);
  const WorkShare& share = find_share<S::kWarps * 32>(call, S::kKeysPerRound);
  if (call.writes_cache) wait_for_previous_launch();
  SegmentIterator<S::kHeads> segments{share, last_item, share.keys, share.row, share.row_begin, share.begin};
  if constexpr (S::kPrefetchesNextSegment) {
    attend_prefetching<HeadDim, CacheT>(call, segments, shared);
  } else {
    KeySegment segment;
    while (segments.next(segment, call, S::kKeysPerRound)) {
      attend_segment<HeadDim, CacheT>(call, segment, shared);
      __syncthreads();  // hazard: the next segment's copies overwrite what the merge reads
      publish_partial(segments.flag, call.ticket);
    }
  }
  if (last_item.num_partials > 0) combine<S::kWarps>(call, last_item);
  CallFormat<CacheT>::finish_share(call, share);
}

// Launches the kernel, which waits for previous launches itself.
template <int HeadDim, typename CacheT>
cudaError_t launch_paged(cudaStream_t stream, const typename CallFormat<CacheT>::Params& call, int blocks) {
  using S = TileShape<HeadDim, CacheT>;
  const cudaError_t error = request_shared_memory(paged_kernel<HeadDim, CacheT>, S::kSmemBytes);
  if (error != cudaSuccess) return error;
  auto params = call;
  params.heads_per_kv_head = call.heads / call.kv_heads;
  params.blocks_per_kv_head = (params.heads_per_kv_head + S::kHeads - 1) / S::kHeads;
  params.items_per_queue = call.kv_heads * params.blocks_per_kv_head / call.num_queues;
  const dim3 grid(call.num_queues, blocks / call.num_queues);
  return launch_early(paged_kernel<HeadDim, CacheT>, grid, S::kWarps * 32, S::kSmemBytes, stream, params);
}

}  // namespace ejkernel::paged_decode
