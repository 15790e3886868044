// PTX instructions of grouped attention to listed keys: WGMMA of registers with tiles of 64 keys, copies that signal.
#pragma once

#include <cstdint>

namespace ejkernel::grouped_sparse_attention {

// Descriptors: the low word has the address and the stride of chunks, in units of 16 bytes, the upper one the 128-byte
// swizzle and the stride of eight rows. Low words are computed next to the instructions: computed before a loop, they would
// take registers.
constexpr uint32_t kUpperWord = 1u << 30 | 1024 / 16;
constexpr uint32_t kStrideOfRows = 1u << 16, kStrideOfChunks = (8192u / 16) << 16;

// Arrives when this thread's earlier cp.async copies are complete; the barrier's count includes this arrival.
__device__ __forceinline__ void arrive_after_copies(uint32_t barrier) {
  asm volatile("cp.async.mbarrier.arrive.noinc.shared::cta.b64 [%0];" ::"r"(barrier) : "memory");
}

#define EJKERNEL_D(i) "+f"(d[i][0]), "+f"(d[i][1]), "+f"(d[i][2]), "+f"(d[i][3])
#define EJKERNEL_D4(i) EJKERNEL_D(i), EJKERNEL_D(i + 1), EJKERNEL_D(i + 2), EJKERNEL_D(i + 3)

// d = a b^T, or d += a b^T: a is [64, 16] and b is [64, 16], rows of a chunk at an offset in units of 16 bytes.
template <uint32_t B, bool Add>
__device__ __forceinline__ void multiply_keys(float (&d)[8][4], const uint32_t (&a)[4], uint32_t shared) {
  asm volatile(
      "{.reg .b32 low; .reg .b64 right;\n"
      "add.u32 low, %36, %37; mov.b64 right, {low, %38};\n"
      "wgmma.mma_async.sync.aligned.m64n64k16.f32.bf16.bf16 "
      "{%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, %16, %17, %18, %19, %20, %21, "
      "%22, %23, %24, %25, %26, %27, %28, %29, %30, %31"
      "}, {%32, %33, %34, %35}, right, %39, 1, 1, 0;}"
      : EJKERNEL_D4(0), EJKERNEL_D4(4)
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(shared), "n"(B + kStrideOfRows), "n"(kUpperWord),
        "n"(Add ? 1 : 0));
}

// d += a b: a is [64, 16] and b is [16, 128], rows of two chunks.
template <uint32_t B>
__device__ __forceinline__ void add_values(float (&d)[16][4], const uint32_t (&a)[4], uint32_t shared) {
  asm volatile(
      "{.reg .b32 low; .reg .b64 right;\n"
      "add.u32 low, %68, %69; mov.b64 right, {low, %70};\n"
      "wgmma.mma_async.sync.aligned.m64n128k16.f32.bf16.bf16 "
      "{%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, %16, %17, %18, %19, %20, %21, "
      "%22, %23, %24, %25, %26, %27, %28, %29, %30, %31, %32, %33, %34, %35, %36, %37, %38, %39, %40, %41, "
      "%42, %43, %44, %45, %46, %47, %48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, "
      "%62, %63"
      "}, {%64, %65, %66, %67}, right, 1, 1, 1, 1;}"
      : EJKERNEL_D4(0), EJKERNEL_D4(4), EJKERNEL_D4(8), EJKERNEL_D4(12)
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(shared), "n"(B + kStrideOfChunks), "n"(kUpperWord));
}

#undef EJKERNEL_D
#undef EJKERNEL_D4

}  // namespace ejkernel::grouped_sparse_attention
