// The element types that a KV cache may have, and how 8-bit elements become pairs of float16 for the tensor cores.
//
// `widen` takes a 32-bit register with the elements a, b, c, d and returns two registers, with the pairs (a, b) and (c,
// d) or, with `Apart`, (a, c) and (b, d). Each value of these 8-bit types is exact in float16.
#pragma once

#include "common/tensor_core.cuh"

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

// Compute: the dtype of the products' operands. 16-bit elements are multiplied as they are.
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
      // Without the conversion instruction: the bits of an E4M3 number, shifted to the exponent and mantissa of a
      // float16, are the number times 2^-8, subnormal numbers included. 0x7f is NaN in E4M3, and is replaced by a NaN
      // of float16.
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
  // An E5M2 number is the upper byte of the equal float16.
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
    // Magic-number conversion: x with its sign bit flipped is x + 128, which becomes the last byte of 1024 + 128 + x.
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
