// What the kernels of the lightning indexer are called with, and the integers that scores are stored as.
#pragma once

#include <cstdint>

namespace ejkernel::lightning_indexer {

constexpr int kChannels = 128;                   // a row of queries or keys is 128 bytes, a row of the swizzle
constexpr int kColumns = 256;                    // rows of queries and heads per block, the columns of a product
constexpr int kTileKeys = 64, kStepKeys = 128;   // keys of a warpgroup, and of both
constexpr int kStages = 6, kQueryBuffers = 2;
constexpr int kWarpgroup = 128, kConsumers = 2 * kWarpgroup, kThreads = 3 * kWarpgroup;

struct alignas(64) TensorMap {
  char bytes[128];
};

struct ScoresCall {
  TensorMap query;        // [batch * tokens * heads, 128] e4m3, in tiles of 256 rows
  TensorMap key;          // [batch * keys, 128] e4m3, in tiles of 128 rows
  const float* weights;   // [batch, tokens, heads]
  const int* key_starts;  // [batch, tokens]
  const int* key_ends;
  const float* key_scales;  // [batch, keys], at least 0; null without
  int* ordered_scores;      // [batch, tokens, pitch]
  int tokens, keys, pitch;  // pitch: `keys` rounded up to a multiple of 4
  int groups, splits, split_keys, items;  // a split has so many keys, a multiple of 128
};

struct SelectCall {
  const int* ordered_scores;  // [rows, pitch]
  const int* key_starts;      // [rows]
  const int* key_ends;
  int* indices;   // [rows, top_k]
  float* scores;  // [rows, top_k]
  int pitch, top_k, capacity;  // capacity: candidates in shared memory
};

// Integers in the order of numbers: -0 equals 0, and NaN of either sign is the largest.
__device__ __forceinline__ int ordered_integer(float x) {
  const int bits = static_cast<int>(__float_as_uint(x)), magnitude = bits & 0x7FFFFFFF;
  return magnitude > 0x7F800000 ? 0x7FFFFFFF : bits < 0 ? -magnitude : magnitude;
}
__device__ __forceinline__ float float_of_ordered(int x) {
  return __uint_as_float(x < 0 ? 0x80000000u - static_cast<uint32_t>(x) : static_cast<uint32_t>(x));
}

}  // namespace ejkernel::lightning_indexer
