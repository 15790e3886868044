// The producer warpgroup of grouped attention to listed keys.
#pragma once

#include "grouped_sparse_attention/call.cuh"
#include "grouped_sparse_attention/ptx.cuh"

namespace ejkernel::grouped_sparse_attention {

// Gathers the queries and the listed keys and values of all items of a block.
struct Producer {
  const Call& call;
  Shared& shared;
  const int thread, piece, row;  // a thread copies 16 bytes of rows `row` + 16 i
  const uint32_t place;
  Place at{0, 1};
  uint32_t item_parity = 1;

  __device__ __forceinline__ Producer(const Call& c, Shared& s)
      : call(c),
        shared(s),
        thread(threadIdx.x - kConsumers),
        piece(thread % 8),
        row(thread / 8),
        place(row * 128 + (piece ^ row % 8) * 16) {}

  // The list of a group, or of one of its queries, whose keys are made entries of query 0.
  struct List {
    const uint32_t* entries;
    int count, keys;
    bool is_of_one;

    __device__ __forceinline__ uint32_t load(int i) const {
      const uint32_t entry = i < count ? __ldg(entries + i) : is_of_one ? ~0u : 0;
      return !is_of_one ? entry : entry < unsigned(keys) ? entry | 1u << kKeyBits : 0;
    }
  };

  __device__ __forceinline__ void load_entries(uint32_t (&entry)[4], uint32_t& own, const List& list, int first) const {
#pragma unroll
    for (int i = 0; i < 4; ++i) entry[i] = list.load(first + row + 16 * i);
    own = thread < kKeys ? list.load(first + thread) : 0;
  }

  __device__ __forceinline__ void copy_rows(uint32_t to, const char* from, const int64_t (&offset)[4],
                                            const int (&bytes)[4]) const {
#pragma unroll
    for (int chunk = 0; chunk < 2; ++chunk) {
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        copy_async(to + chunk * kChunkBytes + place + i * 2048, from + offset[i] + chunk * 128, bytes[i]);
      }
    }
  }

  __device__ __forceinline__ void copy_queries(const Item& item, int first, int count, int tiles) {
    wait_for_phase(shared_address(&shared.queries_free), item_parity);
    if (thread == 0) {
      shared.tiles = tiles;
      arrive(shared_address(&shared.queries_full));
    }
    const int group_heads = call.heads / call.kv_heads;
    const char* const from = reinterpret_cast<const char*>(call.query) + piece * 16;
#pragma unroll
    for (int warpgroup = 0; warpgroup < 2; ++warpgroup) {
      int64_t offset[4];
      int bytes[4];
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const int query = warpgroup * 4 + i;  // its heads are 16 rows
        bytes[i] = query < count && row < group_heads ? 16 : 0;
        const int64_t token = int64_t(item.batch) * call.tokens + first + query;
        offset[i] = bytes[i] ? (token * call.heads + item.kv_head * group_heads + row) * kRowBytes : 0;
      }
      copy_rows(shared_address(shared.query) + warpgroup * kTileBytes, from, offset, bytes);
    }
    arrive_after_copies(shared_address(&shared.queries_full));
    item_parity ^= 1;
  }

  __device__ __forceinline__ void copy_tile(int64_t base, const uint32_t (&entry)[4], uint32_t own) {
    int64_t offset[4];
    int bytes[4];
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      bytes[i] = entry[i] >> kKeyBits ? 16 : 0;
      offset[i] = base + int64_t(entry[i] & (kMostKeys - 1)) * call.kv_heads * kRowBytes;
    }
    const uint32_t keys_full = shared_address(&shared.keys_full[at.stage]);
    wait_for_phase(shared_address(&shared.free[at.stage]), at.parity);
    if (thread < kKeys) {
      shared.entries[at.stage][thread] = own;
      arrive_with_warp(keys_full);
    }
    copy_rows(shared_address(shared.key[at.stage]), reinterpret_cast<const char*>(call.key) + piece * 16, offset, bytes);
    arrive_after_copies(keys_full);
    copy_rows(
        shared_address(shared.value[at.stage]), reinterpret_cast<const char*>(call.value) + piece * 16, offset, bytes);
    arrive_after_copies(shared_address(&shared.values_full[at.stage]));
    at.advance();
  }

  __device__ __forceinline__ void copy(const Item& item, const List& list, int first, int count, int tiles) {
    const int64_t base = (int64_t(item.batch) * call.keys * call.kv_heads + item.kv_head) * kRowBytes;
    uint32_t entry[4], own;
    load_entries(entry, own, list, 0);
    copy_queries(item, first, count, tiles);
    for (int tile = 0; tile < tiles; ++tile) {
      uint32_t next[4], next_own;
      load_entries(next, next_own, list, (tile + 1) * kKeys);
      copy_tile(base, entry, own);
#pragma unroll
      for (int i = 0; i < 4; ++i) entry[i] = next[i];
      own = next_own;
    }
  }

  __device__ __forceinline__ void run_group(const Item& item) {
    const int list = item.list(call), tiles = __ldg(call.tiles + list), first = item.group * kQueries;
    copy(item, {call.entries + int64_t(list) * call.list_tiles * kKeys, tiles * kKeys, call.keys, false}, first,
         min(kQueries, call.tokens - first), tiles);
  }

  __device__ __forceinline__ void run_query(const Item& item, int query) {
    const int64_t token = int64_t(item.batch) * call.tokens + query;
    const int list = call.lists == 1 ? 0 : item.kv_head;
    const auto* const entries = reinterpret_cast<const uint32_t*>(call.indices) + (token * call.lists + list) * call.listed;
    copy(item, {entries, call.listed, call.keys, true}, query, 1, (call.listed + kKeys - 1) / kKeys);
  }
};

}  // namespace ejkernel::grouped_sparse_attention
