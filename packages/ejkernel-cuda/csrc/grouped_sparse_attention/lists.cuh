// Lists of groups of queries, from those of the queries: each key once, with the queries that list it.
//
//   queries 0..3 of the group (warpgroup 0)   bits of keys --+--> listed by both | by warpgroup 0 alone | by 1 alone
//   queries 4..7 (warpgroup 1)                bits of keys --+     b0 b1 b2           l0 l1                r0 r1 r2
//
//   order of the tiles of 64 entries:  b0 b1 b2 | l0 r0 l1 r1 r2 | one further tile or more of a query
//
// A warpgroup skips tiles that none of its queries lists; l0 and r0 follow each other, so both warpgroups have work. A key
// that a query lists again, which counts again, is in the query's further tiles. The order of entries depends on the lists
// alone.
#pragma once

#include "grouped_sparse_attention/call.cuh"

namespace ejkernel::grouped_sparse_attention {

constexpr int kListWarps = 2 * kQueries, kListThreads = 32 * kListWarps;  // two warps read the list of a query
constexpr int kReadAhead = 8;

struct ListShared {
  int counts[3];  // entries of both warpgroups, of each alone
  int warp_counts[kListWarps][3];  // the same of the words of a window that a warp has
  int repeated[kQueries];
  alignas(16) unsigned bits[4];  // [queries, window / 32]
};

// 32 keys, as bits: those that each query lists, and those that a warpgroup's queries list.
struct ListedKeys {
  unsigned by[kQueries] = {}, left = 0, right = 0;

  __device__ __forceinline__ ListedKeys(const unsigned* bits, int words, int word) {
    if (word >= words) return;
#pragma unroll
    for (int i = 0; i < kQueries; ++i) {
      by[i] = bits[i * words + word];
      (i < 4 ? left : right) |= by[i];
    }
  }

  __device__ __forceinline__ unsigned of_kind(int kind) const {
    return kind == 0 ? left & right : kind == 1 ? left & ~right : right & ~left;
  }
};

struct ListMaker {
  const Call& call;
  ListShared& shared;
  const int thread, lane, warp, query, words, words_per_warp;
  const int* list;  // of the warp's query; null if it has none
  uint32_t* entries;
  int first_key;  // of the window

  __device__ __forceinline__ ListMaker(const Call& c, ListShared& s)
      : call(c),
        shared(s),
        thread(threadIdx.x),
        lane(threadIdx.x % 32),
        warp(threadIdx.x / 32),
        query(threadIdx.x / 32 % kQueries),
        words(c.window / 32),
        words_per_warp((words + kListThreads - 1) / kListThreads * 32),
        first_key(0) {
    const int group = blockIdx.x % call.groups, row = blockIdx.x / call.groups;
    const int batch = row / call.lists, token = group * kQueries + query;
    const int64_t number = (int64_t(batch) * call.tokens + token) * call.lists + row % call.lists;
    list = token < call.tokens ? call.indices + number * call.listed : nullptr;
    entries = call.entries + int64_t(blockIdx.x) * call.list_tiles * kKeys;
  }

  static __device__ __forceinline__ int tiles_of(int count) { return (count + kKeys - 1) / kKeys; }

  __device__ __forceinline__ void clear_bits() {
    for (int i = thread; i < kQueries * words; i += kListThreads) shared.bits[i] = 0;
    __syncthreads();
  }

  // The place of a key in the window; not below `keys_of_window` for another key.
  __device__ __forceinline__ unsigned place_of_key(int key) const { return unsigned(key) - unsigned(first_key); }
  __device__ __forceinline__ unsigned keys_of_window() const { return min(call.window, call.keys - first_key); }

  // Sets the bits of the keys in the window that the queries list. Returns how many this thread found set.
  __device__ __forceinline__ int set_bits() {
    clear_bits();
    unsigned* const bits = shared.bits + query * words;
    const int end = list ? call.listed : 0;
    const unsigned keys = keys_of_window();
    int repeated = 0;
    for (int first = warp / kQueries * 32 + lane; first < end; first += 64 * kReadAhead) {
      int key[kReadAhead];
#pragma unroll
      for (int n = 0; n < kReadAhead; ++n) key[n] = first + 64 * n < end ? __ldg(list + first + 64 * n) : -1;
#pragma unroll
      for (int n = 0; n < kReadAhead; ++n) {
        const unsigned place = place_of_key(key[n]);
        if (place < keys) repeated += int(atomicOr(bits + place / 32, 1u << place % 32) >> place % 32 & 1);
      }
    }
    __syncthreads();
    return repeated;
  }

  // Writes the keys in the window that the queries list again, in the order of the lists, from an entry on. Returns the
  // entry after them.
  __device__ __forceinline__ int write_repeated(int entry) {
    clear_bits();
    unsigned* const bits = shared.bits + query * words;
    const int end = list && warp < kQueries ? call.listed : 0;
    const unsigned keys = keys_of_window();
    for (int i = 0; i < end; i += 32) {
      const int key = i + lane < end ? __ldg(list + i + lane) : -1;
      const unsigned place = place_of_key(key);
      const bool inside = place < keys;
      const unsigned bit = 1u << place % 32;
      const bool is_set = inside && (bits[place / 32] & bit);
      const unsigned same = __match_any_sync(~0u, inside ? key : -1 - lane);
      const bool is_again = inside && (is_set || same << (31 - lane) << 1);
      __syncwarp();
      if (inside && !is_set) atomicOr(bits + place / 32, bit);
      __syncwarp();
      const unsigned again = __ballot_sync(~0u, is_again);
      if (is_again) entries[entry + __popc(again & ((1u << lane) - 1))] = key | 1u << (kKeyBits + query);
      entry += __popc(again);
    }
    __syncthreads();
    return entry;
  }

  // Counts the keys of the window, by warp.
  __device__ __forceinline__ void count_window() {
    unsigned counts[3] = {};
    for (int first = warp * words_per_warp, n = 0; n < words_per_warp; n += 32) {
      const ListedKeys keys(shared.bits, words, first + n + lane);
#pragma unroll
      for (int kind = 0; kind < 3; ++kind) counts[kind] += __popc(keys.of_kind(kind));
    }
#pragma unroll
    for (int kind = 0; kind < 3; ++kind) {
#pragma unroll
      for (int step = 16; step; step /= 2) counts[kind] += __shfl_xor_sync(~0u, counts[kind], step);
      if (lane == 0) shared.warp_counts[warp][kind] = int(counts[kind]);
    }
    __syncthreads();
  }

  // Where the tiles of a list are.
  struct Layout {
    int both, left, right;

    __device__ __forceinline__ explicit Layout(const int (&counts)[3])
        : both(tiles_of(counts[0])), left(tiles_of(counts[1])), right(tiles_of(counts[2])) {}

    // The entry with a number among those of a kind.
    __device__ __forceinline__ int place_of(int kind, int number) const {
      const int tile = number / kKeys, other = kind == 1 ? right : left;
      const int interleaved = both + (tile < other ? 2 * tile + kind - 1 : other + tile);
      return (kind == 0 ? tile : interleaved) * kKeys + number % kKeys;
    }
  };

  // Writes the keys of the window behind those that earlier windows have written.
  __device__ __forceinline__ void write_window(const Layout& layout, int (&written)[3]) {
    int number[3] = {written[0], written[1], written[2]};
#pragma unroll
    for (int i = 0; i < kListWarps; ++i) {
#pragma unroll
      for (int kind = 0; kind < 3; ++kind) {
        const int count = shared.warp_counts[i][kind];
        if (i < warp) number[kind] += count;
        written[kind] += count;
      }
    }
    for (int first = warp * words_per_warp, n = 0; n < words_per_warp; n += 32) {
      const int word = first + n + lane;
      ListedKeys keys(shared.bits, words, word);
      // Two counts of at most 2 ** 10 side by side.
      const unsigned own[2] = {unsigned(__popc(keys.of_kind(0)) | __popc(keys.of_kind(1)) << 16),
                               unsigned(__popc(keys.of_kind(2)))};
      unsigned until[2] = {own[0], own[1]};
#pragma unroll
      for (int step = 1; step < 32; step *= 2) {
        const unsigned before[2] = {__shfl_up_sync(~0u, until[0], step), __shfl_up_sync(~0u, until[1], step)};
        if (lane >= step) until[0] += before[0], until[1] += before[1];
      }
      const unsigned all[2] = {__shfl_sync(~0u, until[0], 31), __shfl_sync(~0u, until[1], 31)};
      until[0] -= own[0], until[1] -= own[1];
      int at[3] = {number[0] + int(until[0] & 0xFFFF), number[1] + int(until[0] >> 16), number[2] + int(until[1])};
      number[0] += int(all[0] & 0xFFFF), number[1] += int(all[0] >> 16), number[2] += int(all[1]);
      // Bit `i` of a word that is rotated by `i` to the left, and by a key's bit to the right, is the key's.
#pragma unroll
      for (int i = 0; i < kQueries; ++i) keys.by[i] = __funnelshift_l(keys.by[i], keys.by[i], i);
      for (unsigned rest = keys.left | keys.right; rest; rest &= rest - 1) {
        const int bit = __ffs(int(rest)) - 1;
        unsigned listing = 0;
#pragma unroll
        for (int i = 0; i < kQueries; ++i) listing |= __funnelshift_r(keys.by[i], keys.by[i], bit) & 1u << i;
        const int kind = !(listing >> 4) ? 1 : !(listing & 15) ? 2 : 0;
        const int place = layout.place_of(kind, kind == 0 ? at[0]++ : kind == 1 ? at[1]++ : at[2]++);
        entries[place] = unsigned(first_key + word * 32 + bit) | listing << kKeyBits;
      }
    }
    __syncthreads();
  }

  __device__ __forceinline__ void run() {
    if (thread < 3) shared.counts[thread] = 0;
    if (thread < kQueries) shared.repeated[thread] = 0;
    int repeated_here = 0;
    const bool is_one_window = call.keys <= call.window;
    for (first_key = 0; first_key < call.keys; first_key += call.window) {
      repeated_here += set_bits();
      count_window();
      if (thread >= 3) continue;
      for (int i = 0; i < kListWarps; ++i) shared.counts[thread] += shared.warp_counts[i][thread];
    }
    if (repeated_here) atomicAdd(&shared.repeated[query], repeated_here);
    __syncthreads();
    const int counts[3] = {shared.counts[0], shared.counts[1], shared.counts[2]};
    const Layout layout(counts);
    int written[3] = {};
    for (first_key = 0; first_key < call.keys; first_key += call.window) {
      if (!is_one_window) {
        set_bits();
        count_window();
      }
      write_window(layout, written);
    }
    int tiles = layout.both + layout.left + layout.right, first_tile = 0, repeated = 0, all_repeated = 0;
#pragma unroll
    for (int i = 0; i < kQueries; ++i) {
      const int count = shared.repeated[i];
      if (i == query) first_tile = tiles, repeated = count;
      tiles += tiles_of(count);
      all_repeated += count;
    }
    // Entries of 0 fill up the last tile of each kind.
#pragma unroll
    for (int kind = 0; kind < 3; ++kind) {
      const int place = counts[kind] + thread;
      if (place < tiles_of(counts[kind]) * kKeys) entries[layout.place_of(kind, place)] = 0;
    }
    for (int i = repeated + lane; i < tiles_of(repeated) * kKeys; i += 32) entries[first_tile * kKeys + i] = 0;
    if (thread == 0) call.tiles[blockIdx.x] = tiles;
    if (all_repeated == 0) return;
    int entry = first_tile * kKeys;
    for (first_key = 0; first_key < call.keys; first_key += call.window) entry = write_repeated(entry);
  }
};

__global__ void __launch_bounds__(kListThreads) make_lists_kernel(const Call call) {
  extern __shared__ __align__(1024) char memory[];
  // The attention reports outputs that are not finite.
  for (int i = blockIdx.x * kListThreads + threadIdx.x; i < call.items; i += gridDim.x * kListThreads) {
    call.not_finite[i] = 0;
  }
  if (blockIdx.x == 0 && threadIdx.x == 0) *call.any_not_finite = 0;
  ListMaker(call, *reinterpret_cast<ListShared*>(memory)).run();
}

inline size_t list_bytes(int window) { return sizeof(ListShared) + size_t(window / 8) * kQueries; }

}  // namespace ejkernel::grouped_sparse_attention
