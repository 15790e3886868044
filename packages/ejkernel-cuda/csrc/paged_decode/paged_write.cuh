// Writes new tokens into their slots of a paged cache, before decode attention.
//
//   new keys, values [rows, KV heads, size]  --lengths, tables-->  page, slot  -->  the cache, in place
//
// A thread copies one chunk of 16 bytes. The decode kernel is launched early and computes its shares meanwhile.
#pragma once

#include "paged_decode/paged_decode.cuh"

namespace ejkernel::paged_decode {

constexpr int kWriteThreads = 128;

// New keys, or values, and the cache array that they are written to. Sizes are in chunks of 16 bytes.
struct NewTokenCopy {
  const uint4* tokens;  // [rows, kv_heads, size]
  uint4* pages;
  Strides strides;
  int size, row_size;   // head dimensions of a token, and of the cache, which may have padding at its end
};

struct CacheWriteParams {
  PagedDecodeParams call;
  NewTokenCopy sources[2];
  int heads;  // heads of the cache, which may have more than KV heads as padding
};

// The grid's x axis is over chunks, its y axis over keys and values.
static __global__ void __launch_bounds__(kWriteThreads) write_kernel(const __grid_constant__ CacheWriteParams write) {
  // The next launch reads lengths before it waits, so everything before this launch must be complete when it starts.
  wait_for_previous_launch();
  start_next_launch();
  const PagedDecodeParams& call = write.call;
  const NewTokenCopy& source = write.sources[blockIdx.y];
  const long long thread_index = (long long)blockIdx.x * kWriteThreads + threadIdx.x;
  const int chunk = thread_index % source.row_size, head = thread_index / source.row_size % write.heads;
  const long long row = thread_index / (source.row_size * write.heads);
  if (row >= call.rows) return;
  const RowPosition position = find_row_position(call, row);
  if (position.sequence < 0 || position.position < 0) return;
  int column = 0, slot = position.position, page = position.sequence;
  if (call.tables != nullptr) {
    column = position.position / call.page_size;
    slot = position.position - column * call.page_size;
    // Past the end of the table there is no page. An entry that is no valid page index is padding, and is never
    // written.
    page = column < call.columns ? call.tables[size_t(position.sequence) * call.columns + column] : -1;
  }
  if (page < 0 || page >= call.pages || slot >= call.page_size) return;
  // The padding of heads and head dimensions is set to zero.
  const bool is_valid = head < call.kv_heads && chunk < source.size;
  const Strides& strides = source.strides;
  source.pages[size_t(page) * strides.page + size_t(slot) * strides.slot + size_t(head) * strides.head + chunk] =
      is_valid ? source.tokens[(row * call.kv_heads + head) * source.size + chunk] : uint4{0, 0, 0, 0};
}

inline cudaError_t launch_write(cudaStream_t stream, const CacheWriteParams& write) {
  const long long pieces =
      (long long)write.call.rows * write.heads * max(write.sources[0].row_size, write.sources[1].row_size);
  return launch_early(
      write_kernel, dim3((pieces + kWriteThreads - 1) / kWriteThreads, 2), kWriteThreads, 0, stream, write);
}

}  // namespace ejkernel::paged_decode
