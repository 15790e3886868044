// Codes of quantised weights and their scales (ejkernel/planning/quantized_formats.py) as float32 numbers in registers.
#pragma once

#include <cstdint>
#include <type_traits>

#include <cuda_fp16.h>
#include <cuda_fp8.h>

#include "tensor_core.cuh"

namespace ejkernel {

// What a code is.
enum class Code : int {
  kAffine4,  // an unsigned integer of 4 bits
  kAffine8,  // of 8 bits
  kTable4,   // a place in a table of 16 numbers: nf4, e2m1
  kFloat8,   // e4m3
};

// How a scale is stored.
enum class Scale : int {
  kAffine,    // float16, with a zero in float16
  kFloat32,   // of nf4
  kExponent,  // an int8, of mxfp4 and mxfp8
  kFloat8,    // e4m3, of nvfp4 and nvfp8
};

__device__ constexpr float kNormalFloat[16] = {
    -1.0f,
    -0.6961928009986877f,
    -0.5250730514526367f,
    -0.39491748809814453f,
    -0.28444138169288635f,
    -0.18477343022823334f,
    -0.09105003625154495f,
    0.0f,
    0.07958029955625534f,
    0.16093020141124725f,
    0.24611230194568634f,
    0.33791524171829224f,
    0.44070982933044434f,
    0.5626170039176941f,
    0.7229568362236023f,
    1.0f,
};
__device__ constexpr float kE2m1[16] = {0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0f, -0.5, -1, -1.5, -2, -3, -4, -6};

// Bytes of a scale, as a power of two.
__host__ __device__ inline int log_scale_bytes(Scale kind) {
  return kind == Scale::kAffine ? 1 : kind == Scale::kFloat32 ? 2 : 0;
}

template <Code C>
constexpr bool kIsAffine = C == Code::kAffine4 || C == Code::kAffine8;

// A scale as it is stored, and its zero.
struct StoredScale {
  uint32_t scale, zero;
};

// Reads them from shared memory.
template <Code C>
__device__ __forceinline__ StoredScale read_scale(Scale kind, const char* scale, const char* zero) {
  if constexpr (kIsAffine<C>) {
    return {*reinterpret_cast<const uint16_t*>(scale), *reinterpret_cast<const uint16_t*>(zero)};
  } else {
    if (kind == Scale::kFloat32) return {*reinterpret_cast<const uint32_t*>(scale), 0};
    return {*reinterpret_cast<const uint8_t*>(scale), 0};
  }
}

// A stored scale as two factors: a weight is `code * x + y` of affine codes, and `code * x` of others.
template <Code C>
__device__ __forceinline__ float2 scale_factors(Scale kind, StoredScale stored) {
  if constexpr (kIsAffine<C>) {
    const float scale = __half2float(__ushort_as_half(stored.scale)), zero = __half2float(__ushort_as_half(stored.zero));
    return {scale, -zero * scale};
  } else {
    if (kind == Scale::kFloat32) return {__uint_as_float(stored.scale), 0.0f};
    if (kind == Scale::kExponent) return {exp2f(float(int8_t(stored.scale))), 0.0f};
    return {__half2float(__half(__nv_cvt_fp8_to_halfraw(stored.scale, __NV_E4M3))), 0.0f};
  }
}

// Eight neighbouring codes, in one word or in two, to the weights they stand for.
template <Code C>
struct Decoder;

// The bits of code i of a word, where they are, replace bits of the mantissa of the power of two that makes them the
// units: 2^(23 - 4i) + q. The subtraction is exact; as part of the offset the power would cost the offset its digits.
// Conversions of integers run at a quarter of this rate.
template <int I>
__device__ __forceinline__ float integer_at(uint32_t word) {
  constexpr uint32_t kPower = (127 + 23 - 4 * I) << 23;
  return __uint_as_float(mask_or<(0xFu << 4 * I), kPower>(word)) - float(1 << (23 - 4 * I));
}

template <>
struct Decoder<Code::kAffine4> {
  static constexpr int kWords = 1;
  static __device__ __forceinline__ void decode(float (&w)[8], const uint32_t* words, float2 factors, const float*) {
    // Codes 5 to 7, at the places of 2 to 4.
    const uint32_t word = words[0], upper = word >> 12;
    const float codes[8] = {integer_at<0>(word),  integer_at<1>(word),  integer_at<2>(word),  integer_at<3>(word),
                            integer_at<4>(word),  integer_at<2>(upper), integer_at<3>(upper), integer_at<4>(upper)};
#pragma unroll
    for (int i = 0; i < 8; ++i) w[i] = fmaf(codes[i], factors.x, factors.y);
  }
};

template <>
struct Decoder<Code::kAffine8> {
  static constexpr int kWords = 2;
  static __device__ __forceinline__ void decode(float (&w)[8], const uint32_t* words, float2 factors, const float*) {
#pragma unroll
    for (int i = 0; i < 8; ++i) {
      // 2^23 + q, of which the subtraction is exact. As part of the offset 2^23 would cost the offset its digits.
      const float code = __uint_as_float(__byte_perm(words[i / 4], 0x4B000000, 0x7440 | i % 4));
      w[i] = fmaf(code - 8388608.0f, factors.x, factors.y);
    }
  }
};

// The table is in shared memory, where 16 numbers are in 16 banks: no two threads wait for each other.
template <>
struct Decoder<Code::kTable4> {
  static constexpr int kWords = 1;
  static __device__ __forceinline__ void decode(
      float (&w)[8], const uint32_t* words, float2 factors, const float* table) {
    const char* bytes = reinterpret_cast<const char*>(table);
#pragma unroll
    for (int i = 0; i < 8; ++i) {
      const uint32_t at = (i == 0 ? words[0] << 2 : words[0] >> (4 * i - 2)) & 0x3C;
      w[i] = *reinterpret_cast<const float*>(bytes + at) * factors.x;
    }
  }
};

template <>
struct Decoder<Code::kFloat8> {
  static constexpr int kWords = 2;
  static __device__ __forceinline__ void decode(float (&w)[8], const uint32_t* words, float2 factors, const float*) {
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const uint32_t pair = words[i / 2] >> (i % 2 * 16);
      const float2 codes = __half22float2(__half2(__nv_cvt_fp8x2_to_halfraw2(pair & 0xFFFF, __NV_E4M3)));
      w[2 * i] = codes.x * factors.x;
      w[2 * i + 1] = codes.y * factors.x;
    }
  }
};

// Integers of 4 bits become weights of float16 two at a time, in arithmetic that rounds once:
//
//   f = 16 + q             the bits of q on top of the mantissa of 16
//   d = f - (16 + z)       exact: z is the zero, rounded until d has as many digits as the dtype
//   w = d scale + o        o = (z - zero) scale, which is small
//
// That is 2 instructions a weight, and 3 in float32. Weights of bfloat16 have fewer digits than scales: with a scale in
// two parts 1.8 % of the weights were rounded to the wrong side.
template <typename T>
constexpr bool kHasPairs = std::is_same_v<T, __half>;

// 16 + z, the scale, and o.
struct PairFactors {
  float base, scale, offset;
};

__device__ __forceinline__ PairFactors pair_factors(StoredScale stored) {
  const float scale = __half2float(__ushort_as_half(stored.scale)), zero = __half2float(__ushort_as_half(stored.zero));
  // A power of two with |q - z| < 2 power. Adding and taking off a multiple of it rounds to float16's 11 digits.
  const float power = __uint_as_float(__float_as_uint(fabsf(zero) + 16.0f) & 0x7F800000);
  const float large = power * 12288.0f, rounded = __fsub_rn(__fadd_rn(zero, large), large);  // 1.5 * 2^13
  return {16.0f + rounded, scale, (rounded - zero) * scale};
}

// The factors of two weights: those of `a` in the lower halves. Not used: the last.
__device__ __forceinline__ uint4 pack_factors(const PairFactors& a, const PairFactors& b) {
  return {Half<__half>::pack(a.base, b.base), Half<__half>::pack(a.scale, b.scale),
          Half<__half>::pack(a.offset, b.offset), 0};
}

// Four pairs of weights: pair i is of the i-th codes of the lower and the upper half of a word.
__device__ __forceinline__ void decode_pairs(uint32_t (&pairs)[4], uint32_t word, const uint4& factors) {
  const auto two = [](uint32_t x) { return *reinterpret_cast<const __half2*>(&x); };
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    const uint32_t shifted = i < 2 ? word << (6 - 4 * i) : word >> (4 * i - 6);
    const __half2 difference = __hsub2(two(mask_or<0x03C003C0, 0x4C004C00>(shifted)), two(factors.x));
    const __half2 weights = __hfma2(difference, two(factors.y), two(factors.z));
    pairs[i] = *reinterpret_cast<const uint32_t*>(&weights);
  }
}

}  // namespace ejkernel
