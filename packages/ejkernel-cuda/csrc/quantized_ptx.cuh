// PTX instructions of the quantised matmul alone.
#pragma once

#include <cstdint>

namespace ejkernel {

// (x & Mask) | Base in one instruction; compiled from C++ it is two where both are constants.
template <uint32_t Mask, uint32_t Base>
__device__ __forceinline__ uint32_t mask_or(uint32_t x) {
  uint32_t y;
  asm("lop3.b32 %0, %1, %2, %3, 0xEA;" : "=r"(y) : "r"(x), "n"(Mask), "n"(Base));
  return y;
}

// cp.async of 4 bytes, or of zeros if `bytes` is 0. Neighbours of such a word are read soon: it goes through L1.
__device__ __forceinline__ void copy_word_async(uint32_t to, const void* from, int bytes) {
  asm volatile("cp.async.ca.shared.global [%0], [%1], 4, %2;" ::"r"(to), "l"(from), "r"(bytes) : "memory");
}

// cp.async of 8 bytes: four scales. Neighbours of them are read soon, too.
__device__ __forceinline__ void copy_four_async(uint32_t to, const void* from) {
  asm volatile("cp.async.ca.shared.global [%0], [%1], 8;" ::"r"(to), "l"(from) : "memory");
}

// What the blocks of a cluster stored in their shared memory is there for all of them. Chips before 9.0 have none.
__device__ __forceinline__ void synchronise_stores_of_cluster() {
#if __CUDA_ARCH__ >= 900
  asm volatile("barrier.cluster.arrive.release.aligned;\nbarrier.cluster.wait.acquire.aligned;" ::: "memory");
#endif
}

// Orders nothing but the blocks themselves.
__device__ __forceinline__ void synchronise_cluster() {
#if __CUDA_ARCH__ >= 900
  asm volatile("barrier.cluster.arrive.relaxed.aligned;\nbarrier.cluster.wait.aligned;" ::: "memory");
#endif
}

}  // namespace ejkernel
