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

// Makes a thread's writes to shared memory visible to bulk copies that are issued after a barrier.
__device__ __forceinline__ void publish_to_copies() {
  asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
}

// Bulk copy from shared memory, in a group of this thread's stores.
__device__ __forceinline__ void store_bulk(void* to, uint32_t from, uint32_t bytes) {
  asm volatile("cp.async.bulk.global.shared::cta.bulk_group [%0], [%1], %2;" ::"l"(to), "r"(from), "r"(bytes)
               : "memory");
}

// Waits until this thread's bulk stores have read shared memory.
__device__ __forceinline__ void wait_for_store_reads() {
  asm volatile("cp.async.bulk.commit_group;\ncp.async.bulk.wait_group.read 0;" ::: "memory");
}

__device__ __forceinline__ void sleep_for(unsigned nanoseconds) {
  asm volatile("nanosleep.u32 %0;" ::"r"(nanoseconds));
}

// Loads 16 bytes of shared memory once more, even if the compiler knows registers that have them.
__device__ __forceinline__ float4 load_again(uint32_t from) {
  float4 x;
  asm volatile("ld.volatile.shared.v4.f32 {%0, %1, %2, %3}, [%4];"
               : "=f"(x.x), "=f"(x.y), "=f"(x.z), "=f"(x.w)
               : "r"(from));
  return x;
}

// A 16-byte store; for a struct of four floats the compiler emits four stores, each of a part of a sector.
__device__ __forceinline__ void store_four(float* to, float a, float b, float c, float d) {
  asm volatile("st.global.v4.f32 [%0], {%1, %2, %3, %4};" ::"l"(to), "f"(a), "f"(b), "f"(c), "f"(d) : "memory");
}

}  // namespace ejkernel::recurrent_step
