// The state of a block's value channels in shared memory, in parts that arrive and leave one after the other.
//
//   bulk copies     part 0 | part 1 | part 2 | part 3
//   warps                  | read 0 | read 1 | read 2 | read 3 | solve | update 0 | update 1 | ...
//   bulk copies                                                                   | store 0  | store 1 ...
//
// All blocks' loads share the memory's rate, so blocks that start together have their states at the same time, and memory
// has nothing to do while they compute. So as little as possible is computed between the last load and the first store.
//
// Rows are keys, or values of a transposed state [V, K]. Four rows are followed by padding: lanes that load 16 bytes each
// at the same time are in two or four groups of rows, and the padding puts these into different banks.
#pragma once

#include "common/warpgroup_mma.cuh"
#include "recurrent_step/work.cuh"

namespace ejkernel::recurrent_step {

template <int K, int W, bool kTransposed>
struct StagedState {
  static constexpr int kRows = kTransposed ? W : K, kWidth = kTransposed ? K : W;
  static constexpr int kGroup = 4 * kWidth + (kTransposed ? 16 : 8);  // elements of four rows and their padding
  // Parts of the rows that arrive and leave one after the other; each has an mbarrier behind the rows.
  static constexpr int kPartRows = 32, kParts = kRows / kPartRows;
  static constexpr size_t kBarriers = kRows / 4 * kGroup * sizeof(float);
  static constexpr size_t kBytes = kBarriers + kParts * sizeof(uint64_t);

  float* memory;
  float* to;   // the block's state in device memory
  int values;  // of a head
  int warp, r, c;
  bool arrives;  // whether reading waits for the parts
  bool leaves;   // whether writing stores them

  __device__ __forceinline__ uint32_t barrier(int part) const {
    return shared_address(memory) + kBarriers + part * sizeof(uint64_t);
  }
  __device__ __forceinline__ float* row(int n) const { return memory + n / 4 * kGroup + n % 4 * kWidth; }
  // Elements between rows in device memory.
  __device__ __forceinline__ long long stride() const { return kTransposed ? K : values; }
  // The lane's piece i of tiles 2 t and 2 t + 1.
  __device__ __forceinline__ float* piece(int t, int i) const {
    return kTransposed ? memory + (8 * warp + r) * kGroup + i * K + 16 * t + 4 * c
                       : memory + (4 * t + c) * kGroup + i * W + 32 * warp + 4 * r;
  }
  __device__ __forceinline__ void read(int t, StateTile& tile) const {
#if __CUDA_ARCH__ == 900
    const bool begins = kTransposed ? t == 0 : 16 * t % kPartRows == 0;
    if (begins && arrives) wait_for_phase(barrier(kTransposed ? warp : 16 * t / kPartRows), 0);
#endif
#pragma unroll
    for (int i = 0; i < 4; ++i) put(tile, i, *reinterpret_cast<const float4*>(piece(t, i)));
  }
  __device__ __forceinline__ void read_again(int t, StateTile& tile) const {
#pragma unroll
    for (int i = 0; i < 4; ++i) put(tile, i, load_again(shared_address(piece(t, i))));
  }
  __device__ __forceinline__ void write(int t, StateTile& tile) {
    if (kTransposed && leaves) {  // a lane has whole sectors, which need no copy by way of shared memory
      float* const own = to + warp * kStepValues * K;
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        store_four(
            own + piece_offset<K, true>(t, i, values, r, c), element<0>(tile, i), element<1>(tile, i),
            element<2>(tile, i), element<3>(tile, i));
      }
      return;
    }
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      *reinterpret_cast<float4*>(piece(t, i)) =
          float4{element<0>(tile, i), element<1>(tile, i), element<2>(tile, i), element<3>(tile, i)};
    }
    if (!kTransposed && 16 * (t + 1) % kPartRows == 0 && leaves) store_part(16 * t / kPartRows);
  }

  // Issues the copies of a part of the state by one warp.
  __device__ __forceinline__ void load_part(const float* from, int part, int lane) const {
    each_copy(part, lane, [&](float* row, long long at, int bytes) {
      copy_bulk(shared_address(row), from + at, bytes, barrier(part));
    });
  }
  // Stores a part that the block's warps have written; of transposed states a warp has one of its own.
  __device__ __forceinline__ void store_part(int part) const {
#if __CUDA_ARCH__ == 900
    publish_to_copies();
    if (kTransposed) __syncwarp();
    else __syncthreads();
    if (warp == part % (W / 32)) {
      each_copy(part, threadIdx.x % 32, [&](float* row, long long at, int bytes) {
        store_bulk(to + at, shared_address(row), bytes);
      });
    }
#else
    __syncthreads();
    constexpr int kPieces = kWidth / 4;
    for (int n = threadIdx.x; n < kPartRows * kPieces; n += W) {
      const int row = part * kPartRows + n / kPieces, column = n % kPieces * 4;
      const float4 x = *reinterpret_cast<const float4*>(this->row(row) + column);
      *reinterpret_cast<float4*>(to + row * stride() + column) = x;
    }
#endif
  }

 private:
  // Calls `copy` with the lane's rows of a part: their address, their index in device memory, and their bytes.
  template <typename Copy>
  __device__ __forceinline__ void each_copy(int part, int lane, Copy copy) const {
    const int together = stride() == kWidth ? 4 : 1;  // rows without a gap between them
    const int n = part * kPartRows + lane * together;
    if (lane * together < kPartRows) copy(row(n), n * stride(), together * kWidth * int(sizeof(float)));
  }
  static __device__ __forceinline__ void put(StateTile& tile, int i, const float4& x) {
    element<0>(tile, i) = x.x, element<1>(tile, i) = x.y, element<2>(tile, i) = x.z, element<3>(tile, i) = x.w;
  }
  // Element n of piece i.
  template <int n>
  static __device__ __forceinline__ float& element(StateTile& tile, int i) {
    const int k = kTransposed ? n : i, v = kTransposed ? i : n;
    return tile[k / 2][v / 2][2 * (v % 2) + k % 2];
  }
};

// Lets the second and the third block of each multiprocessor ask for their states later than the first one, so that they do
// not compute at the same time. Grids whose blocks have few successors do not wait.
__device__ __forceinline__ void stagger_first_blocks(const RecurrentStep& call, unsigned nanoseconds) {
  const unsigned first = call.multiprocessors;
  if (blockIdx.x < first || blockIdx.x >= 3 * first || gridDim.x < 6 * first) return;
  sleep_for(blockIdx.x / first * nanoseconds);
}

// Issues the copies of the block's state, or writes zeros where there is none.
template <int K, int W, bool kTransposed>
__device__ __forceinline__ StagedState<K, W, kTransposed> start_loading(
    void* memory, const RecurrentStep& call, const StepItem& item) {
  using State = StagedState<K, W, kTransposed>;
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  StepItem first = item;  // that of the block's first warp
  first.tile -= warp;
  const long long start = state_offset<K, kTransposed>(call, first);
  const bool there = item.has_state && call.initial != nullptr;
  State state{static_cast<float*>(memory), call.final + start, call.values, warp, lane / 4, lane % 4, there, false};
  if (!there) {
    for (int i = threadIdx.x; i < State::kBarriers / sizeof(float4); i += W) {
      reinterpret_cast<float4*>(state.memory)[i] = float4{0.f, 0.f, 0.f, 0.f};
    }
    return state;
  }
  const float* from = call.initial + start;
#if __CUDA_ARCH__ == 900
  if (warp == 0) {
    if (W == 128) stagger_first_blocks(call, 1500 * K / 128);
    if (lane < State::kParts) {
      start_barrier(state.barrier(lane), 1);
      publish_barriers();
      arrive_and_expect(state.barrier(lane), State::kPartRows * State::kWidth * sizeof(float));
    }
    __syncwarp();
#pragma unroll
    for (int part = 0; part < State::kParts; ++part) state.load_part(from, part, lane);
  }
#else
  constexpr int kPieces = State::kWidth / 4;
  for (int n = threadIdx.x; n < State::kRows * kPieces; n += W) {
    const int row = n / kPieces, column = n % kPieces * 4;
    copy_async(shared_address(state.row(row) + column), from + row * state.stride() + column, 16);
  }
  commit_copies();
#endif
  return state;
}

// Lets all threads see zeros and mbarriers; chips other than Hopper wait for the state, too.
__device__ __forceinline__ void finish_loading() {
#if __CUDA_ARCH__ != 900
  wait_for_copies<0>();
#endif
  __syncthreads();
}

// Stores a state that no token has changed, and waits until all stores have read shared memory.
template <int K, int W, bool kTransposed>
__device__ __forceinline__ void finish_storing(const StagedState<K, W, kTransposed>& state, const StepItem& item) {
  using State = StagedState<K, W, kTransposed>;
  if (item.first >= item.end && item.has_state) {
    StateTile tile;
    for (int t = 0; t < K / 16; ++t) state.read(t, tile);  // waits for the parts
    __syncthreads();
    if constexpr (kTransposed) {
      state.store_part(state.warp);
    } else {
      for (int part = 0; part < State::kParts; ++part) state.store_part(part);
    }
  }
#if __CUDA_ARCH__ == 900
  wait_for_store_reads();
#endif
}

}  // namespace ejkernel::recurrent_step
