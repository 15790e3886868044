// TurboQuant's codes as a cache format of the persistent kernel.
#pragma once

#include "common/code_decode.cuh"
#include "paged_decode/paged_decode.cuh"

namespace ejkernel::paged_decode {

struct CodeDecodeParams : PagedDecodeParams, CodeParams {};

template <int KeyBits, int ValueBits, int Signs>
struct CallFormat<Codes<KeyBits, ValueBits, Signs>> {
  using Params = CodeDecodeParams;

  // Fills the tables. The barrier of `find_share` follows.
  template <int Bits>
  static __device__ __forceinline__ void fill(uint32_t* table, const float* codebook, int levels) {
    constexpr int kMask = (1 << Bits) - 1;
    for (int pair = threadIdx.x / 32; pair < 1 << 2 * Bits; pair += blockDim.x / 32) {
      // Codes that the codebook does not have stand for its last entry.
      const float low = codebook[min(pair & kMask, levels - 1)], high = codebook[min(pair >> Bits, levels - 1)];
      table[pair * 64 + threadIdx.x % 32] = Half<__nv_bfloat16>::pack(low, high);
    }
  }

  template <typename S>
  static __device__ __forceinline__ void prepare(const Params& call, unsigned char* shared) {
    uint32_t* const table = reinterpret_cast<uint32_t*>(shared + S::kTable);
    fill<KeyBits>(table, call.key_codebook, call.key_levels);
    fill<ValueBits>(table + 32, call.value_codebook, call.value_levels);
  }
};

}  // namespace ejkernel::paged_decode
