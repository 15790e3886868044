// Stands in for CUDA's: the conversions and the pairs that the kernels use.
#pragma once

#include "device.h"

struct __nv_bfloat16 { uint16_t bits; };
struct __nv_bfloat162 { __nv_bfloat16 x, y; };

inline float __bfloat162float(__nv_bfloat16 x) { return __uint_as_float(uint32_t(x.bits) << 16); }
inline __nv_bfloat16 __float2bfloat16_rn(float x) {
  const uint32_t bits = __float_as_uint(x);
  if (x != x) return {0x7FFF};
  return {uint16_t((bits + 0x7FFF + (bits >> 16 & 1)) >> 16)};
}
inline __nv_bfloat162 __hmul2(__nv_bfloat162 a, __nv_bfloat162 b) {
  return {__float2bfloat16_rn(__bfloat162float(a.x) * __bfloat162float(b.x)),
          __float2bfloat16_rn(__bfloat162float(a.y) * __bfloat162float(b.y))};
}
inline __nv_bfloat162 __hadd2(__nv_bfloat162 a, __nv_bfloat162 b) {
  return {__float2bfloat16_rn(__bfloat162float(a.x) + __bfloat162float(b.x)),
          __float2bfloat16_rn(__bfloat162float(a.y) + __bfloat162float(b.y))};
}
inline __nv_bfloat162 __hfma2(__nv_bfloat162 a, __nv_bfloat162 b, __nv_bfloat162 c) {
  return {__float2bfloat16_rn(fmaf(__bfloat162float(a.x), __bfloat162float(b.x), __bfloat162float(c.x))),
          __float2bfloat16_rn(fmaf(__bfloat162float(a.y), __bfloat162float(b.y), __bfloat162float(c.y)))};
}
