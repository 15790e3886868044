// The quantised matmul's layout of `transpose=False`, for up to 8 rows of x: a row of words is one contracted element,
// and a group is of neighbouring columns.
#pragma once

#include "quantized_matmul/call.cuh"

namespace ejkernel::quantized_matmul {

// A scale applies to one contracted element and to a warp's 64 columns, so it is multiplied into x:
//
//   y = sum_k (x s)(16 + q) - sum_k (x s)(16 + zero)      x s rounded to bfloat16, the same in both sums
//
// The second sum is a product with three more columns: 16, and the upper and lower digits of the zero, each exact in
// bfloat16. Weights are the MMA's left operand. Code j of the word of lane group g is column 8g + j:
//
//   left operand j         row g: column 8g + j    row g + 8: column 8g + j + 4    k = 8t to 8t + 7 of lane t
//   left operand of zeros  rows 0 and 8: 16        row 1: upper digits, row 9: lower digits; other rows are not read
//
// Warps have neighbouring columns and share a ring, so that whole rows of a tile are copied. A stage has 32 rows of
// words, with their x and scales.
template <int Tiles>
struct RowsFirst {
  static constexpr int kRows = 8 * Tiles, kWarpColumns = 64, kTile = kWarpColumns * kWarps;
  static constexpr bool kResident = false;
  static constexpr int kStep = 32, kGroups = kTile / kGroup;
  static constexpr int kWarpBytes = 1024 + 32;  // of a warp's words, padded so that warps start in different banks
  static constexpr int kXAt = kWarps * kWarpBytes, kScalesAt = kXAt + kRows * 2 * kStep;
  static constexpr int kScaleBytes = kStep * kGroups * 2;  // of scales; as many follow for the zeros
  static constexpr int kStageBytes = kScalesAt + 2 * kScaleBytes;
  // A warp's digits of a stage: upper, then lower ones of the scales; those of the zeros, for two k interleaved; at last
  // row 0 of 16s.
  static constexpr int kLowerAt = 2 * kStep, kZerosAt = 4 * kStep, kDigitBytes = 8 * kStep;
  static constexpr int kOffsetsAt = kWarps * kDigitBytes;
  static constexpr int kRingAt = kOffsetsAt + 128, kStages = 4, kSteps = 1 << 30;
  static constexpr int kBytes = kRingAt + kStages * kStageBytes;

  const QuantizedCall& call;
  const Place<kRows, kTile>& at;
  float sums[4][Tiles][4] = {};
  float zero_sums[Tiles][4] = {};
  // This thread's source addresses for the next stage: two copies of words, and one of x or (where aligned) of scales.
  const uint32_t* words;
  const char* other;
  int other_step, words_k, other_k;
  uint32_t words_to, other_to;
  bool copies, others, aligned;

  __device__ __forceinline__ RowsFirst(const QuantizedCall& c, const Place<kRows, kTile>& p, char* shared)
      : call(c), at(p) {
    // Row 8t + i of a stage is stored at row 4i + t, so that reads of one row per lane are in different banks.
    constexpr int kPieces = kTile / 32;  // of 16 bytes in a row
    const int row = threadIdx.x / kPieces, piece = threadIdx.x % kPieces, word = at.first_n / 8 + piece * 4;
    copies = word < call.row_words;
    words_k = at.first_k + row;
    words = call.words + int64_t(words_k) * call.row_words + word;
    words_to = piece / 2 * kWarpBytes + (row % 8 * 4 + row / 8) * 32 + piece % 2 * 16;
    aligned = call.row_groups % kGroups == 0;
    place_other();
    if (threadIdx.x < 32) reinterpret_cast<uint32_t*>(shared + kOffsetsAt)[threadIdx.x] = kOffsets;
  }

  // The first threads copy scales and zeros, the last ones x.
  __device__ __forceinline__ void place_other() {
    const int kind = threadIdx.x / kStep, piece = kThreads - 1 - threadIdx.x;
    if (kind < 2) {
      other_k = at.first_k + threadIdx.x % kStep;
      other = reinterpret_cast<const char*>(
          (kind ? call.zeros : call.scales) + int64_t(other_k) * call.row_groups + at.first_n / kGroup);
      other_step = kStep * call.row_groups * 2;
      other_to = kScalesAt + threadIdx.x * 16;
      others = aligned;
    } else {
      other_k = at.first_k + piece % 4 * 8;
      other = reinterpret_cast<const char*>(call.x + int64_t(at.first_m + piece / 4) * call.k + other_k);
      other_step = kStep * 2;
      other_to = kXAt + piece * 16;
      others = piece / 4 < at.rows;
    }
  }

  // Starts the copies of the next stage. Words out of bounds are not copied: any bits are finite codes, which are
  // multiplied with an x of 0 or belong to columns that are not stored. The same holds for rows of x past the last.
  __device__ __forceinline__ void copy(uint32_t stage) {
    constexpr int kPassRows = kStep / 2;
    const uint32_t to = stage + words_to;
    if (copies && words_k < at.last_k) copy_async(to, words, 16);
    if (copies && words_k + kPassRows < at.last_k) {
      copy_async(to + 64, words + int64_t(kPassRows) * call.row_words, 16);
    }
    words += int64_t(kStep) * call.row_words;
    words_k += kStep;
    if (!aligned) copy_pairs(stage + kScalesAt);
    const bool inside = other_k < at.last_k;
    if (others) copy_async(stage + other_to, inside ? static_cast<const void*>(other) : call.x, inside ? 16 : 0);
    other += other_step;
    other_k += kStep;
  }

  // Copies the scales or zeros of two groups, if their rows are not aligned. Out of bounds they are 0.
  __device__ __forceinline__ void copy_pairs(uint32_t to) const {
    const int first = words_k - kStep - int(threadIdx.x) / (kTile / 32);  // k of the stage
    const int k = first + threadIdx.x % (4 * kStep) / 4, group = at.first_n / kGroup + threadIdx.x % 4 * 2;
    const uint16_t* from = threadIdx.x / (4 * kStep) ? call.zeros : call.scales;
    const bool inside = k < at.last_k && group < call.row_groups;
    if (inside) from += int64_t(k) * call.row_groups + group;
    copy_word_async(to + threadIdx.x * 4, from, inside ? 4 : 0);
  }

  // Splits a warp's scales and zeros into digits: one k per lane. A float16 is the sum of two bfloat16, since it has 11
  // significant bits and bfloat16 has 8.
  __device__ __forceinline__ void split_scales(char* digits, const char* stage) const {
    const char* own = stage + kScalesAt + at.lane * kGroups * 2 + at.warp * 2;
    const float scale = half_bits_to_float(*reinterpret_cast<const uint16_t*>(own));
    const float zero = half_bits_to_float(*reinterpret_cast<const uint16_t*>(own + kScaleBytes));
    const uint32_t upper = Half<__nv_bfloat16>::pack(scale, zero);
    const uint32_t lower =
        Half<__nv_bfloat16>::pack(scale - __uint_as_float(upper << 16), zero - __uint_as_float(upper & 0xFFFF0000));
    uint16_t* scales = reinterpret_cast<uint16_t*>(digits) + at.lane;
    scales[0] = upper;
    scales[kLowerAt / 2] = lower;
    uint16_t* zeros = reinterpret_cast<uint16_t*>(digits + kZerosAt) + at.lane / 2 * 4 + at.lane % 2;
    zeros[0] = upper >> 16;
    zeros[2] = lower >> 16;
    __syncwarp();
  }

  // x times the scale as the sum of two bfloat16, with a relative error of 2^-18.
  __device__ __forceinline__ static uint32_t scaled(uint32_t x, uint32_t upper, uint32_t lower) {
    const auto two = [](uint32_t bits) { return *reinterpret_cast<const __nv_bfloat162*>(&bits); };
    const __nv_bfloat162 product = __hfma2(two(x), two(upper), __hmul2(two(x), two(lower)));
    return *reinterpret_cast<const uint32_t*>(&product);
  }

  __device__ __forceinline__ void multiply(char* shared, const char* stage, int) {
    const int g = at.lane / 4, t = at.lane % 4;
    char* const digits = shared + at.warp * kDigitBytes;
    split_scales(digits, stage);
    const char* zeros = g ? digits + kZerosAt + t * 32 : shared + kOffsetsAt;
    const uint32_t* own_words = reinterpret_cast<const uint32_t*>(stage + at.warp * kWarpBytes) + t * 8 + g;
    const uint4 upper = *reinterpret_cast<const uint4*>(digits + t * 16);
    const uint4 lower = *reinterpret_cast<const uint4*>(digits + kLowerAt + t * 16);
    uint4 x[Tiles];
#pragma unroll
    for (int tile = 0; tile < Tiles; ++tile) {
      x[tile] = *reinterpret_cast<const uint4*>(stage + kXAt + (tile * 8 + g) * 64 + t * 16);
    }
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const uint32_t w0 = own_words[half * 128], w1 = own_words[half * 128 + 32];
      const uint32_t w2 = own_words[half * 128 + 64], w3 = own_words[half * 128 + 96];
      const uint4 zero = *reinterpret_cast<const uint4*>(zeros + half * 16);
      const uint32_t zero_digits[4] = {zero.x, zero.y, zero.z, zero.w};
      // The codes of columns 8g to 8g + 3, and 8g + 4 to 8g + 7, of two k each.
      const uint32_t a = __byte_perm(w0, w1, 0x5410), b = __byte_perm(w0, w1, 0x7632);
      const uint32_t c = __byte_perm(w2, w3, 0x5410), d = __byte_perm(w2, w3, 0x7632);
      const uint32_t codes[4][4] = {{codes_on_16<0>(a), codes_on_16<0>(b), codes_on_16<0>(c), codes_on_16<0>(d)},
                                    {codes_on_16<1>(a), codes_on_16<1>(b), codes_on_16<1>(c), codes_on_16<1>(d)},
                                    {codes_on_16<2>(a), codes_on_16<2>(b), codes_on_16<2>(c), codes_on_16<2>(d)},
                                    {codes_on_16<3>(a), codes_on_16<3>(b), codes_on_16<3>(c), codes_on_16<3>(d)}};
#pragma unroll
      for (int tile = 0; tile < Tiles; ++tile) {
        const uint32_t x0 = half ? scaled(x[tile].z, upper.z, lower.z) : scaled(x[tile].x, upper.x, lower.x);
        const uint32_t x1 = half ? scaled(x[tile].w, upper.w, lower.w) : scaled(x[tile].y, upper.y, lower.y);
#pragma unroll
        for (int j = 0; j < 4; ++j) Half<__nv_bfloat16>::multiply(sums[j][tile], codes[j], x0, x1);
        Half<__nv_bfloat16>::multiply(zero_sums[tile], zero_digits, x0, x1);
      }
    }
  }

  // Stores a warp's partial sums [rows, columns] in shared memory.
  __device__ __forceinline__ void store_sums(float* partial, int width) {
    const int g = at.lane / 4, t = at.lane % 4;
    partial += at.warp * kWarpColumns + 8 * g;
#pragma unroll
    for (int tile = 0; tile < Tiles; ++tile) {
#pragma unroll
      for (int c = 0; c < 2; ++c) {
        const float upper = zero_sums[tile][c], lower = zero_sums[tile][c + 2];
        const float zero =
            __shfl_sync(~0u, upper, t) + __shfl_sync(~0u, upper, 4 + t) + __shfl_sync(~0u, lower, 4 + t);
        float4* to = reinterpret_cast<float4*>(partial + (tile * 8 + 2 * t + c) * width);
        to[0] = {sums[0][tile][c] - zero, sums[1][tile][c] - zero, sums[2][tile][c] - zero, sums[3][tile][c] - zero};
        to[1] = {sums[0][tile][c + 2] - zero, sums[1][tile][c + 2] - zero, sums[2][tile][c + 2] - zero,
                 sums[3][tile][c + 2] - zero};
      }
    }
  }
};

}  // namespace ejkernel::quantized_matmul
