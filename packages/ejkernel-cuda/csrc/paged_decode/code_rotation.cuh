// Rotations of the query heads and outputs of a block's items, on tensor cores.
#pragma once

#include "paged_decode/paged_decode.cuh"

namespace ejkernel::paged_decode {

// `query` [rows, heads, value_size] is not rotated, and `output` is in the coordinates of the cache.
struct RotationParams {
  uint16_t* final_output;  // [rows, heads, value_size]
  const float* query_map;  // [size, value_size]: the rotation, then the projection of rotated queries
  const float* rotation;   // [value_size, value_size]
};

// The items of a block's share, numbered along its queue; those before `done` end in it.
struct ItemRange {
  int first, end, done;
};

// All warps compute the same. The lengths are in L1, since `find_share` has read them.
__device__ inline ItemRange find_items(const PagedDecodeParams& call, const WorkShare& share, int keys) {
  if (share.begin >= share.end) return {0, 0, 0};
  const int items = call.items_per_queue, lane = threadIdx.x % 32;
  ItemRange range;
  range.first = share.row * items + int(WorkShare::quotient(share.begin - share.row_begin, share.keys.rounds(keys)));
  long long begin = share.row_begin;
  for (int row = share.row;; row += 32) {
    const int rounds = row + lane < call.rows ? find_key_range(call, row + lane).rounds(keys) : 0;
    long long sum = (long long)rounds * items;
#pragma unroll
    for (int step = 1; step < 32; step *= 2) {
      const long long lower = __shfl_up_sync(~0u, sum, step);
      if (lane >= step) sum += lower;
    }
    sum += begin;
    const unsigned reached = __ballot_sync(~0u, sum >= share.end);
    if (reached != 0) {
      const int last = __ffs(reached) - 1;
      const long long row_begin = __shfl_sync(~0u, sum - (long long)rounds * items, last);
      const int row_rounds = __shfl_sync(~0u, rounds, last);
      const long long inside = share.end - row_begin, whole = WorkShare::quotient(inside, row_rounds);
      range.done = (row + last) * items + int(whole);
      range.end = range.done + (whole * row_rounds < inside);
      return range;
    }
    begin = __shfl_sync(~0u, sum, 31);
  }
}

constexpr int kRotatedSize = 128, kRotationTiles = 2, kRotationSteps = kRotatedSize / 16;

// A warp's operands of a rotation: two tiles of eight columns of a matrix [columns, 128] or, to rotate back, [128,
// columns]. A number of the matrix is the sum of two bfloat16, which leaves an error of 2^-17 of it. Lane t of four has
// numbers 4 t to 4 t + 3 of each step of 16.
struct RotationOperands {
  uint32_t high[kRotationTiles][kRotationSteps][2], low[kRotationTiles][kRotationSteps][2];

  template <bool Back>
  __device__ __forceinline__ void load(const float* matrix, int columns, int tile) {
    const int g = threadIdx.x % 32 / 4, t = threadIdx.x % 4;
#pragma unroll
    for (int n = 0; n < kRotationTiles * kRotationSteps; ++n) {
      const int column = (tile + n / kRotationSteps) * 8 + g, number = n % kRotationSteps * 16 + t * 4;
      float x[4];
      if constexpr (Back) {
#pragma unroll
        for (int i = 0; i < 4; ++i) x[i] = matrix[(number + i) * columns + column];
      } else {
        const float4 four = *reinterpret_cast<const float4*>(matrix + column * kRotatedSize + number);
        x[0] = four.x, x[1] = four.y, x[2] = four.z, x[3] = four.w;
      }
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        const uint32_t pair = Half<__nv_bfloat16>::pack(x[i * 2], x[i * 2 + 1]);
        high[n / kRotationSteps][n % kRotationSteps][i] = pair;
        low[n / kRotationSteps][n % kRotationSteps][i] = Half<__nv_bfloat16>::pack(
            x[i * 2] - __uint_as_float(pair << 16), x[i * 2 + 1] - __uint_as_float(pair & 0xffff0000));
      }
    }
  }

  // Multiplies the heads of items, rows of 128 bfloat16. Calls `store(item, head, row, column, pair)` with products of
  // neighbouring columns; rows of heads that do not exist are negative, and their products 0.
  template <typename Store>
  __device__ __forceinline__ void multiply(
      const PagedDecodeParams& call, int first, int end, const uint16_t* from, int tile, const Store& store) const {
    constexpr int kHeads = 8;
    const int g = threadIdx.x % 32 / 4, t = threadIdx.x % 4;
    const int heads = min(kHeads, call.heads_per_kv_head), items_per_product = 16 / heads;
    for (int item = first; item < end; item += items_per_product) {
      int rows[2];
#pragma unroll
      for (int n = 0; n < 2; ++n) {
        const int of_product = (g + n * 8) / heads, at = item + of_product, row = at / call.items_per_queue;
        const int in_row = (at - row * call.items_per_queue) * call.num_queues + blockIdx.x;
        const int kv_head = in_row / call.blocks_per_kv_head;
        const int head = (in_row - kv_head * call.blocks_per_kv_head) * kHeads + (g + n * 8) % heads;
        const bool is_valid = of_product < items_per_product && at < end && head < call.heads_per_kv_head;
        rows[n] = is_valid ? row * call.heads + kv_head * call.heads_per_kv_head + head : -1;
      }
      uint2 numbers[kRotationSteps][2];
#pragma unroll
      for (int n = 0; n < kRotationSteps * 2; ++n) {
        uint2& four = numbers[n / 2][n % 2];
        four = uint2{0, 0};
        if (rows[n % 2] < 0) continue;
        four = *reinterpret_cast<const uint2*>(from + size_t(rows[n % 2]) * kRotatedSize + n / 2 * 16 + t * 4);
      }
#pragma unroll
      for (int n = 0; n < kRotationTiles; ++n) {
        float sums[4] = {};
#pragma unroll
        for (int step = 0; step < kRotationSteps; ++step) {
          const uint32_t a[4] = {numbers[step][0].x, numbers[step][1].x, numbers[step][0].y, numbers[step][1].y};
          Half<__nv_bfloat16>::multiply(sums, a, low[n][step][0], low[n][step][1]);
          Half<__nv_bfloat16>::multiply(sums, a, high[n][step][0], high[n][step][1]);
        }
#pragma unroll
        for (int i = 0; i < 2; ++i) {
          const int of_product = (g + i * 8) / heads;
          if (of_product >= items_per_product || item + of_product >= end) continue;
          store(
              item + of_product, (g + i * 8) % heads, rows[i], (tile + n) * 8 + t * 2,
              Half<__nv_bfloat16>::pack(sums[i * 2], sums[i * 2 + 1]));
        }
      }
    }
  }
};

}  // namespace ejkernel::paged_decode
