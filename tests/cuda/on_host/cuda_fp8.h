// Stands in for CUDA's: e4m3 to float16, which holds all of its numbers.
#pragma once

#include "cuda_fp16.h"

enum Kind { __NV_E4M3 };

inline __half_raw __nv_cvt_fp8_to_halfraw(uint8_t x, Kind) {
  const int exponent = x >> 3 & 15, mantissa = x & 7;
  const double size = exponent ? std::ldexp(8 + mantissa, exponent - 10) : std::ldexp(mantissa, -9);
  return {half_of((x & 0x7F) == 0x7F ? NAN : x & 0x80 ? -size : size).bits};
}
inline __half2_raw __nv_cvt_fp8x2_to_halfraw2(uint16_t x, Kind kind) {
  return {__nv_cvt_fp8_to_halfraw(x & 0xFF, kind).x, __nv_cvt_fp8_to_halfraw(x >> 8, kind).x};
}
