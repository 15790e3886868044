// PTX instructions that only token-sparse attention uses: WGMMA with 256 columns, copies that signal an mbarrier, stmatrix.
#pragma once

#include <cstdint>

#include "common/tensor_core.cuh"

namespace ejkernel::token_sparse_attention {

#define EJKERNEL_D(i) "+f"(d[i][0]), "+f"(d[i][1]), "+f"(d[i][2]), "+f"(d[i][3])
#define EJKERNEL_D4(i) EJKERNEL_D(i), EJKERNEL_D(i + 1), EJKERNEL_D(i + 2), EJKERNEL_D(i + 3)
#define EJKERNEL_D8(i) EJKERNEL_D4(i), EJKERNEL_D4(i + 4)

// Descriptors: the low word has the address and the stride of chunks, in units of 16 bytes, the upper one the 128-byte
// swizzle and the stride of eight rows. Low words are computed next to the instructions, as offsets from the address of
// the block's shared memory: computed before a loop, they would take registers.
constexpr uint32_t kUpperWord = 1u << 30 | 1024 / 16;
constexpr uint32_t kStrideOfRows = 1u << 16, kStrideOfChunks = (8192u / 16) << 16;

// d = a b^T, or d += a b^T: a is [64, 16] and b is [64, 16], rows of chunks at offsets in units of 16 bytes.
template <uint32_t A, uint32_t B, bool Add>
__device__ __forceinline__ void multiply_rows(float (&d)[8][4], uint32_t shared) {
  asm volatile(
      "{.reg .b32 low; .reg .b64 left, right;\n"
      "add.u32 low, %32, %33; mov.b64 left, {low, %35}; add.u32 low, %32, %34; mov.b64 right, {low, %35};\n"
      "wgmma.mma_async.sync.aligned.m64n64k16.f32.bf16.bf16 "
      "{%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, %16, %17, %18, %19, %20, %21, "
      "%22, %23, %24, %25, %26, %27, %28, %29, %30, %31"
      "}, left, right, %36, 1, 1, 0, 0;}"
      : EJKERNEL_D8(0)
      : "r"(shared), "n"(A + kStrideOfRows), "n"(B + kStrideOfRows), "n"(kUpperWord), "n"(Add ? 1 : 0));
}

// The same with a in registers.
template <uint32_t B>
__device__ __forceinline__ void add_product_of_rows(float (&d)[8][4], const uint32_t (&a)[4], uint32_t shared) {
  asm volatile(
      "{.reg .b32 low; .reg .b64 right;\n"
      "add.u32 low, %36, %37; mov.b64 right, {low, %38};\n"
      "wgmma.mma_async.sync.aligned.m64n64k16.f32.bf16.bf16 "
      "{%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, %16, %17, %18, %19, %20, %21, "
      "%22, %23, %24, %25, %26, %27, %28, %29, %30, %31"
      "}, {%32, %33, %34, %35}, right, 1, 1, 1, 0;}"
      : EJKERNEL_D8(0)
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(shared), "n"(B + kStrideOfRows), "n"(kUpperWord));
}

// d += a b: a is [64, 16] and b is [16, 256], rows of four chunks.
template <uint32_t A, uint32_t B>
__device__ __forceinline__ void add_product(float (&d)[32][4], uint32_t shared) {
  asm volatile(
      "{.reg .b32 low; .reg .b64 left, right;\n"
      "add.u32 low, %128, %129; mov.b64 left, {low, %131}; add.u32 low, %128, %130; mov.b64 right, {low, %131};\n"
      "wgmma.mma_async.sync.aligned.m64n256k16.f32.bf16.bf16 "
      "{%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, %16, %17, %18, %19, %20, %21, "
      "%22, %23, %24, %25, %26, %27, %28, %29, %30, %31, %32, %33, %34, %35, %36, %37, %38, %39, %40, %41, "
      "%42, %43, %44, %45, %46, %47, %48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, "
      "%62, %63, %64, %65, %66, %67, %68, %69, %70, %71, %72, %73, %74, %75, %76, %77, %78, %79, %80, %81, "
      "%82, %83, %84, %85, %86, %87, %88, %89, %90, %91, %92, %93, %94, %95, %96, %97, %98, %99, %100, %101, "
      "%102, %103, %104, %105, %106, %107, %108, %109, %110, %111, %112, %113, %114, %115, %116, %117, %118, "
      "%119, %120, %121, %122, %123, %124, %125, %126, %127"
      "}, left, right, 1, 1, 1, 0, 1;}"
      : EJKERNEL_D8(0), EJKERNEL_D8(8), EJKERNEL_D8(16), EJKERNEL_D8(24)
      : "r"(shared), "n"(A + kStrideOfRows), "n"(B + kStrideOfChunks), "n"(kUpperWord));
}

// The same with a in registers.
template <uint32_t B>
__device__ __forceinline__ void add_product(float (&d)[32][4], const uint32_t (&a)[4], uint32_t shared) {
  asm volatile(
      "{.reg .b32 low; .reg .b64 right;\n"
      "add.u32 low, %132, %133; mov.b64 right, {low, %134};\n"
      "wgmma.mma_async.sync.aligned.m64n256k16.f32.bf16.bf16 "
      "{%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, %16, %17, %18, %19, %20, %21, "
      "%22, %23, %24, %25, %26, %27, %28, %29, %30, %31, %32, %33, %34, %35, %36, %37, %38, %39, %40, %41, "
      "%42, %43, %44, %45, %46, %47, %48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, "
      "%62, %63, %64, %65, %66, %67, %68, %69, %70, %71, %72, %73, %74, %75, %76, %77, %78, %79, %80, %81, "
      "%82, %83, %84, %85, %86, %87, %88, %89, %90, %91, %92, %93, %94, %95, %96, %97, %98, %99, %100, %101, "
      "%102, %103, %104, %105, %106, %107, %108, %109, %110, %111, %112, %113, %114, %115, %116, %117, %118, "
      "%119, %120, %121, %122, %123, %124, %125, %126, %127"
      "}, {%128, %129, %130, %131}, right, 1, 1, 1, 1;}"
      : EJKERNEL_D8(0), EJKERNEL_D8(8), EJKERNEL_D8(16), EJKERNEL_D8(24)
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(shared), "n"(B + kStrideOfChunks), "n"(kUpperWord));
}

#undef EJKERNEL_D
#undef EJKERNEL_D4
#undef EJKERNEL_D8

// Arrives when this thread's earlier cp.async copies are complete; the barrier's count includes this arrival.
__device__ __forceinline__ void arrive_after_copies(uint32_t barrier) {
  asm volatile("cp.async.mbarrier.arrive.noinc.shared::cta.b64 [%0];" ::"r"(barrier) : "memory");
}

// Stores four 8x8 matrices of 16-bit elements; lane l passes the address of row l % 8 of matrix l / 8.
__device__ __forceinline__ void store_matrices(uint32_t row, const uint32_t (&matrices)[4]) {
  asm volatile("stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(row), "r"(matrices[0]),
               "r"(matrices[1]), "r"(matrices[2]), "r"(matrices[3])
               : "memory");
}

// bar.sync and bar.arrive of `Threads` threads that share barrier `Id`.
template <int Id, int Threads>
__device__ __forceinline__ void synchronise_at() {
  asm volatile("bar.sync %0, %1;" ::"n"(Id), "n"(Threads) : "memory");
}
template <int Id, int Threads>
__device__ __forceinline__ void arrive_at() {
  asm volatile("bar.arrive %0, %1;" ::"n"(Id), "n"(Threads) : "memory");
}

// A cluster barrier that makes the blocks' stores to shared memory visible in the cluster.
__device__ __forceinline__ void synchronise_cluster() {
  asm volatile("barrier.cluster.arrive.release.aligned;\nbarrier.cluster.wait.acquire.aligned;" ::: "memory");
}

// Loads from the shared memory of a block of the cluster, at an address of this block's.
__device__ __forceinline__ float load_of_block(const float* from, int rank) {
  float x;
  asm volatile(
      "{.reg .b32 at; mapa.shared::cluster.u32 at, %1, %2; ld.shared::cluster.f32 %0, [at];}"
      : "=f"(x)
      : "r"(shared_address(from)), "r"(rank)
      : "memory");
  return x;
}
__device__ __forceinline__ float4 load_four_of_block(const float* from, int rank) {
  float4 x;
  asm volatile(
      "{.reg .b32 at; mapa.shared::cluster.u32 at, %4, %5; ld.shared::cluster.v4.f32 {%0, %1, %2, %3}, [at];}"
      : "=f"(x.x), "=f"(x.y), "=f"(x.z), "=f"(x.w)
      : "r"(shared_address(from)), "r"(rank)
      : "memory");
  return x;
}

// 2 ** x, approximately.
__device__ __forceinline__ float exp2_approximate(float x) {
  float y;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

}  // namespace ejkernel::token_sparse_attention
