// Writing new tokens into their slots of a paged cache: each warp those of the keys that it copies afterwards.
//
//   new keys, values [rows, KV heads, size]  --lengths, tables-->  page, slot  -->  the cache, in place
//
// So no launch has to run before, and no block waits for another one. A token that several blocks attend to is written by
// each of them, with the same bytes. No other sequence may attend to the slot that a sequence's new token is written into.
#pragma once

#include "paged_call.cuh"

namespace ejkernel {

// Writes a token's keys and values of one KV head. All lanes of a warp call it.
__device__ inline void write_token(const PagedDecode& call, int row, int sequence, int position, int kv_head) {
  int column = 0, slot = position, page = sequence;
  if (call.tables != nullptr) {
    column = position / call.page_size;
    slot = position - column * call.page_size;
    // Behind the table there is no page; an entry that is none of the cache's is padding, and is never written.
    page = column < call.columns ? call.tables[size_t(sequence) * call.columns + column] : -1;
  }
  if (page < 0 || page >= call.pages || slot >= call.page_size) return;
  // What pads sizes becomes zeros, and so do the heads behind the last one, which pad the cache.
  const int last = kv_head + 1 == call.kv_heads ? call.cache_heads : kv_head + 1;
  const int keys = call.tokens[0].row_size, both = keys + call.tokens[1].row_size;
  for (int head = kv_head; head < last; ++head) {
    for (int n = threadIdx.x % 32; n < both; n += 32) {
      const NewTokens& part = call.tokens[n >= keys];
      const int piece = n >= keys ? n - keys : n;
      const bool there = head < call.kv_heads && piece < part.size;
      part.pages[size_t(page) * part.strides.page + size_t(slot) * part.strides.slot +
                 size_t(head) * part.strides.head + piece] =
          there ? part.from[(size_t(row) * call.kv_heads + head) * part.size + piece] : uint4{0, 0, 0, 0};
    }
  }
}

// Writes those new tokens of a segment's sequence that the warp copies afterwards, and, where the row does not attend to
// its own token, that one. `start` and `end` are the row's keys.
template <int Size, typename C>
__device__ __forceinline__ void write_tokens(
    const PagedDecode& call, int row, int sequence, int kv_head, int first, int limit, int start, int end) {
  using S = Shape<Size, C>;
  if (sequence < 0) return;
  const int warp = threadIdx.x / 32;
  const bool given = call.query_start != nullptr;
  const int first_row = given ? call.query_start[sequence] : sequence;
  const int count = given ? call.query_start[sequence + 1] - first_row : 1;
  const int oldest = call.lengths[sequence] - count;  // the position of the first row
  for (int position = max(first, oldest); position < min(limit, oldest + count); ++position) {
    if ((position - first) / S::kKeys % S::kWarps != warp) continue;
    write_token(call, first_row + position - oldest, sequence, position, kv_head);
  }
  const int own = oldest + row - first_row;
  if (warp == 0 && own >= 0 && (own < start || own >= end)) write_token(call, row, sequence, own, kv_head);
  __syncwarp();  // hazard: other lanes copy what a lane has written
}

// The same as a call, given numbers alone, for sizes whose registers are all in use: inlined, it would make those spill that
// other calls need. A call takes microseconds longer.
template <int Size, typename C>
__device__ __noinline__ void write_tokens_apart(
    const PagedDecode& call, int row, int sequence, int kv_head, int first, int limit, int start, int end) {
  write_tokens<Size, C>(call, row, sequence, kv_head, first, limit, start, end);
}

template <int Size, typename C>
__device__ __forceinline__ void write_segment(const PagedDecode& call, const Segment& segment, const RowKeys& keys) {
  constexpr auto write = Shape<Size, C>::kAhead ? write_tokens<Size, C> : write_tokens_apart<Size, C>;
  write(call, segment.row, segment.sequence, segment.kv_head, segment.first, segment.limit, keys.start, keys.end);
}

// The first copies of a segment, with new tokens written before they are copied: behind the first copies, where none of
// those has one, so that nothing waits for them.
template <int Size, typename C>
__device__ __forceinline__ void fetch_written(
    Copies<Size, C>& copies, const PagedDecode& call, const Segment& segment, const RowKeys& keys) {
  using S = Shape<Size, C>;
  // New tokens are at the sequence's end, at most as many as rows.
  const bool late = segment.limit - segment.first - call.rows >= (S::kStages - 1) * S::kRound;
  if (call.written && !late) write_segment<Size, C>(call, segment, keys);
  copies.fetch_first();
  if (call.written && late) write_segment<Size, C>(call, segment, keys);
}

}  // namespace ejkernel
