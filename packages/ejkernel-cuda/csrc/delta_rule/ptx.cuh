// Wrappers of PTX instructions that only the delta rule's kernel needs: products of two tiles in shared memory,
// matrices of a warp through registers, and bulk copies of three-dimensional arrays.
#pragma once

#include <cstdint>

#include "common/tensor_core.cuh"
#include "common/warpgroup_mma.cuh"

namespace ejkernel::delta_rule {

// Descriptor of an operand in shared memory with 128-byte swizzling: rows of 64 elements, 8 rows are 1024 bytes.
// `next_columns` is the distance between the first 64 and the next 64 elements of a row, which only an operand whose
// rows are contracted needs.
__device__ __forceinline__ uint64_t swizzled_operand(uint32_t address, uint32_t next_columns = 16) {
  return uint64_t((address & 0x3FFFF) >> 4) | uint64_t(next_columns >> 4) << 16 | uint64_t(1024 >> 4) << 32 |
         uint64_t(1) << 62;
}

#define EJKERNEL_D4(i) "+f"(d[i][0]), "+f"(d[i][1]), "+f"(d[i][2]), "+f"(d[i][3])
#define EJKERNEL_D8                                                                                                \
  EJKERNEL_D4(0), EJKERNEL_D4(1), EJKERNEL_D4(2), EJKERNEL_D4(3), EJKERNEL_D4(4), EJKERNEL_D4(5), EJKERNEL_D4(6), \
      EJKERNEL_D4(7)

// d = a b^T or d += a b^T: [64, 64] of a [64, 16] and b [64, 16] in shared memory.
__device__ __forceinline__ void multiply_shared(float (&d)[8][4], uint64_t a, uint64_t b, int add) {
  asm volatile(
      "{.reg .pred p; setp.ne.b32 p, %34, 0;\n"
      "wgmma.mma_async.sync.aligned.m64n64k16.f32.bf16.bf16 {%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, "
      "%12, %13, %14, %15, %16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31}, "
      "%32, %33, p, 1, 1, 0, 0;}"
      : EJKERNEL_D8
      : "l"(a), "l"(b), "r"(add));
}

// d += a b: [64, 128] of a [64, 16] in registers and b [16, 128] in shared memory, whose rows are contracted.
__device__ __forceinline__ void multiply_rows(float (&d)[16][4], const uint32_t (&a)[4], uint64_t b) {
  asm volatile(
      "wgmma.mma_async.sync.aligned.m64n128k16.f32.bf16.bf16 {%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, "
      "%12, %13, %14, %15, %16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31, %32, %33, "
      "%34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47, %48, %49, %50, %51, %52, %53, %54, %55, "
      "%56, %57, %58, %59, %60, %61, %62, %63}, {%64, %65, %66, %67}, %68, 1, 1, 1, 1;"
      : EJKERNEL_D8, EJKERNEL_D4(8), EJKERNEL_D4(9), EJKERNEL_D4(10), EJKERNEL_D4(11), EJKERNEL_D4(12),
        EJKERNEL_D4(13), EJKERNEL_D4(14), EJKERNEL_D4(15)
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b));
}

// d = a b or d += a b: [64, 64] of a [64, 16] in registers and b [16, 64] in shared memory, whose rows are contracted.
__device__ __forceinline__ void multiply_rows(float (&d)[8][4], const uint32_t (&a)[4], uint64_t b, int add) {
  asm volatile(
      "{.reg .pred p; setp.ne.b32 p, %37, 0;\n"
      "wgmma.mma_async.sync.aligned.m64n64k16.f32.bf16.bf16 {%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, "
      "%12, %13, %14, %15, %16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31}, "
      "{%32, %33, %34, %35}, %36, p, 1, 1, 1;}"
      : EJKERNEL_D8
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(add));
}

// d = a b or d += a b: [64, 128] of a [64, 16] and b [16, 128] in shared memory; the rows of b are contracted.
__device__ __forceinline__ void multiply_shared_rows(float (&d)[16][4], uint64_t a, uint64_t b, int add) {
  asm volatile(
      "{.reg .pred p; setp.ne.b32 p, %66, 0;\n"
      "wgmma.mma_async.sync.aligned.m64n128k16.f32.bf16.bf16 {%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, "
      "%12, %13, %14, %15, %16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31, %32, %33, "
      "%34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47, %48, %49, %50, %51, %52, %53, %54, %55, "
      "%56, %57, %58, %59, %60, %61, %62, %63}, %64, %65, p, 1, 1, 0, 1;}"
      : EJKERNEL_D8, EJKERNEL_D4(8), EJKERNEL_D4(9), EJKERNEL_D4(10), EJKERNEL_D4(11), EJKERNEL_D4(12),
        EJKERNEL_D4(13), EJKERNEL_D4(14), EJKERNEL_D4(15)
      : "l"(a), "l"(b), "r"(add));
}

#undef EJKERNEL_D8
#undef EJKERNEL_D4

// Transposes an 8x8 matrix of 16-bit elements among the registers of a warp.
__device__ __forceinline__ uint32_t transpose(uint32_t matrix) {
  uint32_t result;
  asm volatile("movmatrix.sync.aligned.m8n8.trans.b16 %0, %1;" : "=r"(result) : "r"(matrix));
  return result;
}

// Stores four 8x8 matrices of 16-bit elements; lane l passes the address of row l % 8 of matrix l / 8.
__device__ __forceinline__ void store_matrices(uint32_t row, uint32_t a, uint32_t b, uint32_t c, uint32_t d) {
  asm volatile("stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(row), "r"(a), "r"(b), "r"(c),
               "r"(d)
               : "memory");
}

// The same with each matrix transposed.
__device__ __forceinline__ void store_matrices_transposed(
    uint32_t row, uint32_t a, uint32_t b, uint32_t c, uint32_t d) {
  asm volatile("stmatrix.sync.aligned.m8n8.x4.trans.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(row), "r"(a), "r"(b),
               "r"(c), "r"(d)
               : "memory");
}

// __syncthreads() of `Threads` threads that share barrier `id`.
template <int Threads>
__device__ __forceinline__ void synchronise(int id) {
  asm volatile("bar.sync %0, %1;" ::"r"(id), "n"(Threads) : "memory");
}

// __syncthreads() before a bulk copy overwrites what threads have loaded: the barrier alone does not wait for loads whose
// results are used later, and the copy engine does not wait for them. `loaded` has to depend on every load, since
// ptxas changes their order.
__device__ __forceinline__ void synchronise_loads(uint32_t loaded) {
  const bool any = loaded != 0;
  asm volatile("fence.proxy.async.shared::cta;" ::"r"(int(any)) : "memory");
  __syncthreads_or(any);
}

// A cluster barrier in two steps, which makes the blocks' stores to shared memory visible in the cluster.
__device__ __forceinline__ void arrive_at_cluster() {
  asm volatile("barrier.cluster.arrive.release.aligned;" ::: "memory");
}
__device__ __forceinline__ void wait_for_cluster() {
  asm volatile("barrier.cluster.wait.acquire.aligned;" ::: "memory");
}

// The address in the shared memory of a block of the cluster that corresponds to an address of this block's.
__device__ __forceinline__ uint32_t address_in_block(uint32_t address, int rank) {
  uint32_t result;
  asm volatile("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(result) : "r"(address), "r"(rank));
  return result;
}

// Stores at such an address.
__device__ __forceinline__ void store_in_block(uint32_t to, float a, float b, float c, float d) {
  asm volatile("st.shared::cluster.v4.f32 [%0], {%1, %2, %3, %4};" ::"r"(to), "f"(a), "f"(b), "f"(c), "f"(d) : "memory");
}

// Bulk copy of a tile of a three-dimensional array, which signals `barrier` with its bytes.
__device__ __forceinline__ void copy_tile(uint32_t to, const void* map, int column, int row, int batch,
                                          uint32_t barrier) {
  asm volatile(
      "cp.async.bulk.tensor.3d.shared::cluster.global.tile.mbarrier::complete_tx::bytes [%0], [%1, {%2, %3, %4}], "
      "[%5];" ::"r"(to),
      "l"(map), "r"(column), "r"(row), "r"(batch), "r"(barrier)
      : "memory");
}

// The same for a five-dimensional array.
__device__ __forceinline__ void copy_tile(uint32_t to, const void* map, int column, int row, int later_row, int batch,
                                          int last, uint32_t barrier) {
  asm volatile(
      "cp.async.bulk.tensor.5d.shared::cluster.global.tile.mbarrier::complete_tx::bytes [%0], [%1, {%2, %3, %4, %5, "
      "%6}], [%7];" ::"r"(to),
      "l"(map), "r"(column), "r"(row), "r"(later_row), "r"(batch), "r"(last), "r"(barrier)
      : "memory");
}

// Bulk copy of a tile from shared memory, in a group of this thread's stores.
__device__ __forceinline__ void store_tile(const void* map, int column, int row, int batch, uint32_t from) {
  asm volatile(
      "cp.async.bulk.tensor.3d.global.shared::cta.tile.bulk_group [%0, {%1, %2, %3}], [%4];\n"
      "cp.async.bulk.commit_group;" ::"l"(map),
      "r"(column), "r"(row), "r"(batch), "r"(from)
      : "memory");
}

// The same for a four-dimensional array.
__device__ __forceinline__ void store_tile(const void* map, int column, int row, int later_row, int batch,
                                           uint32_t from) {
  asm volatile(
      "cp.async.bulk.tensor.4d.global.shared::cta.tile.bulk_group [%0, {%1, %2, %3, %4}], [%5];\n"
      "cp.async.bulk.commit_group;" ::"l"(map),
      "r"(column), "r"(row), "r"(later_row), "r"(batch), "r"(from)
      : "memory");
}

// Waits until the stores of this thread have read shared memory.
__device__ __forceinline__ void wait_for_store_reads() { asm volatile("cp.async.bulk.wait_group.read 0;" ::: "memory"); }
// Waits until the stores of this thread are complete.
__device__ __forceinline__ void wait_for_stores() { asm volatile("cp.async.bulk.wait_group 0;" ::: "memory"); }

// Waits for all products but the newest `Pending` groups, of which `d` is read after the wait.
template <int Pending>
__device__ __forceinline__ void wait_for_state(float (&d)[16][4]) {
  wait_for_products<Pending, 16>(d);
}

}  // namespace ejkernel::delta_rule
