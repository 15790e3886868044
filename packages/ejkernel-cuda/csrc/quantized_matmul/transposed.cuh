// The quantised matmul's layout of `transpose=True`: a row of words is one column of the output, a group is a run of
// its codes.
#pragma once

#include "quantized_matmul/call.cuh"

namespace ejkernel::quantized_matmul {

// The scale is multiplied with the sum over its group:
//
//   y = sum over groups of  s (sum_k x (128 + q) - (128 + zero) sum_k x)      the last sum is the same for all columns
//
// Weights are the MMA's left operand. Codes j and j + 4 of a word share a register, so x is permuted to the order 0 4 1
// 5 2 6 3 7. A stage has 32 columns per warp, with 64 bytes (two groups) of each.
template <int Tiles>
struct Transposed {
  static constexpr int kRows = 8 * Tiles, kWarpColumns = 32, kTile = kWarpColumns * kWarps;
  // Contracted elements whose x and scales are resident in shared memory.
  static constexpr int kChunk = Tiles > 4 ? 256 : Tiles > 2 ? 512 : 1024;
  static constexpr bool kResident = true;
  static constexpr int kStep = 128, kWarpBytes = 2048, kStageBytes = kWarps * kWarpBytes;
  static constexpr int kRowBytes = 2 * kChunk + 16;  // row stride of x, so that two rows are in different banks
  static constexpr int kGroups = kChunk / kGroup;
  static constexpr int kFactorBytes = 4 * (kGroups + 2);  // of a column: scale and zero of each group, and padding
  static constexpr int kFactorsAt = kRows * kRowBytes, kRowSumsAt = kFactorsAt + kTile * kFactorBytes;
  static constexpr int kRingAt = kRowSumsAt + kGroups * kRows * 8;
  static constexpr int kStages = Tiles == 2 ? 2 : 3, kSteps = kChunk / kStep;  // chosen by measurement
  static constexpr int kBytes = kRingAt + kStages * kStageBytes;

  const QuantizedCall& call;
  const Place<kRows, kTile>& at;
  float sums[2][Tiles][4] = {};
  const uint32_t* from;
  int copied_k;  // the contracted element of this lane's copies of the next stage
  int limit;     // the end of the rows that this lane copies
  uint32_t copied_to;

  __device__ __forceinline__ Transposed(const QuantizedCall& c, const Place<kRows, kTile>& p, char*) : call(c), at(p) {
    const int row = at.lane / 4, piece = at.lane % 4;
    const int column = at.first_n + at.warp * kWarpColumns + row;
    copied_k = at.first_k + piece * 32;
    limit = call.n - column;
    from = call.words + int64_t(column) * call.row_words + copied_k / 8;
    // Rows 2 and 3 of every four swap their two groups, so that four rows of a group are in different banks.
    copied_to = at.warp * kWarpBytes + row * 64 + (piece ^ (row & 2)) * 16;
  }

  // Starts the copies of the next stage. Words out of bounds are not copied: any bits are finite codes, which are
  // multiplied with an x of 0 or belong to columns that are not stored.
  __device__ __forceinline__ void copy(uint32_t stage) {
#pragma unroll
    for (int pass = 0; pass < 4; ++pass) {
      if (copied_k < at.last_k && pass * 8 < limit) {
        copy_async(stage + copied_to + pass * 512, from + int64_t(pass * 8) * call.row_words, 16);
      }
    }
    from += kStep / 8;
    copied_k += kStep;
  }

  // A chunk's x, its sums over groups, and its scales. All loads are issued at once, to pay for one latency.
  struct Chunk {
    static constexpr int kFours = kGroups / 4, kCount = kTile * kFours / kThreads;
    XPieces<kRows, kChunk> x;
    uint2 scales[kCount], zeros[kCount];  // of four groups each

    __device__ __forceinline__ Chunk(const QuantizedCall& call, const Place<kRows, kTile>& at, int first)
        : x(call, at, first) {
      const bool wide = call.log_group == 6 && call.row_groups % 4 == 0;
      const int k = first + threadIdx.x % kFours * 4 * kGroup;
#pragma unroll
      for (int i = 0; i < kCount; ++i) {
        const int column = at.first_n + (threadIdx.x + i * kThreads) / kFours;
        const int64_t row = int64_t(column) * call.row_groups;
        const int limit = column < call.n ? at.last_k : 0;
        scales[i] = load(call, call.scales + row, k, limit, wide);
        zeros[i] = load(call, call.zeros + row, k, limit, wide);
      }
    }

    // The float16 scales of four groups, from element k on. Out of bounds they are 0.
    __device__ __forceinline__ static uint2 load(
        const QuantizedCall& call, const uint16_t* row, int k, int limit, bool wide) {
      if (wide) return k < limit ? *reinterpret_cast<const uint2*>(row + k / kGroup) : uint2{0, 0};
      uint32_t found[2] = {};
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const int own = k + i * kGroup;
        if (own < limit) found[i / 2] |= uint32_t(row[own >> call.log_group]) << i % 2 * 16;
      }
      return {found[0], found[1]};
    }

    __device__ __forceinline__ void store(char* shared) const {
#pragma unroll
      for (int i = 0; i < kCount; ++i) {
        const int column = (threadIdx.x + i * kThreads) / kFours, group = threadIdx.x % kFours * 4;
        uint2* to = reinterpret_cast<uint2*>(shared + kFactorsAt + column * kFactorBytes + group * 4);
        to[0] = {__byte_perm(scales[i].x, zeros[i].x, 0x5410), __byte_perm(scales[i].x, zeros[i].x, 0x7632)};
        to[1] = {__byte_perm(scales[i].y, zeros[i].y, 0x5410), __byte_perm(scales[i].y, zeros[i].y, 0x7632)};
      }
      x.store([&](int row, int piece, const uint4& eight) {
        *reinterpret_cast<uint4*>(shared + row * kRowBytes + piece * 16) = {
            __byte_perm(eight.x, eight.z, 0x5410), __byte_perm(eight.x, eight.z, 0x7632),
            __byte_perm(eight.y, eight.w, 0x5410), __byte_perm(eight.y, eight.w, 0x7632)};
        // Eight lanes share a group, and all lanes of a warp a row.
        float sum = pair_sum(eight.x) + pair_sum(eight.y) + pair_sum(eight.z) + pair_sum(eight.w);
        sum += __shfl_xor_sync(~0u, sum, 1);
        sum += __shfl_xor_sync(~0u, sum, 2);
        sum += __shfl_xor_sync(~0u, sum, 4);
        float2* const sums = reinterpret_cast<float2*>(shared + kRowSumsAt) + piece / 8 * kRows + row;
        if (piece % 8 == 0) *sums = {sum, -128.0f * sum};
      });
    }
  };

  __device__ __forceinline__ static float pair_sum(uint32_t pair) {
    return __uint_as_float(pair << 16) + __uint_as_float(pair & 0xFFFF0000);
  }

  __device__ __forceinline__ void multiply(const char* shared, const char* stage, int step) {
    const int g = at.lane / 4, t = at.lane % 4;
    const char* x_row = shared + g * kRowBytes + step * kStep * 2 + t * 32;
    const char* factors = shared + kFactorsAt + (at.warp * kWarpColumns + g) * kFactorBytes + step * 8;
    const float2* row_sums = reinterpret_cast<const float2*>(shared + kRowSumsAt) + step * 2 * kRows + 2 * t;
    const char* words = stage + at.warp * kWarpBytes + g * 64 + t % 2 * 8;
    uint2 stored[4];  // scale and zero of two groups, for each of this lane's rows of words
#pragma unroll
    for (int r = 0; r < 4; ++r) stored[r] = *reinterpret_cast<const uint2*>(factors + r * 8 * kFactorBytes);
#pragma unroll
    for (int group = 0; group < 2; ++group) {
      uint2 own[4];
      float scale[4], zero[4];
#pragma unroll
      for (int r = 0; r < 4; ++r) {
        own[r] = *reinterpret_cast<const uint2*>(words + r * 512 + ((group * 2 + t / 2) ^ (g & 2)) * 16);
        const uint32_t both = group ? stored[r].y : stored[r].x;
        scale[r] = half_bits_to_float(both & 0xFFFF);
        zero[r] = -half_bits_to_float(both >> 16);
      }
      // Both words of a group are decoded once; the sums of a group are kept for one tile of rows at a time.
      uint32_t codes[2][4][4];
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        decode(codes[i], own[2 * i].x, own[2 * i + 1].x, 0);
        decode(codes[i], own[2 * i].y, own[2 * i + 1].y, 2);
      }
#pragma unroll
      for (int tile = 0; tile < Tiles; ++tile) {
        // Sums of x of two rows, times the -128 that cancels the offset of the decoded codes.
        const float4 sum = *reinterpret_cast<const float4*>(row_sums + group * kRows + tile * 8);
        const char* x_at = x_row + tile * 8 * kRowBytes + group * 128;
        const uint4 x0 = *reinterpret_cast<const uint4*>(x_at), x1 = *reinterpret_cast<const uint4*>(x_at + 16);
#pragma unroll
        for (int i = 0; i < 2; ++i) {
          float part[4];
          part[0] = fmaf(zero[2 * i], sum.x, sum.y);
          part[1] = fmaf(zero[2 * i], sum.z, sum.w);
          part[2] = fmaf(zero[2 * i + 1], sum.x, sum.y);
          part[3] = fmaf(zero[2 * i + 1], sum.z, sum.w);
          Half<__nv_bfloat16>::multiply(part, codes[i][0], x0.x, x0.y);
          Half<__nv_bfloat16>::multiply(part, codes[i][1], x0.z, x0.w);
          Half<__nv_bfloat16>::multiply(part, codes[i][2], x1.x, x1.y);
          Half<__nv_bfloat16>::multiply(part, codes[i][3], x1.z, x1.w);
#pragma unroll
          for (int c = 0; c < 4; ++c) sums[i][tile][c] = fmaf(scale[2 * i + c / 2], part[c], sums[i][tile][c]);
        }
      }
    }
  }

  // Decodes the left operands of two MMAs: the words of rows g and g + 8.
  __device__ __forceinline__ static void decode(uint32_t (&codes)[4][4], uint32_t upper, uint32_t lower, int first) {
    codes[first][0] = codes_on_128<0>(upper), codes[first][1] = codes_on_128<0>(lower);
    codes[first][2] = codes_on_128<1>(upper), codes[first][3] = codes_on_128<1>(lower);
    codes[first + 1][0] = codes_on_128<2>(upper), codes[first + 1][1] = codes_on_128<2>(lower);
    codes[first + 1][2] = codes_on_128<3>(upper), codes[first + 1][3] = codes_on_128<3>(lower);
  }

  // Stores a warp's partial sums [rows, columns] in shared memory.
  __device__ __forceinline__ void store_sums(float* partial, int width) {
    const int n = at.warp * kWarpColumns + at.lane / 4, m = at.lane % 4 * 2;
#pragma unroll
    for (int i = 0; i < 2; ++i) {
#pragma unroll
      for (int tile = 0; tile < Tiles; ++tile) {
#pragma unroll
        for (int c = 0; c < 4; ++c) {
          partial[(tile * 8 + m + c % 2) * width + n + i * 16 + c / 2 * 8] = sums[i][tile][c];
        }
      }
    }
  }
};

}  // namespace ejkernel::quantized_matmul
