// The record of a quantised matmul call, a block's tile of it, and the decoding of 4-bit codes that both layouts share.
#pragma once

#include <cstdint>

#include "quantized_matmul/ptx.cuh"
#include "common/tensor_core.cuh"

namespace ejkernel::quantized_matmul {

constexpr int kThreads = 256;
constexpr int kWarps = kThreads / 32;
constexpr int kMostSplits = 8;    // blocks per cluster
// shares are multiples of this many contracted elements, so that their scales are aligned
constexpr int kShareStep = 256; 
constexpr int kGroup = 64;        // the smallest group of codes with one scale
constexpr int kBlockBytes = 102 * 1024;  // shared memory per block, so that two blocks are resident

struct QuantizedCall {
  const __nv_bfloat16* x;  // [m, k]
  const uint32_t* words;
  const uint16_t *scales, *zeros;  // float16
  __nv_bfloat16* output;           // [m, n]
  int m, k, n;
  int row_words, row_groups, log_group;
  int splits;
};

// A block's tile: its columns and rows, and its share of the contracted elements.
template <int Rows, int Tile>
struct Place {
  int warp, lane, part, first_n, first_m, rows, first_k, last_k;

  __device__ __forceinline__ explicit Place(const QuantizedCall& call) {
    warp = threadIdx.x / 32;
    lane = threadIdx.x % 32;
    part = blockIdx.x % call.splits;
    // Blocks with the same columns have consecutive indices, so that words are read from L2.
    const int row_tiles = (call.m + Rows - 1) / Rows, tile = blockIdx.x / call.splits;
    first_m = tile % row_tiles * Rows;
    first_n = tile / row_tiles * Tile;
    rows = min(call.m - first_m, Rows);
    const int steps = (call.k + kShareStep - 1) / kShareStep;
    first_k = int(int64_t(steps) * part / call.splits) * kShareStep;
    last_k = min(int(int64_t(steps) * (part + 1) / call.splits) * kShareStep, call.k);
  }
};

// A 4-bit code in the low mantissa bits of a power of two is an exact bfloat16. The two halves of a register have:
//
//   word           | 7 | 6 | 5 | 4 | 3 | 2 | 1 | 0 |      eight codes
//   of 16          | 4 + J in bits 19 to 22 | J in bits 3 to 6 |      16 + q
//   of 128         | 4 + J in bits 16 to 19 | J in bits 0 to 3 |      128 + q
//
// 16 needs one more shift, and loses less to cancellation in long sums. 128 suffices for short sums.
constexpr uint32_t kOffsets = 0x41804180;  // the bfloat16 16, twice

template <int J>
__device__ __forceinline__ uint32_t codes_on_16(uint32_t word) {
  return mask_or<0x00780078, kOffsets>(J == 0 ? word << 3 : word >> (J == 0 ? 0 : 4 * J - 3));
}

template <int J>
__device__ __forceinline__ uint32_t codes_on_128(uint32_t word) {
  return mask_or<0x000F000F, 0x43004300>(word >> 4 * J);
}

__device__ __forceinline__ float half_bits_to_float(uint32_t bits) {
  return __half2float(__ushort_as_half(static_cast<unsigned short>(bits)));
}

// A thread's 16-byte pieces of a chunk of x, loaded at once and stored later. Elements out of bounds are 0.
template <int Rows, int Chunk>
struct XPieces {
  static_assert(Rows * Chunk % (8 * kThreads) == 0, "all threads have as many");
  static constexpr int kPieces = Chunk / 8, kPassRows = kThreads / kPieces, kPasses = Rows / kPassRows;
  uint4 pieces[kPasses];

  template <typename Place>
  __device__ __forceinline__ XPieces(const QuantizedCall& call, const Place& at, int first) {
    const int row = threadIdx.x / kPieces, k = first + threadIdx.x % kPieces * 8;
    const __nv_bfloat16* from = call.x + int64_t(at.first_m + row) * call.k + k;
#pragma unroll
    for (int pass = 0; pass < kPasses; ++pass) {
      pieces[pass] = {0, 0, 0, 0};
      if (k < at.last_k && row + pass * kPassRows < at.rows) {
        pieces[pass] = *reinterpret_cast<const uint4*>(from + int64_t(pass * kPassRows) * call.k);
      }
    }
  }

  // Calls `put` with a row, a piece's index in the row, and its eight elements.
  template <typename Put>
  __device__ __forceinline__ void store(Put put) const {
#pragma unroll
    for (int pass = 0; pass < kPasses; ++pass) {
      put(threadIdx.x / kPieces + pass * kPassRows, threadIdx.x % kPieces, pieces[pass]);
    }
  }
};

}  // namespace ejkernel::quantized_matmul
