// The quantised matmul of few rows of bfloat16: 4-bit codes enter the product as exact integers.
//
//   words    device memory -> ring in shared memory (cp.async) -> shift, mask -> MMA -> float32 sums
//   x, scales, zeros: in the ring for the layout of rows, otherwise resident in shared memory
//
// Blocks of a cluster split the contracted elements of the same columns, and add up their sums through distributed
// shared memory, in a fixed order.
#pragma once

#include <cooperative_groups.h>

#include "common/dependent_launch.cuh"
#include "quantized_matmul/rows.cuh"
#include "quantized_matmul/transposed.cuh"

namespace ejkernel::quantized_matmul {

template <typename L>
constexpr int kWidth = L::kTile + 4;  // row stride of partial sums, so that rows are in different banks

template <typename L>
constexpr int sum_bytes() {
  return L::kRows * kWidth<L> * 4;
}

template <typename L>
constexpr int shared_bytes() {
  static_assert(L::kBytes <= kBlockBytes && sum_bytes<L>() <= kBlockBytes, "two blocks fit on a multiprocessor");
  return L::kBytes > sum_bytes<L>() ? L::kBytes : sum_bytes<L>();
}

// Adds up the partial sums of all blocks of a cluster; each block computes its share of the outputs.
template <typename L>
__device__ __forceinline__ void add_up(const QuantizedCall& call, const Place<L::kRows, L::kTile>& at, float* partial) {
  const auto cluster = cooperative_groups::this_cluster();
  constexpr int kQuads = L::kTile / 4;
  for (int i = threadIdx.x + at.part * kThreads; i < at.rows * kQuads; i += kThreads * call.splits) {
    const int row = i / kQuads, column = i % kQuads * 4;
    if (at.first_n + column >= call.n) continue;
    float4 sum = {0, 0, 0, 0};
    for (int part = 0; part < call.splits; ++part) {
      const float* from = cluster.map_shared_rank(partial, part) + row * kWidth<L> + column;
      const float4 more = *reinterpret_cast<const float4*>(from);
      sum.x += more.x, sum.y += more.y, sum.z += more.z, sum.w += more.w;
    }
    const uint2 rounded = {Half<__nv_bfloat16>::pack(sum.x, sum.y), Half<__nv_bfloat16>::pack(sum.z, sum.w)};
    *reinterpret_cast<uint2*>(call.output + int64_t(at.first_m + row) * call.n + at.first_n + column) = rounded;
  }
}

template <typename L>
__device__ __forceinline__ void start_copies(L& layout, uint32_t ring, int count) {
#pragma unroll
  for (int stage = 0; stage < L::kStages - 1; ++stage) {
    if (stage < count) layout.copy(ring + stage * L::kStageBytes);
    commit_copies();
  }
}

template <typename L>
__global__ void __launch_bounds__(kThreads, 2) quantized_kernel(const QuantizedCall call) {
#if __CUDA_ARCH__ == 900  // other chips have no clusters, or less shared memory
  extern __shared__ __align__(16) char shared[];
  wait_for_previous_launch();
  const Place<L::kRows, L::kTile> at(call);
  L layout(call, at, shared);
  char* const ring = shared + L::kRingAt;
  const uint32_t ring_address = shared_address(ring);
  const int count = (at.last_k - at.first_k + L::kStep - 1) / L::kStep;
  // Prologue: loads what is resident first, since every product needs it, then fills all stages but one.
  if constexpr (L::kResident) {
    const typename L::Chunk chunk(call, at, at.first_k);
    start_copies(layout, ring_address, count);
    chunk.store(shared);
  } else {
    start_copies(layout, ring_address, count);
  }
  // The offsets of the stage being multiplied, and of the one before it, which is free again.
  int own = 0, next = (L::kStages - 1) * L::kStageBytes;
  for (int first = 0; first < count; first += L::kSteps) {
    if constexpr (L::kResident) {
      if (first) {
        const typename L::Chunk later(call, at, at.first_k + first * L::kStep);
        __syncthreads();  // all warps have read the last chunk
        later.store(shared);
      }
      __syncthreads();
    }
    const int steps = min(L::kSteps, count - first);
    for (int step = 0; step < steps; ++step) {
      wait_for_copies<L::kStages - 2>();
      // The copies of other lanes have arrived, and all have read the stage that the next copies overwrite. The barrier
      // is of the warp where each warp copies its own words, otherwise of the block.
      if constexpr (L::kResident) {
        __syncwarp();
      } else {
        __syncthreads();
      }
      if (first + step + L::kStages - 1 < count) layout.copy(ring_address + next);
      commit_copies();
      layout.multiply(shared, ring + own, step);
      next = own;
      own = own + L::kStageBytes == L::kStages * L::kStageBytes ? 0 : own + L::kStageBytes;
    }
  }
  start_next_launch();
  // Epilogue. Partial sums overwrite the ring and everything else in shared memory.
  wait_for_copies<0>();
  __syncthreads();
  float* const partial = reinterpret_cast<float*>(shared);
  layout.store_sums(partial, kWidth<L>);
  synchronise_stores_of_cluster();
  add_up<L>(call, at, partial);
  // Other blocks may still be reading this block's sums.
  synchronise_cluster();
#endif
}

}  // namespace ejkernel::quantized_matmul
