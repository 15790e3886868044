// A call of the quantised matmul, and a block's place in it.
#pragma once

#include "quantized_codes.cuh"
#include "tensor_core.cuh"

namespace ejkernel {

constexpr int kThreads = 256;
constexpr int kWarps = kThreads / 32;
constexpr int kMostBlocks = 8;  // of a cluster
constexpr int kStepK = 16;      // of an MMA

template <typename T>
struct QuantizedCall {
  const T* x;
  const uint32_t* words;
  const void* scales;
  const void* zeros;
  T* output;     // [m, n]
  float* parts;  // [splits, m, n], where no cluster adds them up
  Scale scale;
  int m, k, n;
  int row_words, row_groups, log_group;
  int splits, stages;
  bool cluster;
};

// Waits until all but the newest `pending` groups of this thread's copies have arrived; instructions want a constant.
__device__ __forceinline__ void wait_for_all_but(int pending) {
  switch (pending) {
    case 0: return wait_for_copies<0>();
    case 1: return wait_for_copies<1>();
    case 2: return wait_for_copies<2>();
    case 3: return wait_for_copies<3>();
    default: return wait_for_copies<4>();
  }
}

// Starts the copy of 16 bytes of words. Those outside of the matrix are left out, unless what shared memory held before
// may stand for NaN, which a factor of 0 does not hide.
template <Code C>
__device__ __forceinline__ void copy_words(uint32_t to, const uint32_t* from, const uint32_t* any, bool inside) {
  if constexpr (C == Code::kFloat8) {
    copy_async(to, inside ? from : any, inside ? 16 : 0);
  } else {
    if (inside) copy_async(to, from, 16);
  }
}

// A block's place: its tile of columns and its share of the stages.
template <typename L>
struct Place {
  int warp_n, warp_k, lane, first_n, first_stage, count;

  template <typename T>
  __device__ __forceinline__ explicit Place(const QuantizedCall<T>& call) {
    const int warp = threadIdx.x / 32, part = blockIdx.x % call.splits;
    warp_n = warp % L::kWarpsN;
    warp_k = warp / L::kWarpsN;
    lane = threadIdx.x % 32;
    first_n = blockIdx.x / call.splits * L::kTile;
    const int stages = (call.k + L::kDepth - 1) / L::kDepth;
    first_stage = int64_t(stages) * part / call.splits;
    count = int64_t(stages) * (part + 1) / call.splits - first_stage;
  }
};

}  // namespace ejkernel
