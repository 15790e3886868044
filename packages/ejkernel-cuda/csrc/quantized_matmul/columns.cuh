// The quantised matmul with `transpose=True` of few rows: a block contracts all of K for its columns.
#pragma once

#include "common/dependent_launch.cuh"
#include "quantized_matmul/transposed.cuh"

namespace ejkernel::quantized_matmul {

// Computes what `Transposed` does, but splits the contracted elements over the warps of one block, not over a cluster:
// with a narrow matrix, clusters fill the chip only if blocks of 256 columns have short shares.
//
//   words, scales, zeros   device memory -> the warp's ring in shared memory (cp.async) -> registers
//   x                      device memory -> registers, one group ahead; each warp reads another part of it
//
// Warps synchronise only once, before their sums are added up.
template <int Tiles>
struct WholeColumns {
  static constexpr int kWarps = 16, kThreads = 32 * kWarps, kRows = 8 * Tiles, kSixteens = 2, kTile = 16 * kSixteens;
  static constexpr int kUnit = 4;  // shares are multiples of this many groups: their scales are 8 aligned bytes
  static constexpr int kStageBytes = kTile * 32, kFactorBytes = kTile * 16;
  static constexpr int kStages = 5;  // with more, scales would be overwritten while they are in use
  static constexpr int kWarpBytes = kStages * kStageBytes + 2 * kFactorBytes;
  static constexpr int kWidth = kTile + 4;  // row stride of partial sums, so that rows are in different banks
  static_assert(kRows * kWidth * 4 <= kWarpBytes, "partial sums take the place of the ring");

  const QuantizedCall& call;
  const int lane, g, t, first_n, rows, limit;
  int first, count;  // groups of the warp
  char* const own;   // shared memory: the ring, and scales and zeros of two units
  const uint32_t* from;
  const __nv_bfloat16* x_from;
  float sums[kSixteens][Tiles][4] = {};

  __device__ __forceinline__ WholeColumns(const QuantizedCall& c, char* shared)
      : call(c),
        lane(threadIdx.x % 32),
        g(lane / 4),
        t(lane % 4),
        first_n(blockIdx.x * kTile),
        rows(c.m),
        limit(c.n - first_n),
        own(shared + threadIdx.x / 32 * kWarpBytes) {
    const int units = c.row_groups / kUnit, warp = threadIdx.x / 32;
    first = units * warp / kWarps * kUnit;
    count = units * (warp + 1) / kWarps * kUnit - first;
    // Two lanes copy the 32 bytes of a row in a group.
    from = c.words + int64_t(first_n + lane / 2) * c.row_words + first * 8 + lane % 2 * 4;
    x_from = c.x + int64_t(g) * c.k + first * kGroup + t * 16;
  }

  // Starts the copies of a group and, with the first group of a unit, of the unit's scales and zeros. Columns past the
  // last one are not copied: their sums are not stored.
  __device__ __forceinline__ void copy(int group, int stage) {
    const uint32_t to = shared_address(own) + stage * kStageBytes + lane * 16;
#pragma unroll
    for (int pass = 0; pass < kSixteens; ++pass) {
      if (pass * 16 + lane / 2 < limit) copy_async(to + pass * 512, from + int64_t(pass * 16) * call.row_words, 16);
    }
    from += 8;
    if (group % kUnit == 0) copy_factors(group);
  }

  __device__ __forceinline__ void copy_factors(int group) const {
    const uint32_t to = shared_address(own) + kStages * kStageBytes + group / kUnit % 2 * kFactorBytes;
#pragma unroll
    for (int pass = 0; pass < kSixteens; ++pass) {
      const int piece = pass * 32 + lane, column = piece < kTile ? piece : piece - kTile;
      const uint16_t* factors = piece < kTile ? call.scales : call.zeros;
      factors += int64_t(first_n + column) * call.row_groups + first + group;
      if (column < limit) copy_four_async(to + piece * 8, factors);
    }
  }

  // Loads a lane's x of the next group: for row g of each tile, the 16 elements that match its words.
  __device__ __forceinline__ void load_x(uint4 (&x)[Tiles][2]) {
#pragma unroll
    for (int tile = 0; tile < Tiles; ++tile) {
      x[tile][0] = x[tile][1] = {0, 0, 0, 0};
      if (tile * 8 + g < rows) {
        const uint4* row = reinterpret_cast<const uint4*>(x_from + int64_t(tile * 8) * call.k);
        x[tile][0] = row[0], x[tile][1] = row[1];
      }
    }
    x_from += kGroup;
  }

  __device__ __forceinline__ void run() {
    uint4 ahead[Tiles][2];
    if (count) load_x(ahead);
#pragma unroll
    for (int group = 0; group < kStages - 1; ++group) {
      if (group < count) copy(group, group);
      commit_copies();
    }
    int stage = 0, next = kStages - 1;
    for (int group = 0; group < count; ++group) {
      uint32_t x[Tiles][8];
#pragma unroll
      for (int tile = 0; tile < Tiles; ++tile) {
#pragma unroll
        for (int i = 0; i < 2; ++i) order(&x[tile][4 * i], ahead[tile][i]);
      }
      if (group + 1 < count) load_x(ahead);
      wait_for_copies<kStages - 2>();
      __syncwarp();  // copies of other lanes have arrived, and all lanes have read what the next copies overwrite
      if (group + kStages - 1 < count) copy(group + kStages - 1, next);
      commit_copies();
      const char* factors = own + kStages * kStageBytes + group / kUnit % 2 * kFactorBytes;
      multiply(x, own + stage * kStageBytes, factors, group % kUnit);
      next = stage;
      stage = stage + 1 == kStages ? 0 : stage + 1;
    }
  }

  // Codes j and j + 4 of a word share a register, so elements j and j + 4 of x do too.
  __device__ __forceinline__ static void order(uint32_t* to, const uint4& eight) {
    to[0] = __byte_perm(eight.x, eight.z, 0x5410), to[1] = __byte_perm(eight.x, eight.z, 0x7632);
    to[2] = __byte_perm(eight.y, eight.w, 0x5410), to[3] = __byte_perm(eight.y, eight.w, 0x7632);
  }

  __device__ __forceinline__ void multiply(
      const uint32_t (&x)[Tiles][8], const char* stage, const char* factors, int group) {
    constexpr uint32_t kOne = 0x3F803F80;
    const uint32_t ones[4] = {kOne, kOne, kOne, kOne};
    // sums of x over the group: products with columns of 1 put them into the needed registers
    float x_sums[Tiles][4] = {};
#pragma unroll
    for (int tile = 0; tile < Tiles; ++tile) {
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        Half<__nv_bfloat16>::multiply(x_sums[tile], ones, x[tile][2 * j], x[tile][2 * j + 1]);
      }
    }
    const uint16_t* own_factors = reinterpret_cast<const uint16_t*>(factors) + g * 4 + group;
    const char* words = stage + g * 32 + t * 8;
#pragma unroll
    for (int i = 0; i < kSixteens; ++i) {
      const uint2 upper = *reinterpret_cast<const uint2*>(words + i * 512);
      const uint2 lower = *reinterpret_cast<const uint2*>(words + i * 512 + 256);
      float scale[2], zero[2];
#pragma unroll
      for (int r = 0; r < 2; ++r) {
        scale[r] = half_bits_to_float(own_factors[(i * 16 + r * 8) * 4]);
        zero[r] = -128.0f - half_bits_to_float(own_factors[(kTile + i * 16 + r * 8) * 4]);
      }
      uint32_t codes[4][4];
      Transposed<1>::decode(codes, upper.x, lower.x, 0);
      Transposed<1>::decode(codes, upper.y, lower.y, 2);
#pragma unroll
      for (int tile = 0; tile < Tiles; ++tile) {
        float part[4] = {};
#pragma unroll
        for (int j = 0; j < 4; ++j) {
          Half<__nv_bfloat16>::multiply(part, codes[j], x[tile][2 * j], x[tile][2 * j + 1]);
        }
#pragma unroll
        for (int c = 0; c < 4; ++c) {
          const float exact = fmaf(zero[c / 2], x_sums[tile][c % 2], part[c]);
          sums[i][tile][c] = fmaf(scale[c / 2], exact, sums[i][tile][c]);
        }
      }
    }
  }

  // Adds up the sums of all warps, in a fixed order.
  __device__ __forceinline__ void add_up(const char* shared) {
    __syncwarp();
    float* partial = reinterpret_cast<float*>(own) + 2 * t * kWidth + g;
#pragma unroll
    for (int i = 0; i < kSixteens; ++i) {
#pragma unroll
      for (int tile = 0; tile < Tiles; ++tile) {
#pragma unroll
        for (int c = 0; c < 4; ++c) partial[(tile * 8 + c % 2) * kWidth + i * 16 + c / 2 * 8] = sums[i][tile][c];
      }
    }
    __syncthreads();
    constexpr int kQuads = kTile / 4;
    for (int i = threadIdx.x; i < rows * kQuads; i += kThreads) {
      const int row = i / kQuads, column = i % kQuads * 4;
      if (column >= limit) continue;
      float4 sum = {0, 0, 0, 0};
#pragma unroll
      for (int warp = 0; warp < kWarps; ++warp) {
        const float* at = reinterpret_cast<const float*>(shared + warp * kWarpBytes) + row * kWidth + column;
        const float4 more = *reinterpret_cast<const float4*>(at);
        sum.x += more.x, sum.y += more.y, sum.z += more.z, sum.w += more.w;
      }
      const uint2 rounded = {Half<__nv_bfloat16>::pack(sum.x, sum.y), Half<__nv_bfloat16>::pack(sum.z, sum.w)};
      *reinterpret_cast<uint2*>(call.output + int64_t(row) * call.n + first_n + column) = rounded;
    }
  }
};

template <typename L>
__global__ void __launch_bounds__(L::kThreads, 1) whole_columns_kernel(const QuantizedCall call) {
#if __CUDA_ARCH__ == 900
  extern __shared__ __align__(16) char shared[];
  wait_for_previous_launch();
  L layout(call, shared);
  layout.run();
  start_next_launch();
  layout.add_up(shared);
#endif
}

}  // namespace ejkernel::quantized_matmul
