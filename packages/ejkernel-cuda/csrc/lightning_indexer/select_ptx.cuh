// Instructions of the selection.
#pragma once

#include <cstdint>

namespace ejkernel::lightning_indexer {

constexpr int kNoScore = INT32_MIN;  // below the integers of all scores

__device__ __forceinline__ uint32_t lowest_of_warp(uint32_t x) { return __reduce_min_sync(~0u, x); }
__device__ __forceinline__ int leading_zeros(uint64_t x) { return __clzll(static_cast<long long>(x)); }

__device__ __forceinline__ int sum_of_warp(int x) { return __reduce_add_sync(~0u, x); }

// The sum of the values of earlier lanes, and the own one.
template <int Distance = 1>
__device__ __forceinline__ int inclusive_sum_of_warp(int value) {
  asm("{\n.reg .pred p;\n.reg .s32 other;\nshfl.sync.up.b32 other|p, %0, %1, 0, 0xFFFFFFFF;\n"
      "@p add.s32 %0, %0, other;\n}"
      : "+r"(value)
      : "n"(Distance));
  if constexpr (Distance < 16) return inclusive_sum_of_warp<2 * Distance>(value);
  return value;
}

__device__ __forceinline__ float quotient(float x, float y) { return __fdividef(x, y); }
__device__ __forceinline__ float root(float x) {
  asm("sqrt.approx.ftz.f32 %0, %0;" : "+f"(x));
  return x;
}

// Adds to a number in shared memory, and returns what it was.
__device__ __forceinline__ int add(int* number, int value) { return atomicAdd(number, value); }
__device__ __forceinline__ int add_one(int* number) { return atomicAdd(number, 1); }

// Where a candidate is stored.
using Slot = uint32_t;
__device__ __forceinline__ Slot slot_of(const uint64_t* candidate) {
  return static_cast<uint32_t>(__cvta_generic_to_shared(candidate));
}

// Adds one to a number if a score is above a threshold.
__device__ __forceinline__ void count_if_above(int& number, int score, int threshold) {
  asm("{\n.reg .pred p;\nsetp.gt.s32 p, %1, %2;\n@p add.s32 %0, %0, 1;\n}" : "+r"(number) : "r"(score), "r"(threshold));
}
// Stores the candidate of a score that is above a threshold, an unsigned integer, and goes to the next slot. Without the
// other form of the comparison, the compiler keeps the bits of `count_if_above`, which takes more instructions.
__device__ __forceinline__ void store_if_above(Slot& slot, int score, uint32_t threshold, int index) {
  asm volatile(
      "{\n.reg .pred p;\n.reg .b32 high;\nxor.b32 high, %1, 0x80000000;\nsetp.gt.u32 p, high, %2;\n"
      "@p st.shared.v2.b32 [%0], {%3, high};\n@p add.u32 %0, %0, 8;\n}"
      : "+r"(slot)
      : "r"(score), "r"(threshold), "r"(~index)
      : "memory");
}

}  // namespace ejkernel::lightning_indexer
