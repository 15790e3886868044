// Wrappers of the PTX instructions of the decode step of linear recurrences, sm_80 and later.
#pragma once

#include "common/tensor_core.cuh"

namespace ejkernel::recurrent_step {

// c += a b in TF32, for a of 16 x 8 and b of 8 x 8.
__device__ __forceinline__ void multiply_tf32(float (&c)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {
  asm volatile(
      "mma.sync.aligned.m16n8k8.row.col.f32.tf32.tf32.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "
      "{%0, %1, %2, %3};"
      : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

// Transposes the 8 x 8 matrix of 16-bit elements whose rows the lanes hold.
__device__ __forceinline__ uint32_t transpose_matrix(uint32_t pair) {
  uint32_t result;
  asm volatile("movmatrix.sync.aligned.m8n8.trans.b16 %0, %1;" : "=r"(result) : "r"(pair));
  return result;
}

// cp.async of 8 and of 4 bytes, or of zeros if `bytes` is 0.
__device__ __forceinline__ void copy_async_8(uint32_t to, const void* from, int bytes) {
  asm volatile("cp.async.ca.shared.global [%0], [%1], 8, %2;" ::"r"(to), "l"(from), "r"(bytes) : "memory");
}
__device__ __forceinline__ void copy_async_4(uint32_t to, const void* from, int bytes) {
  asm volatile("cp.async.ca.shared.global [%0], [%1], 4, %2;" ::"r"(to), "l"(from), "r"(bytes) : "memory");
}

// A 16-byte store; for a struct of four floats the compiler emits four stores, each of a part of a sector.
__device__ __forceinline__ void store_four(float* to, float a, float b, float c, float d) {
  asm volatile("st.global.v4.f32 [%0], {%1, %2, %3, %4};" ::"l"(to), "f"(a), "f"(b), "f"(c), "f"(d) : "memory");
}

}  // namespace ejkernel::recurrent_step
