// What a cache may hold, and how eight-bit numbers become pairs of float16 for the tensor cores.
//
// A 32-bit register with four numbers a, b, c, d becomes two with the pairs (a, b) and (c, d) or, with `Apart`, (a, c)
// and (b, d). All eight-bit numbers are float16 numbers too, so nothing is rounded.
#pragma once

#include "tensor_core.cuh"

namespace ejkernel {

struct E4m3 {
  unsigned char bits;
};
struct E5m2 {
  unsigned char bits;
};
struct Int8 {
  signed char number;
};

// Compute: the dtype of the operands of the products. Numbers of 16 bits are their own operands.
template <typename C>
struct Cache {
  using Compute = C;
};

template <>
struct Cache<E4m3> {
  using Compute = __half;
  template <bool Apart>
  static __device__ __forceinline__ void widen(uint32_t (&pairs)[2], uint32_t numbers) {
    if (Apart) numbers = __byte_perm(numbers, 0, 0x3120);
#if __CUDA_ARCH__ >= 890
    asm("{\n.reg .b16 low, high;\nmov.b32 {low, high}, %2;\ncvt.rn.f16x2.e4m3x2 %0, low;\n"
        "cvt.rn.f16x2.e4m3x2 %1, high;\n}"
        : "=r"(pairs[0]), "=r"(pairs[1])
        : "r"(numbers));
#else
    constexpr uint32_t kSelect[2] = {0x1404, 0x3424};
#pragma unroll
    for (int n = 0; n < 2; ++n) {
      // Chips without the instruction: the bits in the places of a float16 are the number times 2^-8, subnormal ones
      // too. Bits 0x7f are NaN, and NaN in float16 is any number with these bits and more.
      const uint32_t bytes = __byte_perm(numbers, 0, kSelect[n]);
      const uint32_t nan = __vcmpeq2(bytes & 0x7f007f00, 0x7f007f00) & 0x7fff7fff;
      const uint32_t bits = (bytes & 0x80008000) | (bytes >> 1 & 0x3f803f80);
      const __half2 scaled = __hmul2(*reinterpret_cast<const __half2*>(&bits), __float2half2_rn(256.f));
      pairs[n] = *reinterpret_cast<const uint32_t*>(&scaled) | nan;
    }
#endif
  }
};

template <>
struct Cache<E5m2> {
  using Compute = __half;
  // The upper half of a float16.
  template <bool Apart>
  static __device__ __forceinline__ void widen(uint32_t (&pairs)[2], uint32_t numbers) {
    pairs[0] = __byte_perm(numbers, 0, Apart ? 0x2404 : 0x1404);
    pairs[1] = __byte_perm(numbers, 0, Apart ? 0x3414 : 0x3424);
  }
};

template <>
struct Cache<Int8> {
  using Compute = __half;
  template <bool Apart>
  static __device__ __forceinline__ void widen(uint32_t (&pairs)[2], uint32_t numbers) {
    // Magic-number conversion: with its sign bit flipped, a number plus 128 is the last byte of 1024 + number + 128.
    const uint32_t shifted = numbers ^ 0x80808080, magic = 0x64646464;
    const __half2 offset = __float2half2_rn(-1152.f);
    const uint32_t raised[2] = {
        __byte_perm(shifted, magic, Apart ? 0x4240 : 0x4140), __byte_perm(shifted, magic, Apart ? 0x4341 : 0x4342)};
#pragma unroll
    for (int n = 0; n < 2; ++n) {
      const __half2 pair = __hadd2(*reinterpret_cast<const __half2*>(&raised[n]), offset);
      pairs[n] = *reinterpret_cast<const uint32_t*>(&pair);
    }
  }
};

}  // namespace ejkernel
