// The producer warpgroup of latent attention to listed keys.
#pragma once

#include "token_sparse_attention/call.cuh"
#include "token_sparse_attention/ptx.cuh"

namespace ejkernel::token_sparse_attention {

// Gathers the queries and the listed keys of all items of a block.
template <bool Split>
struct LatentProducer {
  const LatentCall& call;
  LatentShared& shared;
  const int thread, piece, row;  // a thread copies 16 bytes of rows `row` + 16 i
  const uint32_t place;
  uint32_t step_parity = 1, item_parity = 1;

  __device__ __forceinline__ LatentProducer(const LatentCall& c, LatentShared& s)
      : call(c),
        shared(s),
        thread(threadIdx.x - kConsumers),
        piece(thread % 8),
        row(thread / 8),
        place(row * 128 + (piece ^ row % 8) * 16) {}

  // Steps up to the last entry that is a key. Every warp finds it alone, usually in the last entries of the list.
  __device__ __forceinline__ int count_steps(const int* list, const LatentItem& item) const {
    constexpr int kLoads = 4;
    for (int end = item.end_entry; end > item.first_entry; end -= 32 * kLoads) {
      int last = -1;
#pragma unroll
      for (int i = 0; i < kLoads; ++i) {
        const int entry = end - 32 * kLoads + i * 32 + thread % 32;
        const int index = entry >= item.first_entry ? __ldg(list + entry) : -1;
        const unsigned found = __ballot_sync(~0u, is_key(index));
        if (found) last = end - 32 * kLoads + i * 32 + 31 - __clz(found);
      }
      if (last >= 0) return (last - item.first_entry) / kStepKeys + 1;
    }
    return 0;
  }

  __device__ __forceinline__ bool is_key(int index) const {
    return static_cast<unsigned>(index) < static_cast<unsigned>(call.keys);
  }

  __device__ __forceinline__ void load_indices(int (&index)[4], int& own, const int* list, int entry, int end) const {
#pragma unroll
    for (int i = 0; i < 4; ++i) index[i] = entry + row + 16 * i < end ? __ldg(list + entry + row + 16 * i) : -1;
    own = thread < kKeys && entry + thread < end ? __ldg(list + entry + thread) : -1;
  }

  __device__ __forceinline__ void copy_chunk(uint32_t to, const char* const (&from)[4], const int (&bytes)[4],
                                             int chunk) const {
#pragma unroll
    for (int i = 0; i < 4; ++i) copy_async(to + chunk * kChunkBytes + place + i * 2048, from[i] + chunk * 128, bytes[i]);
  }

  __device__ __forceinline__ void copy_queries(const LatentItem& item, int steps) {
    wait_for_phase(shared_address(&shared.queries_free), item_parity);
    if (thread == 0) {
      shared.steps = steps;
      arrive(shared_address(&shared.queries_full));
    }
    const char* from[4];
    int bytes[4];
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const int head = item.first_head + row + 16 * i;
      bytes[i] = head < call.heads ? 16 : 0;
      from[i] = reinterpret_cast<const char*>(call.query) +
                (int64_t(item.row) * call.heads + min(head, call.heads - 1)) * kRowBytes + piece * 16;
    }
#pragma unroll
    for (int chunk = 0; chunk < kChunks; ++chunk) copy_chunk(shared_address(shared.query), from, bytes, chunk);
    arrive_after_copies(shared_address(&shared.queries_full));
    item_parity ^= 1;
  }

  template <int Block>
  __device__ __forceinline__ void copy_block(const char* keys, const int (&index)[4], int own) const {
    const char* from[4];
    int bytes[4];
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      bytes[i] = is_key(index[i]) ? 16 : 0;
      from[i] = keys + int64_t(bytes[i] ? index[i] : 0) * kRowBytes;
    }
    const unsigned valid = __ballot_sync(~0u, is_key(own));
    const uint32_t to = shared_address(shared.key[Block]);
#pragma unroll
    for (int n = 0; n < 2; ++n) {
      constexpr int kFirstPart = 2 * Block;
      const uint32_t full = shared_address(&shared.full[kFirstPart + n]);
      wait_for_phase(shared_address(&shared.free[kFirstPart + n]), step_parity);
      const int half = Block == 0 ? n : 1 - n;
#pragma unroll
      for (int chunk = 0; chunk < 4; ++chunk) copy_chunk(to, from, bytes, half * 4 + chunk);
      if (n == 1) copy_chunk(to, from, bytes, kRotary);
      if (n == 0 && thread < kKeys && thread % 32 == 0) {
        reinterpret_cast<unsigned*>(&shared.valid[Block])[thread / 32] = valid;
        arrive(full);
      }
      arrive_after_copies(full);
    }
  }

  __device__ __forceinline__ void run() {
    for (int i = blockIdx.x; i < call.items; i += gridDim.x) {
      const LatentItem item(call, i);
      const int* list = call.indices + int64_t(item.row) * call.listed;
      const char* keys =
          reinterpret_cast<const char*>(call.key) + int64_t(item.row / call.tokens) * call.keys * kRowBytes + piece * 16;
      int index[4], own;
      load_indices(index, own, list, item.first_entry, item.end_entry);
      const int steps = count_steps(list, item);
      copy_queries(item, steps);
      for (int step = 0; step < steps; ++step) {
        const int entry = item.first_entry + step * kStepKeys;
        int next[4], next_own;
        load_indices(next, next_own, list, entry + kKeys, item.end_entry);
        copy_block<0>(keys, index, own);
        load_indices(index, own, list, entry + kStepKeys, item.end_entry);
        copy_block<1>(keys, next, next_own);
        step_parity ^= 1;
      }
      // The consumers of the cluster merge their splits.
      for (int i = 0; Split && i < 3; ++i) synchronise_cluster();
    }
  }
};

}  // namespace ejkernel::token_sparse_attention
