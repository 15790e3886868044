// The parts of decoding's main loop: what a warp does with a tile of keys and values. `decode.cuh` puts them together.
//
//   copy_tile -> multiply_keys -> scale_scores -> weigh_tile -> sum_tile
#pragma once

#include <cmath>
#include <cstddef>

#include "cache_types.cuh"

namespace ejkernel {

constexpr int kHeads = 16;  // query heads a block
constexpr float kLog2e = 1.4426950408889634f;
constexpr float kLn2 = 0.6931471805599453f;
constexpr uint32_t kAbsent = ~0u;  // the offset of a key that is in no page

// From page to page, slot to slot and KV head to KV head, in pieces of 16 bytes.
struct Strides {
  uint32_t page, slot, head;
};

struct Decode {
  const void* query;            // [rows, heads, size]
  const unsigned char* keys;    // of `size` numbers, where `key_strides` says
  const unsigned char* values;  // of `value_size` numbers, likewise
  const int* tables;            // [sequences, columns], pages of a sequence; null where each has the page of its number
  const float* sinks;           // [sink rows, heads] or null
  void* output;                 // [rows, heads, value_size]
  float* lse;                   // [rows, heads]
  float* partial;               // [.., value_size], numerators relative to their segment's own maximum
  float* statistics;            // [.., 2], that maximum as a power of two, and the denominator
  Strides key_strides, value_strides;
  int rows, heads, kv_heads, size, value_size, rows_a_sink;
  int columns, page_size, pages;
  bool bfloat16;                // query and output, which otherwise are float16
  float scale, cap;             // cap is 0 for none
  float value_scale;
};

// What a block attends to at a time, and where its result goes.
struct Segment {
  int row, sequence;      // `sequence` is negative where the row belongs to none
  int first_head, count;  // query heads, all of one KV head
  int kv_head;
  int first, limit;       // keys
  float* partial;         // of the first head; null where the segment is all that the row attends to
  float* statistics;
};

// Warps, stages and shared memory of a padded head dimension: at most 96 KiB, which every chip has.
template <int Size, typename C>
struct Shape {
  // Two warps at 256 columns, where a warp's stages take 48 KiB. Warps of a block do not wait for each other, so three
  // stages of a warp are all that hides the latency of its copies.
  static constexpr int kWarps = Size == 256 ? 2 : 4;
  static constexpr int kStages = 3;
  // A tile has as many bytes whatever the cache's dtype: copies in flight are what memory bandwidth takes.
  static constexpr int kKeys = 32 / sizeof(C);
  static constexpr int kChunks = Size * sizeof(C) / 16;  // 16-byte pieces of a row
  static constexpr int kTileBytes = kKeys * kChunks * 16;
  static constexpr int kWarpBytes = kStages * 2 * kTileBytes;
  static constexpr int kBytes = kWarps * kWarpBytes;
  static constexpr int kRound = kWarps * kKeys;  // keys of one tile of each warp
  // Blocks that shared memory has room for on a multiprocessor of Hopper: registers must not leave room for fewer.
  static constexpr int kResident = Size == 64 ? 4 : 2;
  // Whether registers suffice to begin the next segment before one is merged: the others would spill.
  static constexpr bool kAhead = Size == 128;
};

// Swizzle: byte offset of a 16-byte piece in a tile. Pieces are permuted in a row so that eight rows touch all banks.
template <int Size, typename C>
__device__ __forceinline__ uint32_t piece(int row, int chunk) {
  // ldmatrix reads one piece of eight rows at a time. Rows are multiples of 128 bytes apart, or 64, so without the XOR
  // all eight, or every other one, would lie in the same four banks.
  constexpr int kChunks = Shape<Size, C>::kChunks;
  const int turn = kChunks >= 8 ? row & 7 : row >> 1 & 3;
  return (row * kChunks + (chunk ^ turn)) * 16;
}

// Starts copying a tile of one head. Lane l gives the offset of key l of the tile, in pieces; absent keys, and sizes past
// `chunks` pieces, become zeros.
template <int Size, typename C>
__device__ __forceinline__ void copy_tile(uint32_t to, const unsigned char* head, uint32_t offset, int chunks) {
  using S = Shape<Size, C>;
  constexpr int kRows = 32 / S::kChunks;
  const int lane = threadIdx.x % 32, row = lane / S::kChunks, chunk = lane % S::kChunks;
#pragma unroll
  for (int pass = 0; pass < S::kKeys / kRows; ++pass) {
    const uint32_t at = __shfl_sync(~0u, offset, row + pass * kRows);
    const bool there = chunk < chunks && at != kAbsent;
    // Neighbouring lanes copy neighbouring pieces of a row. A copy of 0 bytes reads nothing; its address is a valid one
    // all the same. Zeros, since an absent slot may hold NaN, and a weight of 0 times NaN would be NaN.
    copy_async(
        to + piece<Size, C>(row + pass * kRows, chunk), there ? head + (size_t(at) + chunk) * 16 : head,
        there ? 16 : 0);
  }
}

// A 16-bit number of the query, or of the output, whose dtype only eight-bit caches leave open.
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

// The segment's query heads as the left operand of a product, fragment by fragment, and what the scores of heads
// lane / 4 and lane / 4 + 8 are to be multiplied with.
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
      // The fragment of operand A of m16n8k16: two rows eight apart, two pairs of columns eight apart. Straight from
      // HBM: the block reads its queries once and keeps them in registers. Eight-bit keys come four columns a register:
      // both operands have the columns of a step in the same other order, which leaves the product as it is.
      const int head = lane / 4 + part % 2 * 8;
      const int column = step * 16 + (sizeof(C) == 1 ? lane % 4 * 4 + part / 2 * 2 : lane % 4 * 2 + part / 2 * 8);
      const bool there = head < segment.count && column < call.size;
      query[step][part] = there ? *reinterpret_cast<const uint32_t*>(heads + head * call.size + column) : 0;
    }
  }
  factors[0] = factors[1] = call.scale;
  if (sizeof(C) == 2 || !call.bfloat16) return;
  // bfloat16 as float16, which has more digits and fewer exponents: each head times the power of two that brings its
  // largest number to 2^14. Numbers 2^-28 times as large keep all their digits.
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
    // The biased exponent of the power, which stays a normal number as its inverse does. Of infinity it is small enough.
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

// Products of 16 heads and a tile's keys; [key / 8][(head, key), (head, key + 1), head + 8 twice].
template <int Size, typename C, int Eights>
__device__ __forceinline__ void multiply_keys(
    float (&scores)[Eights][4], const uint32_t (&query)[Size / 16][4], uint32_t tile) {
  using T = typename Cache<C>::Compute;
  // Lanes 8 i to 8 i + 7 address matrix i: keys 0 to 7 in two pieces, then keys 8 to 15. A key is a column of operand B,
  // whose registers run along k, so no transposition.
  const int lane = threadIdx.x % 32, row = lane / 16 * 8 + lane % 8, chunk = lane / 8 % 2;
#pragma unroll
  for (int eight = 0; eight < Eights; ++eight) {
#pragma unroll
    for (int n = 0; n < 4; ++n) scores[eight][n] = 0.f;
  }
  // Two pieces of a row: 16 columns, or 32.
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

// Scores as powers of two, from products.
template <int Eights>
__device__ __forceinline__ void scale_scores(float (&scores)[Eights][4], const float (&factors)[2], float cap) {
#pragma unroll
  for (int eight = 0; eight < Eights; ++eight) {
#pragma unroll
    for (int n = 0; n < 4; ++n) {
      // The same branch in all threads. Where exp 2x overflows to infinity, the quotient is 0 and tanh is 1.
      if (cap > 0.f) {  // tanh x = 1 - 2 / (exp 2x + 1)
        const float power = exp2_fast(2.f * kLog2e / cap * factors[n / 2] * scores[eight][n]);
        scores[eight][n] = kLog2e * cap * (1.f - __fdividef(2.f, power + 1.f));
      } else {
        scores[eight][n] *= kLog2e * factors[n / 2];
      }
    }
  }
}

// The online softmax of a warp's tiles so far, for heads lane / 4 and lane / 4 + 8.
template <int Size>
struct Softmax {
  float row_max[2] = {-INFINITY, -INFINITY};
  float row_sum[2] = {0.f, 0.f};  // of this lane's keys alone
  float acc[Size / 8][4] = {};
};

// One step of the online softmax: turns scores into weights, and rescales the accumulators where a row maximum rose.
// Bit k of `present` says whether the tile has key k. With `Parts` of 1 the segment has at most eight heads, and the
// weights of the others are zeros.
template <int Parts, int Size, int Eights>
__device__ __forceinline__ void weigh_tile(Softmax<Size>& softmax, float (&scores)[Eights][4], uint32_t present) {
  const int lane = threadIdx.x % 32;
  // Absent keys: copied as zeros, their scores are 0 and would count. The same branch in the warp; most tiles are full.
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
    // The keys of a row lie in four neighbouring lanes.
    row_max = fmaxf(row_max, __shfl_xor_sync(~0u, row_max, 1));
    row_max = fmaxf(row_max, __shfl_xor_sync(~0u, row_max, 2));
    // -INFINITY - -INFINITY would be NaN.
    const float shift = row_max == -INFINITY ? 0.f : row_max;
    alpha[part] = exp2_fast(softmax.row_max[part] - shift);
    rose |= row_max > softmax.row_max[part];
    softmax.row_max[part] = row_max;
    softmax.row_sum[part] *= alpha[part];
#pragma unroll
    for (int n = 0; n < Eights * 2; ++n) {
      float& score = scores[n / 2][part * 2 + n % 2];
      score = exp2_fast(score - shift);
      // Of this lane's keys: lanes are added once, behind the loop. Not rounded, unlike the weights that the product
      // takes.
      softmax.row_sum[part] += score;
    }
  }
#pragma unroll
  for (int n = 0; Parts == 1 && n < Eights * 2; ++n) scores[n / 2][2 + n % 2] = 0.f;
  // Lazy rescaling: row maxima seldom rise after the first tiles. One branch for the warp, whose lanes have to be
  // together at the next MMA.
  if (__any_sync(~0u, rose)) {
#pragma unroll
    for (int column = 0; column < Size / 8; ++column) {
#pragma unroll
      for (int n = 0; n < Parts * 2; ++n) softmax.acc[column][n] *= alpha[n / 2];
    }
  }
}

// Adds the values of a tile, weighted.
template <int Size, typename C, int Eights>
__device__ __forceinline__ void sum_tile(Softmax<Size>& softmax, const float (&weights)[Eights][4], uint32_t tile) {
  using T = typename Cache<C>::Compute;
  // Values are transposed on the way: a row in memory is a key, and the registers of operand B run along keys.
  const int lane = threadIdx.x % 32, row = lane % 16, chunk = lane / 16;
#pragma unroll
  for (int eight = 0; eight < Eights; eight += 2) {
    // The accumulator of the scores has, lane by lane, the layout of operand A: weights stay in their registers.
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
        // ldmatrix moves two columns at a time: a register has columns 2n and 2n + 1 of one key, then of the next. As
        // pairs of keys they are operands for the even and for the odd columns of the piece.
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
