// Stands in for csrc/lightning_indexer/select_ptx.cuh.
#pragma once

#include "common/tensor_core.cuh"

namespace ejkernel::lightning_indexer {

constexpr int kNoScore = INT32_MIN;

inline uint32_t lowest_of_warp(uint32_t x) {
  uint32_t lowest = x;
  exchange(&x, 1, [&](const uint32_t(*values)[6]) {
    for (int lane = 0; lane < 32; ++lane) lowest = values[lane][0] < lowest ? values[lane][0] : lowest;
  });
  return lowest;
}
inline int leading_zeros(uint64_t x) { return x ? __builtin_clzll(x) : 64; }
inline int sum_of_warp(int x) {
  int sum = 0;
  uint32_t own = x;
  exchange(&own, 1, [&](const uint32_t(*values)[6]) {
    for (int lane = 0; lane < 32; ++lane) sum += int(values[lane][0]);
  });
  return sum;
}
inline int inclusive_sum_of_warp(int x) {
  int sum = 0;
  uint32_t own = x;
  exchange(&own, 1, [&](const uint32_t(*values)[6]) {
    for (unsigned lane = 0; lane <= threadIdx.x % 32; ++lane) sum += int(values[lane][0]);
  });
  return sum;
}
inline float quotient(float x, float y) { return x / y; }
inline float root(float x) { return std::sqrt(x); }
inline int add(int* number, int value) {
  const int before = *number;
  *number += value;
  return before;
}
inline int add_one(int* number) { return add(number, 1); }

using Slot = uint64_t*;
inline Slot slot_of(uint64_t* candidate) { return candidate; }
inline void count_if_above(int& number, int score, int threshold) { number += score > threshold; }
inline void store_if_above(Slot& slot, int score, uint32_t threshold, int index) {
  const uint32_t high = uint32_t(score) ^ 0x80000000u;
  if (high > threshold) *slot++ = uint64_t(high) << 32 | uint32_t(~index);
}

}  // namespace ejkernel::lightning_indexer
