// Loads of per-token scalars in float32 or 16 bits for the decode step of linear recurrences.
#pragma once

#include "common/tensor_core.cuh"

namespace ejkernel::recurrent_step {

// An array of scalars in float32 or in the tokens' dtype, small compared with the states: gates of heads, beta, dt and
// skip.
struct Numbers {
  const void* data;  // nullptr if the array is absent
  long long row, token;  // strides in elements between rows and between tokens
  bool wide;
};

// Both elements of a pair in float32, the lower half first.
template <typename T>
__device__ __forceinline__ float2 widened_pair(uint32_t pair);
template <>
__device__ __forceinline__ float2 widened_pair<__nv_bfloat16>(uint32_t pair) {
  return float2{__uint_as_float(pair << 16), __uint_as_float(pair & 0xffff0000u)};
}
template <>
__device__ __forceinline__ float2 widened_pair<__half>(uint32_t pair) {
  return float2{__half2float(__ushort_as_half(pair & 0xffff)), __half2float(__ushort_as_half(pair >> 16))};
}

// The address of the 32-bit word that holds an element.
__device__ __forceinline__ const uint32_t* word_address(const Numbers& numbers, long long at) {
  return static_cast<const uint32_t*>(numbers.data) + (numbers.wide ? at : at >> 1);
}

// The element in its word.
template <typename T>
__device__ __forceinline__ float number_of(uint32_t word, const Numbers& numbers, long long at) {
  const float2 pair = widened_pair<T>(word);
  return numbers.wide ? __uint_as_float(word) : at & 1 ? pair.y : pair.x;
}

}  // namespace ejkernel::recurrent_step
