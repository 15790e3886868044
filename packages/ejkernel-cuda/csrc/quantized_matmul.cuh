// Few rows times a quantised matrix (ejkernel.families.quantized_matmul): out[m, n] = sum_k x[m, k] w[k, n].
//
// The 8 warps of a block have WarpsN tiles of columns side by side, and 8 / WarpsN shares of each stage's k. The
// blocks of a tile share k, too (split-K).
//
//   global memory: words, x, scales, zeros --cp.async, a ring of stages--> shared memory
//   shared memory -> registers: decode, scale -> MMA -> sums
//   partial sums of the warps and of the blocks of a cluster: shared memory -> output
//
// Weights are operand A of m16n8k16, so that an MMA has 16 columns of the matrix and 8 rows of x. Which codes are the
// rows of a tile and in which order k is contracted is free, so codes become operands where they are:
//
//   rows of words are k (RowsFirst)         8 codes of a word are 8 columns; the words of two k make a pair of A
//   rows of words are columns (Transposed)  8 codes of a word are 8 k; x is read in the order of the codes
//
// Sums run in a fixed order: two runs give the same bits.
#pragma once

#include <type_traits>

#include <cooperative_groups.h>

#include "quantized_rows.cuh"
#include "quantized_transposed.cuh"

namespace ejkernel {

// Shared memory of a block: the ring, which the partial sums take over at the end, and what the layout adds.
template <typename L>
__host__ __device__ int ring_bytes(int stages, int log_group, int log_bytes) {
  const int ring = L::stage_bytes(log_group, log_bytes) * stages, partial = L::kWarpsK * L::kRows * (L::kTile + 4) * 4;
  return ring > partial ? ring : partial;
}

__device__ __forceinline__ float4 plus(float4 a, float4 b) { return {a.x + b.x, a.y + b.y, a.z + b.z, a.w + b.w}; }

// The sum of four columns' partial sums at an address of this block's shared memory, over the blocks of a cluster.
__device__ __forceinline__ float4 sum_over_cluster(float4 sum, const float* partial, int blocks) {
#if __CUDA_ARCH__ >= 900
  float4 parts[kMostBlocks];
  // All reads are on their way before the first sum: those of another block's memory take long.
#pragma unroll
  for (int i = 0; i < kMostBlocks; ++i) {
    const int block = min(i, blocks - 1);
    parts[i] = *reinterpret_cast<const float4*>(
        cooperative_groups::this_cluster().map_shared_rank(const_cast<float*>(partial), block));
  }
#pragma unroll
  for (int i = 0; i < kMostBlocks; ++i) {
    if (i < blocks) sum = plus(sum, parts[i]);
  }
#endif
  return sum;
}

// Adds up the partial sums of warps, and of a cluster's blocks, each of which makes its share of the outputs.
template <typename L, typename T>
__device__ __forceinline__ void combine(const QuantizedCall<T>& call, const Place<L>& at, const float* partial) {
  constexpr int kWidth = L::kTile + 4, kQuads = L::kTile / 4;
  const int part = blockIdx.x % call.splits;
  const int first = call.cluster ? part * kThreads : 0, step = call.cluster ? call.splits * kThreads : kThreads;
  for (int i = first + threadIdx.x; i < call.m * kQuads; i += step) {
    const int m = i / kQuads, column = i % kQuads * 4, n = at.first_n + column;
    if (n >= call.n) continue;
    float4 sum = {0, 0, 0, 0};
    for (int warp = 0; warp < L::kWarpsK; ++warp) {
      const float* from = partial + (warp * L::kRows + m) * kWidth + column;
      sum = call.cluster ? sum_over_cluster(sum, from, call.splits)
                         : plus(sum, *reinterpret_cast<const float4*>(from));
    }
    const int64_t to = int64_t(m) * call.n + n;
    if (call.splits > 1 && !call.cluster) {
      *reinterpret_cast<float4*>(call.parts + int64_t(part) * call.m * call.n + to) = sum;
    } else {
      const uint2 rounded = {Half<T>::pack(sum.x, sum.y), Half<T>::pack(sum.z, sum.w)};
      *reinterpret_cast<uint2*>(call.output + to) = rounded;
    }
  }
}

// L: RowsFirst or Transposed. The `splits` blocks of a tile of columns are neighbours, and a cluster on request.
template <typename L, typename T>
__global__ void __launch_bounds__(kThreads, L::kRows <= 16 ? 2 : 1) quantized_kernel(const QuantizedCall<T> call) {
  extern __shared__ __align__(16) char shared[];
  __shared__ float table[16];
  const Place<L> at(call);
  const int log_bytes = log_scale_bytes(call.scale), ahead = call.stages - 1;
  const int bytes = L::stage_bytes(call.log_group, log_bytes);
  L layout(call, at, shared + ring_bytes<L>(call.stages, call.log_group, log_bytes), table);
  for (int stage = 0; stage < ahead; ++stage) {
    // A group of copies for every stage, be it empty, so that the number of pending groups says what has arrived.
    if (stage < at.count) layout.copy(shared + stage * bytes);
    commit_copies();
  }
  if (threadIdx.x < 16) {
    table[threadIdx.x] = call.scale == Scale::kFloat32 ? kNormalFloat[threadIdx.x] : kE2m1[threadIdx.x];
  }
  wait_for_all_but(ahead - 1);
  __syncthreads();
  layout.template prepare<0>(shared);
  typename L::Sums sums = {};
  char *slot = shared, *free_slot = shared + ahead * bytes;
  char* const last_slot = free_slot;
  const auto step = [&](auto parity, int stage) {
    constexpr int kParity = decltype(parity)::value;
    char* const next_slot = slot == last_slot ? shared : slot + bytes;
    wait_for_all_but(ahead - 2);
    // Every thread's copies of the stage and of the next one have arrived; no warp reads the last one's slot any more.
    __syncthreads();
    if (stage + ahead < at.count) layout.copy(free_slot);
    commit_copies();
    layout.template prepare<1 - kParity>(next_slot);
    layout.template multiply<kParity>(sums, slot);
    free_slot = slot;
    slot = next_slot;
  };
  for (int stage = 0; stage < at.count; stage += 2) {
    step(std::integral_constant<int, 0>(), stage);
    if (stage + 1 < at.count) step(std::integral_constant<int, 1>(), stage + 1);
  }
  // The partial sums take the place of the ring, which all warps have left.
  wait_for_copies<0>();
  __syncthreads();
  float* partial = reinterpret_cast<float*>(shared);
  layout.store_sums(sums, partial + at.warp_k * L::kRows * (L::kTile + 4), L::kTile + 4);
  if (!call.cluster) {
    __syncthreads();
    return combine(call, at, partial);
  }
  synchronise_stores_of_cluster();
  combine(call, at, partial);
  // No block ends while others read its shared memory.
  synchronise_cluster();
}

}  // namespace ejkernel
