// Stands in for CUDA's: the conversions that the kernels use.
#pragma once

#include "device.h"

struct __half {
  uint16_t bits;
};

inline __half __ushort_as_half(uint16_t x) { return {x}; }
inline float __half2float(__half x) { _Float16 y; std::memcpy(&y, &x.bits, 2); return float(y); }
