// The steps of the main loop of decode attention: what a warp does with one tile of keys and values, for `decode.cuh`.
//
//   copy_tile -> multiply_keys -> scale_scores -> update_softmax -> multiply_values
#pragma once

#include <cmath>
#include <cstddef>

#include "common/cache_types.cuh"
#include "common/logarithms.cuh"

namespace ejkernel {

constexpr int kHeadsPerBlock = 16;  // query heads per block
constexpr uint32_t kInvalidOffset = ~0u;  // stands for the offset of a key that no page holds

// Strides between pages, slots and KV heads, in chunks of 16 bytes.
struct Strides {
  uint32_t page, slot, head;
};

struct DecodeParams {
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
  int rows, heads, kv_heads, size, value_size, rows_per_sink;
  int columns, page_size, pages;
  bool bfloat16;                // whether query and output are bfloat16, otherwise float16
  float scale, cap;             // cap is 0 without a soft cap
  float value_scale;
};

// A unit of work of a block: a range of one row's keys, up to 16 query heads, and where their result is stored.
struct KeySegment {
  int row, sequence;      // `sequence` is negative for a padding row
  int first_head, num_heads;  // query heads of the block, all of one KV head
  int kv_head;
  int first_key, end_key;     // the range of keys, without `end_key`
  float* partial;         // of the first head; null if the row has no other segments
  float* statistics;
};

// Warps, stages and shared memory for a padded head dimension: at most 96 KiB, which every supported chip has.
template <int HeadDim, typename CacheT>
struct TileShape {
  // Two warps at 256 columns, where a warp's stages take 48 KiB. Warps do not wait for each other, so only the three
  // stages of a warp hide the latency of its copies.
  static constexpr int kWarps = HeadDim == 256 ? 2 : 4;
  static constexpr int kHeads = kHeadsPerBlock;
  static constexpr int kStages = 3;
  // A tile has the same number of bytes for each dtype: memory bandwidth depends on the bytes in flight.
  static constexpr int kTileKeys = 32 / sizeof(CacheT);
  static constexpr int kRowChunks = HeadDim * sizeof(CacheT) / 16;  // 16-byte chunks of a row
  static constexpr int kTileBytes = kTileKeys * kRowChunks * 16;
  static constexpr int kWarpSmemBytes = kStages * 2 * kTileBytes;
  static constexpr int kSmemBytes = kWarps * kWarpSmemBytes;
  static constexpr int kKeysPerRound = kWarps * kTileKeys;  // keys of one tile of each warp
  // Blocks per multiprocessor of Hopper by shared memory: the register limit must allow as many.
  static constexpr int kBlocksPerSm = HeadDim == 64 ? 4 : 2;
  // Whether the next segment's copies start before the merge of this one: for other sizes registers would spill.
  static constexpr bool kPrefetchesNextSegment = HeadDim == 128;
};

// Swizzle: byte offset of a 16-byte chunk in a tile. Each row's chunks are permuted, so that eight rows touch all
// banks.
template <int HeadDim, typename CacheT>
__device__ __forceinline__ uint32_t swizzled_offset(int row, int chunk) {
  // ldmatrix reads the same chunk of eight rows at a time. Rows are a multiple of 128 bytes, or 64 bytes, apart:
  // without the XOR all eight, or every other one, would be in the same four banks.
  constexpr int kRowChunks = TileShape<HeadDim, CacheT>::kRowChunks;
  const int xor_bits = kRowChunks >= 8 ? row & 7 : row >> 1 & 3;
  return (row * kRowChunks + (chunk ^ xor_bits)) * 16;
}

// Starts copying a tile of one head. Lane l passes the offset of key l of the tile, in 16-byte chunks; missing keys,
// and columns past `chunks` chunks, become zeros.
template <int HeadDim, typename CacheT>
__device__ __forceinline__ void copy_tile(
    uint32_t smem_tile, const unsigned char* head_base, uint32_t key_offset, int chunks) {
  using S = TileShape<HeadDim, CacheT>;
  constexpr int kRows = 32 / S::kRowChunks;
  const int lane = threadIdx.x % 32, row = lane / S::kRowChunks, chunk = lane % S::kRowChunks;
#pragma unroll
  for (int pass = 0; pass < S::kTileKeys / kRows; ++pass) {
    const uint32_t row_offset = __shfl_sync(~0u, key_offset, row + pass * kRows);
    const bool is_valid = chunk < chunks && row_offset != kInvalidOffset;
    // Neighbouring lanes copy neighbouring chunks of a row. A copy of 0 bytes reads nothing, but needs a valid address.
    // Missing keys become zeros, since their slots may hold NaN, and 0 times NaN is NaN.
    copy_async(
        smem_tile + swizzled_offset<HeadDim, CacheT>(row + pass * kRows, chunk),
        is_valid ? head_base + (size_t(row_offset) + chunk) * 16 : head_base,
        is_valid ? 16 : 0);
  }
}

// A 16-bit element of query or output as float32. The dtype is a runtime value, since an 8-bit cache does not imply it.
__device__ __forceinline__ float as_float(const DecodeParams& call, uint32_t bits) {
  return call.bfloat16 ? __uint_as_float(bits << 16) : __half2float(__ushort_as_half(bits));
}

__device__ __forceinline__ void store_output(const DecodeParams& call, size_t at, float x) {
  if (call.bfloat16) {
    static_cast<__nv_bfloat16*>(call.output)[at] = __float2bfloat16_rn(x);
  } else {
    static_cast<__half*>(call.output)[at] = __float2half_rn(x);
  }
}

// Loads the segment's query heads as the left operand's fragments, and the factors that turn the products of heads lane
// / 4 and lane / 4 + 8 into scores.
template <int HeadDim, typename CacheT>
__device__ __forceinline__ void load_query(
    uint32_t (&query)[HeadDim / 16][4], float (&factors)[2], const DecodeParams& call, const KeySegment& segment) {
  const int lane = threadIdx.x % 32;
  const uint16_t* heads = static_cast<const uint16_t*>(call.query) +
                          (size_t(segment.row) * call.heads + segment.first_head) * call.size;
#pragma unroll
  for (int step = 0; step < HeadDim / 16; ++step) {
#pragma unroll
    for (int fragment = 0; fragment < 4; ++fragment) {
      // The fragment of operand A of m16n8k16: two rows eight apart, two pairs of columns eight apart, loaded from HBM:
      // the block reads its queries once and keeps them in registers. With 8-bit keys a register has four columns: both
      // operands then permute the columns of a step in the same way, which does not change the product.
      const int head = lane / 4 + fragment % 2 * 8;
      const int column = step * 16 + (sizeof(CacheT) == 1 ? lane % 4 * 4 + fragment / 2 * 2
          : lane % 4 * 2 + fragment / 2 * 8);
      const bool is_valid = head < segment.num_heads && column < call.size;
      query[step][fragment] = is_valid ? *reinterpret_cast<const uint32_t*>(heads + head * call.size + column) : 0;
    }
  }
  factors[0] = factors[1] = call.scale;
  if (sizeof(CacheT) == 2 || !call.bfloat16) return;
  // Converts bfloat16 to float16, which has more digits and a smaller range: each head is scaled by the power of two
  // that brings its largest element to 2^14. Elements down to 2^-28 of the largest keep all their digits.
  float max_abs[2] = {0.f, 0.f};
#pragma unroll
  for (int step = 0; step < HeadDim / 16; ++step) {
#pragma unroll
    for (int fragment = 0; fragment < 4; ++fragment) {
      const uint32_t pair = query[step][fragment];
      const float pair_max = fmaxf(fabsf(as_float(call, pair & 0xffff)), fabsf(as_float(call, pair >> 16)));
      max_abs[fragment % 2] = fmaxf(max_abs[fragment % 2], pair_max);
    }
  }
  float pow2_scales[2];
#pragma unroll
  for (int fragment = 0; fragment < 2; ++fragment) {
    max_abs[fragment] = fmaxf(max_abs[fragment], __shfl_xor_sync(~0u, max_abs[fragment], 1));
    max_abs[fragment] = fmaxf(max_abs[fragment], __shfl_xor_sync(~0u, max_abs[fragment], 2));
    // The power's biased exponent, clamped so that the power and its inverse are normal. For infinity the clamp gives
    // 1.
    const int exponent = min(max(127 + 14 - (int(__float_as_uint(max_abs[fragment]) >> 23) - 127), 1), 253);
    pow2_scales[fragment] = __uint_as_float(exponent << 23);
    factors[fragment] *= __uint_as_float((254 - exponent) << 23);
  }
#pragma unroll
  for (int step = 0; step < HeadDim / 16; ++step) {
#pragma unroll
    for (int fragment = 0; fragment < 4; ++fragment) {
      const uint32_t pair = query[step][fragment];
      query[step][fragment] = Half<__half>::pack(
          as_float(call, pair & 0xffff) * pow2_scales[fragment % 2],
          as_float(call, pair >> 16) * pow2_scales[fragment % 2]);
    }
  }
}

// Multiplies 16 query heads with a tile's keys. Each of the `MmaTiles` MMAs has eight keys; a lane's four scores of one
// are (head, key), (head, key + 1), and the same two keys of head + 8.
template <int HeadDim, typename CacheT, int MmaTiles>
__device__ __forceinline__ void multiply_keys(
    float (&scores)[MmaTiles][4], const uint32_t (&query)[HeadDim / 16][4], uint32_t tile) {
  using T = typename Cache<CacheT>::Compute;
  // ldmatrix: lanes 8 i to 8 i + 7 address matrix i, with keys 0 to 7 in two chunks, then keys 8 to 15. A key is a
  // column of operand B, whose registers run along k, so it is not transposed.
  const int lane = threadIdx.x % 32, row = lane / 16 * 8 + lane % 8, chunk = lane / 8 % 2;
#pragma unroll
  for (int mma_tile = 0; mma_tile < MmaTiles; ++mma_tile) {
#pragma unroll
    for (int n = 0; n < 4; ++n) scores[mma_tile][n] = 0.f;
  }
  // Two chunks of a row: 16 columns, or 32 of 8 bits.
#pragma unroll
  for (int step = 0; step < TileShape<HeadDim, CacheT>::kRowChunks / 2; ++step) {
#pragma unroll
    for (int mma_tile = 0; mma_tile < MmaTiles; mma_tile += 2) {
      uint32_t keys[4];
      load_matrices(keys, tile + swizzled_offset<HeadDim, CacheT>(mma_tile * 8 + row, step * 2 + chunk));
      if constexpr (sizeof(CacheT) == 2) {
        Half<T>::multiply(scores[mma_tile], query[step], keys[0], keys[1]);
        Half<T>::multiply(scores[mma_tile + 1], query[step], keys[2], keys[3]);
      } else {
#pragma unroll
        for (int n = 0; n < 4; ++n) {
          uint32_t wide[2];
          Cache<CacheT>::template widen<false>(wide, keys[n]);
          Half<T>::multiply(scores[mma_tile + n / 2], query[step * 2 + n % 2], wide[0], wide[1]);
        }
      }
    }
  }
}

// Turns products into scores, in base 2.
template <int MmaTiles>
__device__ __forceinline__ void scale_scores(float (&scores)[MmaTiles][4], const float (&factors)[2], float cap) {
#pragma unroll
  for (int mma_tile = 0; mma_tile < MmaTiles; ++mma_tile) {
#pragma unroll
    for (int n = 0; n < 4; ++n) {
      // All threads take the same branch. If exp 2x overflows to infinity, the division gives 0 and tanh 1.
      if (cap > 0.f) {  // tanh x = 1 - 2 / (exp 2x + 1)
        const float power = exp2_fast(2.f * kLog2e / cap * factors[n / 2] * scores[mma_tile][n]);
        scores[mma_tile][n] = kLog2e * cap * (1.f - __fdividef(2.f, power + 1.f));
      } else {
        scores[mma_tile][n] *= kLog2e * factors[n / 2];
      }
    }
  }
}

// The state of the online softmax over a warp's tiles, for heads lane / 4 and lane / 4 + 8.
template <int HeadDim>
struct OnlineSoftmax {
  float row_max[2] = {-INFINITY, -INFINITY};
  float row_sum[2] = {0.f, 0.f};  // of this lane's keys only
  float acc[HeadDim / 8][4] = {};
};

// Replaces a tile's scores by weights, and returns whether a row maximum increased; `alpha` has the factors of sums that
// were accumulated before. Bit k of `valid_keys` says whether key k of the tile exists. With `RowHalves` = 1 the segment
// has at most eight heads, and the weights of the other eight rows are zeros.
template <int RowHalves, typename Softmax, int MmaTiles>
__device__ __forceinline__ bool weigh_scores(
    Softmax& softmax, float (&alpha)[2], float (&scores)[MmaTiles][4], uint32_t valid_keys) {
  const int lane = threadIdx.x % 32;
  // Missing keys were copied as zeros, and their scores of 0 would count. Uniform in the warp; most tiles are full.
  if (valid_keys != ~0u >> (32 - MmaTiles * 8)) {
    const uint32_t lane_keys = valid_keys >> (lane % 4 * 2);
#pragma unroll
    for (int n = 0; n < MmaTiles * 4; ++n) {
      if (!(lane_keys >> (n / 4 * 8 + n % 2) & 1)) scores[n / 4][n % 4] = -INFINITY;
    }
  }
  bool max_increased = false;
#pragma unroll
  for (int row_half = 0; row_half < RowHalves; ++row_half) {
    float row_max = softmax.row_max[row_half];
#pragma unroll
    for (int n = 0; n < MmaTiles * 2; ++n) row_max = fmaxf(row_max, scores[n / 2][row_half * 2 + n % 2]);
    // The keys of a row are in four neighbouring lanes.
    row_max = fmaxf(row_max, __shfl_xor_sync(~0u, row_max, 1));
    row_max = fmaxf(row_max, __shfl_xor_sync(~0u, row_max, 2));
    // Avoids -INFINITY - -INFINITY, which is NaN.
    const float shift = row_max == -INFINITY ? 0.f : row_max;
    alpha[row_half] = exp2_fast(softmax.row_max[row_half] - shift);
    max_increased |= row_max > softmax.row_max[row_half];
    softmax.row_max[row_half] = row_max;
    softmax.row_sum[row_half] *= alpha[row_half];
#pragma unroll
    for (int n = 0; n < MmaTiles * 2; ++n) {
      float& score = scores[n / 2][row_half * 2 + n % 2];
      score = exp2_fast(score - shift);
      // Of this lane's keys only: the sum over lanes follows the main loop. The weights are summed before they are
      // rounded to the product's dtype.
      softmax.row_sum[row_half] += score;
    }
  }
#pragma unroll
  for (int n = 0; RowHalves == 1 && n < MmaTiles * 2; ++n) scores[n / 2][2 + n % 2] = 0.f;
  return max_increased;
}

// One step of the online softmax: replaces scores by weights, and rescales the accumulators if a row maximum increased.
template <int RowHalves, int HeadDim, int MmaTiles>
__device__ __forceinline__ void update_softmax(
    OnlineSoftmax<HeadDim>& softmax, float (&scores)[MmaTiles][4], uint32_t valid_keys) {
  float alpha[2] = {1.f, 1.f};
  const bool max_increased = weigh_scores<RowHalves>(softmax, alpha, scores, valid_keys);
  // Lazy rescaling: row maxima seldom increase after the first tiles. The branch is uniform in the warp, whose lanes
  // must have converged at the next MMA.
  if (__any_sync(~0u, max_increased)) {
#pragma unroll
    for (int column = 0; column < HeadDim / 8; ++column) {
#pragma unroll
      for (int n = 0; n < RowHalves * 2; ++n) softmax.acc[column][n] *= alpha[n / 2];
    }
  }
}

// Adds the weighted values of a tile to the accumulators.
template <int HeadDim, typename CacheT, int MmaTiles>
__device__ __forceinline__ void multiply_values(
    OnlineSoftmax<HeadDim>& softmax, const float (&weights)[MmaTiles][4], uint32_t tile) {
  using T = typename Cache<CacheT>::Compute;
  // ldmatrix transposes the values: a row in memory is a key, and the registers of operand B run along keys.
  const int lane = threadIdx.x % 32, row = lane % 16, chunk = lane / 16;
#pragma unroll
  for (int mma_tile = 0; mma_tile < MmaTiles; mma_tile += 2) {
    // The accumulators of the scores have the layout of operand A, so the weights stay in their registers.
    const uint32_t packed_weights[4] = {
        Half<T>::pack(weights[mma_tile][0], weights[mma_tile][1]),
        Half<T>::pack(weights[mma_tile][2], weights[mma_tile][3]),
        Half<T>::pack(weights[mma_tile + 1][0], weights[mma_tile + 1][1]),
        Half<T>::pack(weights[mma_tile + 1][2], weights[mma_tile + 1][3])};
#pragma unroll
    for (int step = 0; step < TileShape<HeadDim, CacheT>::kRowChunks / 2; ++step) {
      uint32_t values[4];
      load_matrices_transposed(values, tile + swizzled_offset<HeadDim, CacheT>(mma_tile * 8 + row, step * 2 + chunk));
      if constexpr (sizeof(CacheT) == 2) {
        Half<T>::multiply(softmax.acc[step * 2], packed_weights, values[0], values[1]);
        Half<T>::multiply(softmax.acc[step * 2 + 1], packed_weights, values[2], values[3]);
      } else {
        // ldmatrix moves two columns at a time: a register has columns 2n and 2n + 1 of one key, the next one those of
        // the next key. Repacked as pairs of keys they are operands for the chunk's even and odd columns.
#pragma unroll
        for (int n = 0; n < 2; ++n) {
          uint32_t first[2], second[2];
          Cache<CacheT>::template widen<true>(first, values[n * 2]);
          Cache<CacheT>::template widen<true>(second, values[n * 2 + 1]);
          float(&even)[4] = softmax.acc[(step * 2 + n) * 2];
          float(&odd)[4] = softmax.acc[(step * 2 + n) * 2 + 1];
          Half<T>::multiply(even, packed_weights, first[0], second[0]);
          Half<T>::multiply(odd, packed_weights, first[1], second[1]);
        }
      }
    }
  }
}

}  // namespace ejkernel
