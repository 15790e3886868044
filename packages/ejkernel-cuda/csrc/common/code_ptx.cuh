// Wrappers of the PTX instructions of decode attention over codes: loads and stores of shared memory by its addresses,
// loads of norms, and the transposition of a fragment.
#pragma once

#include <cstdint>

namespace ejkernel {

template <int Words>
__device__ __forceinline__ void load_words(uint32_t (&words)[Words], uint32_t from) {
  if constexpr (Words == 4) {
    asm volatile("ld.shared.v4.b32 {%0, %1, %2, %3}, [%4];"
                 : "=r"(words[0]), "=r"(words[1]), "=r"(words[2]), "=r"(words[3]) : "r"(from) : "memory");
  } else if constexpr (Words == 2) {
    asm volatile("ld.shared.v2.b32 {%0, %1}, [%2];" : "=r"(words[0]), "=r"(words[1]) : "r"(from) : "memory");
  } else {
#pragma unroll
    for (int n = 0; n < Words; ++n) {
      asm volatile("ld.shared.b32 %0, [%1];" : "=r"(words[n]) : "r"(from + n * 4) : "memory");
    }
  }
}

__device__ __forceinline__ uint32_t load_half_word(uint32_t from) {
  uint32_t word;
  asm volatile("{\n.reg .b16 half;\nld.shared.b16 half, [%1];\ncvt.u32.u16 %0, half;\n}"
               : "=r"(word) : "r"(from) : "memory");
  return word;
}

// Loads entries of a table, which does not change: not volatile, so that the compiler may move the load.
template <int Words>
__device__ __forceinline__ void load_entries(uint32_t (&words)[Words], uint32_t from) {
  if constexpr (Words == 4) {
    asm("ld.shared.v4.b32 {%0, %1, %2, %3}, [%4];"
        : "=r"(words[0]), "=r"(words[1]), "=r"(words[2]), "=r"(words[3]) : "r"(from));
  } else if constexpr (Words == 2) {
    asm("ld.shared.v2.b32 {%0, %1}, [%2];" : "=r"(words[0]), "=r"(words[1]) : "r"(from));
  } else {
    static_assert(Words == 1, "1, 2 or 4 words");
    asm("ld.shared.b32 %0, [%1];" : "=r"(words[0]) : "r"(from));
  }
}

__device__ __forceinline__ uint32_t load_word(uint32_t from) {
  uint32_t word;
  asm volatile("ld.shared.b32 %0, [%1];" : "=r"(word) : "r"(from) : "memory");
  return word;
}

__device__ __forceinline__ float load_float(uint32_t from) {
  float x;
  asm volatile("ld.shared.f32 %0, [%1];" : "=f"(x) : "r"(from) : "memory");
  return x;
}

__device__ __forceinline__ void store_word(uint32_t to, uint32_t word) {
  asm volatile("st.shared.b32 [%0], %1;" ::"r"(to), "r"(word) : "memory");
}

// Loads norms of a token, which other lanes' copies do not wait for.
__device__ __forceinline__ uint32_t load_norm_pair(const uint32_t* from) {
  uint32_t norms;
  asm volatile("ld.global.b32 %0, [%1];" : "=r"(norms) : "l"(from));
  return norms;
}
__device__ __forceinline__ uint32_t load_norm(const uint16_t* from) {
  uint32_t norm;
  asm volatile("{\n.reg .b16 half;\nld.global.b16 half, [%1];\ncvt.u32.u16 %0, half;\n}" : "=r"(norm) : "l"(from));
  return norm;
}

// movmatrix: transposes an 8x8 matrix of 16-bit elements.
__device__ __forceinline__ uint32_t transpose_matrix(uint32_t rows) {
  uint32_t columns;
  asm volatile("movmatrix.sync.aligned.m8n8.trans.b16 %0, %1;" : "=r"(columns) : "r"(rows));
  return columns;
}

}  // namespace ejkernel
