// A product of two tiles in shared memory that only gates per key channel need.
#pragma once

#include "delta_rule/ptx.cuh"

namespace ejkernel::delta_rule {

#define EJKERNEL_D(i) "+f"(d[i][0]), "+f"(d[i][1]), "+f"(d[i][2]), "+f"(d[i][3])

// d = a b or d += a b: [64, 64] of a [64, 16] and b [16, 64] in shared memory; the rows of b are contracted.
__device__ __forceinline__ void multiply_shared_rows(float (&d)[8][4], uint64_t a, uint64_t b, int add) {
  asm volatile(
      "{.reg .pred p; setp.ne.b32 p, %34, 0;\n"
      "wgmma.mma_async.sync.aligned.m64n64k16.f32.bf16.bf16 {%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, "
      "%12, %13, %14, %15, %16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31}, "
      "%32, %33, p, 1, 1, 0, 1;}"
      : EJKERNEL_D(0), EJKERNEL_D(1), EJKERNEL_D(2), EJKERNEL_D(3), EJKERNEL_D(4), EJKERNEL_D(5), EJKERNEL_D(6),
        EJKERNEL_D(7)
      : "l"(a), "l"(b), "r"(add));
}

#undef EJKERNEL_D

}  // namespace ejkernel::delta_rule
