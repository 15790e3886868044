// Writes new tokens into their slots of a paged cache, before decode attention.
//
//   new keys, values [rows, KV heads, size]  --lengths, tables-->  page, slot  -->  the cache, in place
//
// A thread copies one piece of 16 bytes. The decode kernel is launched early and computes its shares meanwhile.
#pragma once

#include "paged_decode/paged_decode.cuh"

namespace ejkernel::paged_decode {

constexpr int kWriteThreads = 128;

// New keys, or values, and the cache array that they are written to. Sizes are in pieces of 16 bytes.
struct NewTokens {
  const uint4* tokens;  // [rows, kv_heads, size]
  uint4* pages;
  Strides strides;
  int size, row_size;   // head dimensions of a token, and of the cache, which may have padding at its end
};

struct PagedWrite {
  PagedDecode call;
  NewTokens parts[2];
  int heads;  // heads of the cache, which may have more than KV heads as padding
};

// The grid's x axis is over pieces, its y axis over keys and values.
static __global__ void __launch_bounds__(kWriteThreads) write_kernel(const __grid_constant__ PagedWrite write) {
  // The next launch reads lengths before it waits, so everything before this launch must be complete when it starts.
  wait_for_previous_launch();
  start_next_launch();
  const PagedDecode& call = write.call;
  const NewTokens& part = write.parts[blockIdx.y];
  const long long number = (long long)blockIdx.x * kWriteThreads + threadIdx.x;
  const int piece = number % part.row_size, head = number / part.row_size % write.heads;
  const long long row = number / (part.row_size * write.heads);
  if (row >= call.rows) return;
  const Place place = place_of_row(call, row);
  if (place.sequence < 0 || place.position < 0) return;
  int column = 0, slot = place.position, page = place.sequence;
  if (call.tables != nullptr) {
    column = place.position / call.page_size;
    slot = place.position - column * call.page_size;
    // Past the end of the table there is no page. An entry that is no valid page index is padding, and is never
    // written.
    page = column < call.columns ? call.tables[size_t(place.sequence) * call.columns + column] : -1;
  }
  if (page < 0 || page >= call.pages || slot >= call.page_size) return;
  // The padding of heads and head dimensions is set to zero.
  const bool there = head < call.kv_heads && piece < part.size;
  const Strides& strides = part.strides;
  part.pages[size_t(page) * strides.page + size_t(slot) * strides.slot + size_t(head) * strides.head + piece] =
      there ? part.tokens[(row * call.kv_heads + head) * part.size + piece] : uint4{0, 0, 0, 0};
}

inline cudaError_t launch_write(cudaStream_t stream, const PagedWrite& write) {
  const long long pieces =
      (long long)write.call.rows * write.heads * max(write.parts[0].row_size, write.parts[1].row_size);
  return launch_early(
      write_kernel, dim3((pieces + kWriteThreads - 1) / kWriteThreads, 2), kWriteThreads, 0, stream, write);
}

}  // namespace ejkernel::paged_decode
