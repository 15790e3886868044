// The record of a paged decoding call, and which keys its rows attend to.
#pragma once

#include "decode.cuh"

namespace ejkernel {

constexpr int kMostValues = 256;

// New keys, or values, and where they go. Sizes are in pieces of 16 bytes.
struct NewTokens {
  const uint4* from;    // [rows, KV heads, size]
  uint4* pages;
  Strides strides;
  int size, row_size;   // of a token's head, and of a head in the cache, whose end is padding
};

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
  int left, right;         // window around the query's own position; 2^30 for no end
  bool written;            // whether the query rows' own keys and values are still to be written
  NewTokens tokens[2];     // which then are these
  int cache_heads;         // of the cache: more than KV heads, where some are padding
};

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

}  // namespace ejkernel
