// Stands in for csrc/lightning_indexer/ptx.cuh: what its instructions do.
#pragma once

#include "common/tensor_core.cuh"
#include "common/warpgroup_mma.cuh"

namespace ejkernel::lightning_indexer {

inline float number_of_e4m3(uint8_t x) {
  const int exponent = x >> 3 & 15, mantissa = x & 7;
  if ((x & 0x7F) == 0x7F) return NAN;
  const float magnitude = exponent ? std::ldexp(8.0f + mantissa, exponent - 10) : std::ldexp(float(mantissa), -9);
  return x >> 7 ? -magnitude : magnitude;
}

// The number at a row and a column of rows of 128 bytes with the 128-byte swizzle, from an offset in units of 16 bytes.
inline float number_at(uint32_t units, int row, int column) {
  static const std::vector<float> numbers = [] {
    std::vector<float> all;
    for (int x = 0; x < 256; ++x) all.push_back(number_of_e4m3(x));
    return all;
  }();
  uint32_t at = units * 16 + row * 128 + column;
  at ^= (at >> 7 & 7) << 4;
  return numbers[*reinterpret_cast<const uint8_t*>(address_of(at))];
}

template <int Step, bool Add>
void multiply_rows(float (&d)[32][4], uint32_t a, uint32_t b) {
  if (a % 64 || b % 64) device::complain("rows with a swizzle are not aligned");
  device::warp().barrier.wait();
  const int lane = device::current->index % 32, first = device::current->index / 32 % 4 * 16 + lane / 4;
  device::current->products.push_back([=, &d] {
    for (int i = 0; i < 32 * 4; ++i) {
      const int m = first + i % 4 / 2 * 8, n = i / 4 * 8 + lane % 4 * 2 + i % 2;
      float sum = Add ? d[i / 4][i % 4] : 0;
      for (int k = 0; k < 32; ++k) sum += number_at(a, m, Step * 32 + k) * number_at(b, n, Step * 32 + k);
      d[i / 4][i % 4] = sum;
    }
  });
}

inline float rectify(float x) { return x <= 0 ? 0 : x; }

inline void await_turn(int warpgroup) {
  device::Barrier& barrier = device::current->block->named[2 + warpgroup];
  barrier.size = 256;
  barrier.wait();
}
inline void pass_turn(int warpgroup) {
  device::Barrier& barrier = device::current->block->named[3 - warpgroup];
  barrier.size = 256;
  barrier.arrive();
}

}  // namespace ejkernel::lightning_indexer
