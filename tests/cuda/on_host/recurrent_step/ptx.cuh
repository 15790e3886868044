// Stands in for csrc/recurrent_step/ptx.cuh: what its instructions do.
#pragma once

#include "common/tensor_core.cuh"

namespace ejkernel::recurrent_step {

// c += a b as m16n8k8 lays its operands over the lanes; of an operand TF32 holds the upper 19 bits.
inline void multiply_tf32(float (&c)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {
  const uint32_t own[6] = {a[0], a[1], a[2], a[3], b0, b1};
  const auto number = [](uint32_t x) { return __uint_as_float(x & 0xffffe000u); };
  exchange(own, 6, [&](const uint32_t(*values)[6]) {
    const int lane = device::current->index % 32;
    for (int i = 0; i < 4; ++i) {
      const int row = lane / 4 + i / 2 * 8, column = lane % 4 * 2 + i % 2;
      for (int k = 0; k < 8; ++k) {
        c[i] += number(values[row % 8 * 4 + k % 4][row / 8 + k / 4 * 2]) * number(values[column * 4 + k % 4][4 + k / 4]);
      }
    }
  });
}

inline uint32_t transpose_matrix(uint32_t pair) {
  uint32_t result = 0;
  exchange(&pair, 1, [&](const uint32_t(*values)[6]) {
    const int lane = device::current->index % 32, row = lane / 4, column = lane % 4 * 2;
    for (int i = 0; i < 2; ++i) {
      result |= (values[(column + i) * 4 + row / 2][0] >> (row % 2 * 16) & 0xffffu) << (16 * i);
    }
  });
  return result;
}

inline void publish_to_copies() {}
inline void store_bulk(void* to, uint32_t from, uint32_t bytes) {
  if (from % 16 || reinterpret_cast<uint64_t>(to) % 16) device::complain("a bulk store is not aligned");
  std::memcpy(to, address_of(from), bytes);
}
inline void wait_for_store_reads() {}
inline void sleep_for(unsigned) {}
inline float4 load_again(uint32_t from) { return *reinterpret_cast<const float4*>(address_of(from)); }

inline void store_four(float* to, float a, float b, float c, float d) { to[0] = a, to[1] = b, to[2] = c, to[3] = d; }

}  // namespace ejkernel::recurrent_step
