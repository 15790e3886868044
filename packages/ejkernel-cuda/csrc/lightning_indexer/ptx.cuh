// PTX instructions that only the indexer uses: WGMMA with e4m3 operands, a maximum that keeps NaN, turns of warpgroups.
#pragma once

#include <cstdint>

#include "common/tensor_core.cuh"

namespace ejkernel::lightning_indexer {

#define EJKERNEL_D(i) "+f"(d[i][0]), "+f"(d[i][1]), "+f"(d[i][2]), "+f"(d[i][3])
#define EJKERNEL_D4(i) EJKERNEL_D(i), EJKERNEL_D(i + 1), EJKERNEL_D(i + 2), EJKERNEL_D(i + 3)
#define EJKERNEL_D8(i) EJKERNEL_D4(i), EJKERNEL_D4(i + 4)

// d = a b^T, or d += a b^T: a is [64, 32] and b is [256, 32], channels from 32 `Step` on of rows of 128 e4m3 numbers with
// the 128-byte swizzle. Addresses are in units of 16 bytes. The low word of a descriptor also has a stride that this
// layout does not use; the upper one has the swizzle and the stride of eight rows.
template <int Step, bool Add>
__device__ __forceinline__ void multiply_rows(float (&d)[32][4], uint32_t a, uint32_t b) {
  constexpr uint32_t kLowWord = (1u << 16) + 2 * Step, kUpperWord = 1u << 30 | 1024 / 16;
  asm volatile(
      "{.reg .b32 low; .reg .b64 left, right;\n"
      "add.u32 low, %128, %130; mov.b64 left, {low, %131}; add.u32 low, %129, %130; mov.b64 right, {low, %131};\n"
      "wgmma.mma_async.sync.aligned.m64n256k32.f32.e4m3.e4m3 "
      "{%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, %16, %17, %18, %19, %20, %21, "
      "%22, %23, %24, %25, %26, %27, %28, %29, %30, %31, %32, %33, %34, %35, %36, %37, %38, %39, %40, %41, "
      "%42, %43, %44, %45, %46, %47, %48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, "
      "%62, %63, %64, %65, %66, %67, %68, %69, %70, %71, %72, %73, %74, %75, %76, %77, %78, %79, %80, %81, "
      "%82, %83, %84, %85, %86, %87, %88, %89, %90, %91, %92, %93, %94, %95, %96, %97, %98, %99, %100, %101, "
      "%102, %103, %104, %105, %106, %107, %108, %109, %110, %111, %112, %113, %114, %115, %116, %117, %118, "
      "%119, %120, %121, %122, %123, %124, %125, %126, %127"
      "}, left, right, %132, 1, 1;}"
      : EJKERNEL_D8(0), EJKERNEL_D8(8), EJKERNEL_D8(16), EJKERNEL_D8(24)
      : "r"(a), "r"(b), "n"(kLowWord), "n"(kUpperWord), "n"(Add ? 1 : 0));
}

#undef EJKERNEL_D
#undef EJKERNEL_D4
#undef EJKERNEL_D8

// max(0, x), and NaN for NaN.
__device__ __forceinline__ float rectify(float x) {
  float y;
  asm("max.NaN.f32 %0, %1, 0f00000000;" : "=f"(y) : "f"(x));
  return y;
}

// Waits for, or passes on, the turn of a warpgroup of two: barriers 2 and 3, of 256 threads.
__device__ __forceinline__ void await_turn(int warpgroup) {
  asm volatile("bar.sync %0, 256;" ::"r"(2 + warpgroup) : "memory");
}
__device__ __forceinline__ void pass_turn(int warpgroup) {
  asm volatile("bar.arrive %0, 256;" ::"r"(3 - warpgroup) : "memory");
}

}  // namespace ejkernel::lightning_indexer
