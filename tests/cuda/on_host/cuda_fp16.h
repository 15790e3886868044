// Stands in for CUDA's: the conversions and the pairs that the kernels use.
#pragma once

#include "device.h"

struct __half_raw { uint16_t x; };
struct __half2_raw { uint16_t x, y; };
struct __half {
  uint16_t bits;
  __half() = default;
  explicit __half(__half_raw raw) : bits(raw.x) {}
};
struct __half2 {
  __half x, y;
  __half2() = default;
  __half2(__half a, __half b) : x(a), y(b) {}
  explicit __half2(__half2_raw raw) : x(__half_raw{raw.x}), y(__half_raw{raw.y}) {}
};

inline __half __ushort_as_half(uint16_t x) { return __half(__half_raw{x}); }
inline float __half2float(__half x) { _Float16 y; std::memcpy(&y, &x.bits, 2); return float(y); }
inline __half half_of(double x) { const _Float16 y = _Float16(x); __half z; std::memcpy(&z.bits, &y, 2); return z; }
inline __half __float2half_rn(float x) { return half_of(x); }
inline float2 __half22float2(__half2 x) { return {__half2float(x.x), __half2float(x.y)}; }
inline __half2 __hsub2(__half2 a, __half2 b) {
  return {half_of(double(__half2float(a.x)) - __half2float(b.x)), half_of(double(__half2float(a.y)) - __half2float(b.y))};
}
inline __half2 __hfma2(__half2 a, __half2 b, __half2 c) {
  return {half_of(double(__half2float(a.x)) * __half2float(b.x) + __half2float(c.x)),
          half_of(double(__half2float(a.y)) * __half2float(b.y) + __half2float(c.y))};
}
