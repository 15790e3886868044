// The steps of the main loop of decode attention: what a warp does with one tile of keys and values, for `decode.cuh`.
//
//   copy_tile -> multiply_keys -> scale_scores -> weigh_tile -> sum_tile
#pragma once

#include <cmath>
#include <cstddef>

#include "common/cache_types.cuh"

namespace ejkernel {

constexpr int kHeads = 16;  // query heads per block
constexpr float kLog2e = 1.4426950408889634f;
constexpr float kLn2 = 0.6931471805599453f;
constexpr uint32_t kAbsent = ~0u;  // the offset of a key that is on no page

// Strides between pages, slots and KV heads, in pieces of 16 bytes.
struct Strides {
  uint32_t page, slot, head;
};

struct Decode {
  const void* query;            // [rows, heads, size]
  const unsigned char* keys;    // with `size` elements per head and token, strides `key_strides`
  const unsigned char* values;  // with `value_size` elements per head and token, strides `value_strides`
  const int* tables;            // [sequences, columns], the pages of each sequence; null if sequence n has page n
  const float* sinks;           // [sink rows, heads] or null
  void* output;                 // [rows, heads, value_size]
  float* lse;                   // [rows, heads]
  float* partial;               // [.., value_size], unnormalised sums relative to their segment's maximum
  float* statistics;            // [.., 2], that maximum (in base 2), and the denominator
  Strides key_strides, value_strides;
  int rows, heads, kv_heads, size, value_size, rows_a_sink;
  int columns, page_size, pages;
  bool bfloat16;                // whether query and output are bfloat16, otherwise float16
  float scale, cap;             // cap is 0 without a soft cap
  float value_scale;
};

// The keys and query heads that a block attends to at a time, and where their result is stored.
struct Segment {
  int row, sequence;      // `sequence` is negative for a padding row
  int first_head, count;  // query heads, all of one group (KV head)
  int kv_head;
  int first, limit;       // keys
  float* partial;         // of the first head; null if the row has no other segments
  float* statistics;
};

// Warps, stages and shared memory for a padded head dimension: at most 96 KiB, which every supported chip has.
template <int Size, typename C>
struct Shape {
  // Two warps at 256 columns, where a warp's stages take 48 KiB. Warps do not wait for each other, so only the three
  // stages of a warp hide the latency of its copies.
  static constexpr int kWarps = Size == 256 ? 2 : 4;
  static constexpr int kStages = 3;
  // A tile has the same number of bytes for each dtype: memory bandwidth depends on the bytes in flight.
  static constexpr int kKeys = 32 / sizeof(C);
  static constexpr int kChunks = Size * sizeof(C) / 16;  // 16-byte pieces of a row
  static constexpr int kTileBytes = kKeys * kChunks * 16;
  static constexpr int kWarpBytes = kStages * 2 * kTileBytes;
  static constexpr int kBytes = kWarps * kWarpBytes;
  static constexpr int kRound = kWarps * kKeys;  // keys of one tile of each warp
  // Blocks per multiprocessor of Hopper by shared memory: the register limit must allow as many.
  static constexpr int kResident = Size == 64 ? 4 : 2;
  // Whether the next segment's copies start before the merge of this one: for other sizes registers would spill.
  static constexpr bool kAhead = Size == 128;
};

// Swizzle: byte offset of a 16-byte piece in a tile. Each row's pieces are permuted, so that eight rows touch all
// banks.
template <int Size, typename C>
__device__ __forceinline__ uint32_t piece(int row, int chunk) {
  // ldmatrix reads the same piece of eight rows at a time. Rows are a multiple of 128 bytes, or 64 bytes, apart:
  // without the XOR all eight, or every other one, would be in the same four banks.
  constexpr int kChunks = Shape<Size, C>::kChunks;
  const int turn = kChunks >= 8 ? row & 7 : row >> 1 & 3;
  return (row * kChunks + (chunk ^ turn)) * 16;
}

// Starts copying a tile of one head. Lane l passes the offset of key l of the tile, in pieces; missing keys, and
// columns past `chunks` pieces, become zeros.
template <int Size, typename C>
__device__ __forceinline__ void copy_tile(uint32_t to, const unsigned char* head, uint32_t offset, int chunks) {
  using S = Shape<Size, C>;
  constexpr int kRows = 32 / S::kChunks;
  const int lane = threadIdx.x % 32, row = lane / S::kChunks, chunk = lane % S::kChunks;
#pragma unroll
  for (int pass = 0; pass < S::kKeys / kRows; ++pass) {
    const uint32_t at = __shfl_sync(~0u, offset, row + pass * kRows);
    const bool there = chunk < chunks && at != kAbsent;
    // Neighbouring lanes copy neighbouring pieces of a row. A copy of 0 bytes reads nothing, but needs a valid address.
    // Missing keys become zeros, since their slots may hold NaN, and 0 times NaN is NaN.
    copy_async(
        to + piece<Size, C>(row + pass * kRows, chunk), there ? head + (size_t(at) + chunk) * 16 : head,
        there ? 16 : 0);
  }
}

// A 16-bit element of query or output as float32. The dtype is a runtime value, since an 8-bit cache does not imply it.
__device__ __forceinline__ float as_float(const Decode& call, uint32_t bits) {
  return call.bfloat16 ? __uint_as_float(bits << 16) : __half2float(__ushort_as_half(bits));
}

__device__ __forceinline__ void store_output(const Decode& call, size_t at, float x) {
  if (call.bfloat16) {
    static_cast<__nv_bfloat16*>(call.output)[at] = __float2bfloat16_rn(x);
  } else {
    static_cast<__half*>(call.output)[at] = __float2half_rn(x);
  }
}

// Loads the segment's query heads as the left operand's fragments, and the factors that turn the products of heads lane
// / 4 and lane / 4 + 8 into scores.
template <int Size, typename C>
__device__ __forceinline__ void load_query(
    uint32_t (&query)[Size / 16][4], float (&factors)[2], const Decode& call, const Segment& segment) {
  const int lane = threadIdx.x % 32;
  const uint16_t* heads = static_cast<const uint16_t*>(call.query) +
                          (size_t(segment.row) * call.heads + segment.first_head) * call.size;
#pragma unroll
  for (int step = 0; step < Size / 16; ++step) {
#pragma unroll
    for (int part = 0; part < 4; ++part) {
      // The fragment of operand A of m16n8k16: two rows eight apart, two pairs of columns eight apart, loaded from HBM:
      // the block reads its queries once and keeps them in registers. With 8-bit keys a register has four columns: both
      // operands then permute the columns of a step in the same way, which does not change the product.
      const int head = lane / 4 + part % 2 * 8;
      const int column = step * 16 + (sizeof(C) == 1 ? lane % 4 * 4 + part / 2 * 2 : lane % 4 * 2 + part / 2 * 8);
      const bool there = head < segment.count && column < call.size;
      query[step][part] = there ? *reinterpret_cast<const uint32_t*>(heads + head * call.size + column) : 0;
    }
  }
  factors[0] = factors[1] = call.scale;
  if (sizeof(C) == 2 || !call.bfloat16) return;
  // Converts bfloat16 to float16, which has more digits and a smaller range: each head is scaled by the power of two
  // that brings its largest element to 2^14. Elements down to 2^-28 of the largest keep all their digits.
  float largest[2] = {0.f, 0.f};
#pragma unroll
  for (int step = 0; step < Size / 16; ++step) {
#pragma unroll
    for (int part = 0; part < 4; ++part) {
      const uint32_t pair = query[step][part];
      const float numbers = fmaxf(fabsf(as_float(call, pair & 0xffff)), fabsf(as_float(call, pair >> 16)));
      largest[part % 2] = fmaxf(largest[part % 2], numbers);
    }
  }
  float powers[2];
#pragma unroll
  for (int part = 0; part < 2; ++part) {
    largest[part] = fmaxf(largest[part], __shfl_xor_sync(~0u, largest[part], 1));
    largest[part] = fmaxf(largest[part], __shfl_xor_sync(~0u, largest[part], 2));
    // The power's biased exponent, clamped so that the power and its inverse are normal. For infinity the clamp gives
    // 1.
    const int exponent = min(max(127 + 14 - (int(__float_as_uint(largest[part]) >> 23) - 127), 1), 253);
    powers[part] = __uint_as_float(exponent << 23);
    factors[part] *= __uint_as_float((254 - exponent) << 23);
  }
#pragma unroll
  for (int step = 0; step < Size / 16; ++step) {
#pragma unroll
    for (int part = 0; part < 4; ++part) {
      const uint32_t pair = query[step][part];
      query[step][part] = Half<__half>::pack(
          as_float(call, pair & 0xffff) * powers[part % 2], as_float(call, pair >> 16) * powers[part % 2]);
    }
  }
}

// Multiplies 16 query heads with a tile's keys: [key / 8][(head, key), (head, key + 1), head + 8 twice].
template <int Size, typename C, int Eights>
__device__ __forceinline__ void multiply_keys(
    float (&scores)[Eights][4], const uint32_t (&query)[Size / 16][4], uint32_t tile) {
  using T = typename Cache<C>::Compute;
  // ldmatrix: lanes 8 i to 8 i + 7 address matrix i, with keys 0 to 7 in two pieces, then keys 8 to 15. A key is a
  // column of operand B, whose registers run along k, so it is not transposed.
  const int lane = threadIdx.x % 32, row = lane / 16 * 8 + lane % 8, chunk = lane / 8 % 2;
#pragma unroll
  for (int eight = 0; eight < Eights; ++eight) {
#pragma unroll
    for (int n = 0; n < 4; ++n) scores[eight][n] = 0.f;
  }
  // Two pieces of a row: 16 columns, or 32 of 8 bits.
#pragma unroll
  for (int step = 0; step < Shape<Size, C>::kChunks / 2; ++step) {
#pragma unroll
    for (int eight = 0; eight < Eights; eight += 2) {
      uint32_t keys[4];
      load_matrices(keys, tile + piece<Size, C>(eight * 8 + row, step * 2 + chunk));
      if constexpr (sizeof(C) == 2) {
        Half<T>::multiply(scores[eight], query[step], keys[0], keys[1]);
        Half<T>::multiply(scores[eight + 1], query[step], keys[2], keys[3]);
      } else {
#pragma unroll
        for (int n = 0; n < 4; ++n) {
          uint32_t wide[2];
          Cache<C>::template widen<false>(wide, keys[n]);
          Half<T>::multiply(scores[eight + n / 2], query[step * 2 + n % 2], wide[0], wide[1]);
        }
      }
    }
  }
}

// Turns products into scores, in base 2.
template <int Eights>
__device__ __forceinline__ void scale_scores(float (&scores)[Eights][4], const float (&factors)[2], float cap) {
#pragma unroll
  for (int eight = 0; eight < Eights; ++eight) {
#pragma unroll
    for (int n = 0; n < 4; ++n) {
      // All threads take the same branch. If exp 2x overflows to infinity, the division gives 0 and tanh 1.
      if (cap > 0.f) {  // tanh x = 1 - 2 / (exp 2x + 1)
        const float power = exp2_fast(2.f * kLog2e / cap * factors[n / 2] * scores[eight][n]);
        scores[eight][n] = kLog2e * cap * (1.f - __fdividef(2.f, power + 1.f));
      } else {
        scores[eight][n] *= kLog2e * factors[n / 2];
      }
    }
  }
}

// The state of the online softmax over a warp's tiles, for heads lane / 4 and lane / 4 + 8.
template <int Size>
struct Softmax {
  float row_max[2] = {-INFINITY, -INFINITY};
  float row_sum[2] = {0.f, 0.f};  // of this lane's keys only
  float acc[Size / 8][4] = {};
};

// One step of the online softmax: replaces scores by weights, and rescales the accumulators if a row maximum increased.
// Bit k of `present` says whether key k of the tile exists. With `Parts` = 1 the segment has at most eight heads, and
// the weights of the other eight rows are zeros.
template <int Parts, int Size, int Eights>
__device__ __forceinline__ void weigh_tile(Softmax<Size>& softmax, float (&scores)[Eights][4], uint32_t present) {
  const int lane = threadIdx.x % 32;
  // Missing keys were copied as zeros, and their scores of 0 would count. Uniform in the warp; most tiles are full.
  if (present != ~0u >> (32 - Eights * 8)) {
    const uint32_t own = present >> (lane % 4 * 2);
#pragma unroll
    for (int n = 0; n < Eights * 4; ++n) {
      if (!(own >> (n / 4 * 8 + n % 2) & 1)) scores[n / 4][n % 4] = -INFINITY;
    }
  }
  float alpha[2] = {1.f, 1.f};
  bool rose = false;
#pragma unroll
  for (int part = 0; part < Parts; ++part) {
    float row_max = softmax.row_max[part];
#pragma unroll
    for (int n = 0; n < Eights * 2; ++n) row_max = fmaxf(row_max, scores[n / 2][part * 2 + n % 2]);
    // The keys of a row are in four neighbouring lanes.
    row_max = fmaxf(row_max, __shfl_xor_sync(~0u, row_max, 1));
    row_max = fmaxf(row_max, __shfl_xor_sync(~0u, row_max, 2));
    // Avoids -INFINITY - -INFINITY, which is NaN.
    const float shift = row_max == -INFINITY ? 0.f : row_max;
    alpha[part] = exp2_fast(softmax.row_max[part] - shift);
    rose |= row_max > softmax.row_max[part];
    softmax.row_max[part] = row_max;
    softmax.row_sum[part] *= alpha[part];
#pragma unroll
    for (int n = 0; n < Eights * 2; ++n) {
      float& score = scores[n / 2][part * 2 + n % 2];
      score = exp2_fast(score - shift);
      // Of this lane's keys only: the sum over lanes follows the main loop. The weights are summed before they are
      // rounded to the product's dtype.
      softmax.row_sum[part] += score;
    }
  }
#pragma unroll
  for (int n = 0; Parts == 1 && n < Eights * 2; ++n) scores[n / 2][2 + n % 2] = 0.f;
  // Lazy rescaling: row maxima seldom increase after the first tiles. The branch is uniform in the warp, whose lanes
  // must have converged at the next MMA.
  if (__any_sync(~0u, rose)) {
#pragma unroll
    for (int column = 0; column < Size / 8; ++column) {
#pragma unroll
      for (int n = 0; n < Parts * 2; ++n) softmax.acc[column][n] *= alpha[n / 2];
    }
  }
}

// Adds the weighted values of a tile to the accumulators.
template <int Size, typename C, int Eights>
__device__ __forceinline__ void sum_tile(Softmax<Size>& softmax, const float (&weights)[Eights][4], uint32_t tile) {
  using T = typename Cache<C>::Compute;
  // ldmatrix transposes the values: a row in memory is a key, and the registers of operand B run along keys.
  const int lane = threadIdx.x % 32, row = lane % 16, chunk = lane / 16;
#pragma unroll
  for (int eight = 0; eight < Eights; eight += 2) {
    // The accumulators of the scores have the layout of operand A, so the weights stay in their registers.
    const uint32_t left[4] = {
        Half<T>::pack(weights[eight][0], weights[eight][1]), Half<T>::pack(weights[eight][2], weights[eight][3]),
        Half<T>::pack(weights[eight + 1][0], weights[eight + 1][1]),
        Half<T>::pack(weights[eight + 1][2], weights[eight + 1][3])};
#pragma unroll
    for (int step = 0; step < Shape<Size, C>::kChunks / 2; ++step) {
      uint32_t values[4];
      load_matrices_transposed(values, tile + piece<Size, C>(eight * 8 + row, step * 2 + chunk));
      if constexpr (sizeof(C) == 2) {
        Half<T>::multiply(softmax.acc[step * 2], left, values[0], values[1]);
        Half<T>::multiply(softmax.acc[step * 2 + 1], left, values[2], values[3]);
      } else {
        // ldmatrix moves two columns at a time: a register has columns 2n and 2n + 1 of one key, the next one those of
        // the next key. Repacked as pairs of keys they are operands for the piece's even and odd columns.
#pragma unroll
        for (int n = 0; n < 2; ++n) {
          uint32_t first[2], second[2];
          Cache<C>::template widen<true>(first, values[n * 2]);
          Cache<C>::template widen<true>(second, values[n * 2 + 1]);
          float(&even)[4] = softmax.acc[(step * 2 + n) * 2];
          float(&odd)[4] = softmax.acc[(step * 2 + n) * 2 + 1];
          Half<T>::multiply(even, left, first[0], second[0]);
          Half<T>::multiply(odd, left, first[1], second[1]);
        }
      }
    }
  }
}

}  // namespace ejkernel
