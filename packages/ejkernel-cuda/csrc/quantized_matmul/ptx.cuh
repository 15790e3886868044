// PTX instructions that only the quantised matmul uses.
#pragma once

#include <cstdint>

namespace ejkernel::quantized_matmul {

// (x & Mask) | Base in one instruction; the compiler emits two for C++ code with two constants.
template <uint32_t Mask, uint32_t Base>
__device__ __forceinline__ uint32_t mask_or(uint32_t x) {
  uint32_t y;
  asm("lop3.b32 %0, %1, %2, %3, 0xEA;" : "=r"(y) : "r"(x), "n"(Mask), "n"(Base));
  return y;
}

// cp.async of 4 bytes, or of zeros if `bytes` is 0. It goes through L1, since neighbouring words are read soon.
__device__ __forceinline__ void copy_word_async(uint32_t to, const void* from, int bytes) {
  asm volatile("cp.async.ca.shared.global [%0], [%1], 4, %2;" ::"r"(to), "l"(from), "r"(bytes) : "memory");
}

// cp.async of 8 bytes: four scales. It goes through L1, since neighbouring scales are read soon.
__device__ __forceinline__ void copy_four_async(uint32_t to, const void* from) {
  asm volatile("cp.async.ca.shared.global [%0], [%1], 8;" ::"r"(to), "l"(from) : "memory");
}

// A cluster barrier that makes the blocks' stores to shared memory visible in the cluster. Chips before 9.0 have none.
__device__ __forceinline__ void synchronise_stores_of_cluster() {
#if __CUDA_ARCH__ >= 900
  asm volatile("barrier.cluster.arrive.release.aligned;\nbarrier.cluster.wait.acquire.aligned;" ::: "memory");
#endif
}

// A cluster barrier without memory ordering.
__device__ __forceinline__ void synchronise_cluster() {
#if __CUDA_ARCH__ >= 900
  asm volatile("barrier.cluster.arrive.relaxed.aligned;\nbarrier.cluster.wait.aligned;" ::: "memory");
#endif
}

}  // namespace ejkernel::quantized_matmul
