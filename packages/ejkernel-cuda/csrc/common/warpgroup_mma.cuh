// Wrappers of Hopper's PTX instructions: products of a warpgroup (WGMMA), mbarriers, bulk asynchronous copies.
#pragma once

#include <cstdint>

namespace ejkernel {

// Makes this thread's register writes visible to the products that follow.
__device__ __forceinline__ void fence_products() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }
__device__ __forceinline__ void commit_products() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }

// Waits for all products but the newest `Pending` groups. Accumulators that are passed are not read before the wait.
template <int Pending, int Tiles>
__device__ __forceinline__ void wait_for_products(float (&d)[Tiles][4]) {
  asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(Pending) : "memory");
#pragma unroll
  for (int i = 0; i < Tiles * 4; ++i) asm volatile("" : "+f"(d[i / 4][i % 4])::"memory");
}

// The same, for accumulators that are not read yet.
template <int Pending>
__device__ __forceinline__ void wait_for_products() {
  asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(Pending) : "memory");
}

// d = a b, or d += a b: a is [64, 16] in the registers of four warps, b [16, 8 Tiles] in shared memory. The descriptor
// of b has its address in bits 0 to 13, the stride between 8 contracted elements in bits 16 to 29, and the stride
// between 8 columns in bits 32 to 45, all divided by 16. 8 elements of a column are 16 bytes, and 8 such columns are
// contiguous.
template <int Tiles>
struct WarpgroupProduct;

#define EJKERNEL_D(i) "+f"(d[i][0]), "+f"(d[i][1]), "+f"(d[i][2]), "+f"(d[i][3])

template <>
struct WarpgroupProduct<1> {
  static __device__ __forceinline__ void multiply(float (&d)[1][4], const uint32_t (&a)[4], uint64_t b, int add) {
    asm volatile(
        "{.reg .pred p; setp.ne.b32 p, %9, 0;\n"
        "wgmma.mma_async.sync.aligned.m64n8k16.f32.bf16.bf16 {%0, %1, %2, %3}, {%4, %5, %6, %7}, %8, p, 1, 1, 0;}"
        : EJKERNEL_D(0)
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(add));
  }
};

template <>
struct WarpgroupProduct<2> {
  static __device__ __forceinline__ void multiply(float (&d)[2][4], const uint32_t (&a)[4], uint64_t b, int add) {
    asm volatile(
        "{.reg .pred p; setp.ne.b32 p, %13, 0;\n"
        "wgmma.mma_async.sync.aligned.m64n16k16.f32.bf16.bf16 {%0, %1, %2, %3, %4, %5, %6, %7}, {%8, %9, %10, %11}, "
        "%12, p, 1, 1, 0;}"
        : EJKERNEL_D(0), EJKERNEL_D(1)
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(add));
  }
};

template <>
struct WarpgroupProduct<4> {
  static __device__ __forceinline__ void multiply(float (&d)[4][4], const uint32_t (&a)[4], uint64_t b, int add) {
    asm volatile(
        "{.reg .pred p; setp.ne.b32 p, %21, 0;\n"
        "wgmma.mma_async.sync.aligned.m64n32k16.f32.bf16.bf16 {%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, "
        "%12, %13, %14, %15}, {%16, %17, %18, %19}, %20, p, 1, 1, 0;}"
        : EJKERNEL_D(0), EJKERNEL_D(1), EJKERNEL_D(2), EJKERNEL_D(3)
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(add));
  }
};

template <>
struct WarpgroupProduct<6> {
  static __device__ __forceinline__ void multiply(float (&d)[6][4], const uint32_t (&a)[4], uint64_t b, int add) {
    asm volatile(
        "{.reg .pred p; setp.ne.b32 p, %29, 0;\n"
        "wgmma.mma_async.sync.aligned.m64n48k16.f32.bf16.bf16 {%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, "
        "%12, %13, %14, %15, %16, %17, %18, %19, %20, %21, %22, %23}, {%24, %25, %26, %27}, %28, p, 1, 1, 0;}"
        : EJKERNEL_D(0), EJKERNEL_D(1), EJKERNEL_D(2), EJKERNEL_D(3), EJKERNEL_D(4), EJKERNEL_D(5)
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(add));
  }
};

template <>
struct WarpgroupProduct<8> {
  static __device__ __forceinline__ void multiply(float (&d)[8][4], const uint32_t (&a)[4], uint64_t b, int add) {
    asm volatile(
        "{.reg .pred p; setp.ne.b32 p, %37, 0;\n"
        "wgmma.mma_async.sync.aligned.m64n64k16.f32.bf16.bf16 {%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, "
        "%12, %13, %14, %15, %16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31}, "
        "{%32, %33, %34, %35}, %36, p, 1, 1, 0;}"
        : EJKERNEL_D(0), EJKERNEL_D(1), EJKERNEL_D(2), EJKERNEL_D(3), EJKERNEL_D(4), EJKERNEL_D(5), EJKERNEL_D(6),
          EJKERNEL_D(7)
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(add));
  }
};

#undef EJKERNEL_D

// Makes this thread's stores to shared memory visible to products and bulk copies.
__device__ __forceinline__ void fence_shared_stores() { asm volatile("fence.proxy.async.shared::cta;" ::: "memory"); }

// Raises or lowers the register limit of the threads of this warpgroup (setmaxnreg).
template <int Count>
__device__ __forceinline__ void take_registers() {
  asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(Count));
}
template <int Count>
__device__ __forceinline__ void give_registers() {
  asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(Count));
}

// __syncthreads() of the first `Threads` threads of a block.
template <int Threads>
__device__ __forceinline__ void synchronise_first() {
  asm volatile("bar.sync 1, %0;" ::"n"(Threads) : "memory");
}

__device__ __forceinline__ void start_barrier(uint32_t barrier, int arrivals) {
  asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(barrier), "r"(arrivals) : "memory");
}

// Makes initialised mbarriers visible to bulk copies.
__device__ __forceinline__ void publish_barriers() {
  asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
}

__device__ __forceinline__ void arrive(uint32_t barrier) {
  asm volatile("mbarrier.arrive.release.cta.shared::cta.b64 _, [%0];" ::"r"(barrier) : "memory");
}

// Arrives, and adds the bytes of bulk copies that the phase must wait for.
__device__ __forceinline__ void arrive_and_expect(uint32_t barrier, uint32_t bytes) {
  asm volatile("mbarrier.arrive.expect_tx.release.cta.shared::cta.b64 _, [%0], %1;" ::"r"(barrier), "r"(bytes)
               : "memory");
}

__device__ __forceinline__ void wait_for_phase(uint32_t barrier, uint32_t phase) {
  asm volatile(
      "{\n.reg .pred done;\nAGAIN:\n"
      "mbarrier.try_wait.parity.acquire.cta.shared::cta.b64 done, [%0], %1;\n"
      "@done bra.uni DONE;\nbra.uni AGAIN;\nDONE:\n}" ::"r"(barrier),
      "r"(phase)
      : "memory");
}

// Bulk copy from device memory, which signals `barrier` with its bytes.
__device__ __forceinline__ void copy_bulk(uint32_t to, const void* from, uint32_t bytes, uint32_t barrier) {
  asm volatile(
      "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(to), "l"(from),
      "r"(bytes), "r"(barrier)
      : "memory");
}

// The same for a tile of a matrix that a tensor map describes.
__device__ __forceinline__ void copy_tile(uint32_t to, const void* map, int column, int row, uint32_t barrier) {
  asm volatile(
      "cp.async.bulk.tensor.2d.shared::cluster.global.tile.mbarrier::complete_tx::bytes [%0], [%1, {%2, %3}], [%4];" ::
          "r"(to),
      "l"(map), "r"(column), "r"(row), "r"(barrier)
      : "memory");
}

// Prefetches such a tile into L2.
__device__ __forceinline__ void prefetch_tile(const void* map, int column, int row) {
  asm volatile("cp.async.bulk.prefetch.tensor.2d.L2.global.tile [%0, {%1, %2}];" ::"l"(map), "r"(column), "r"(row)
               : "memory");
}

// Prefetches the tensor map itself.
__device__ __forceinline__ void prefetch_map(const void* map) {
  asm volatile("prefetch.tensormap [%0];" ::"l"(map) : "memory");
}

}  // namespace ejkernel
