// How many steps before its segment a scan with gates per key channel and the delta rule begins: until what a state
// passes on, the product of the chunks' transitions, vanishes. A token's transition mixes channels, so no bound on gates
// says where. A block goes back from a segment, against the scan's order, with 64 columns of the identity instead
// of a state: for the forward scan as the reverse scan does, S^T = E_last S^T - (beta (S^T (k F)^T) T) (k E), and for
// the reverse scan as the forward one, S^T = E_last S^T - ((beta S^T (k E)^T) T^T) (k F).
#pragma once

#include "delta_rule/channel_block.cuh"

namespace ejkernel::delta_rule {

// The steps between checks whether all entries have vanished; and the steps after which they must be below
// `kMaxAfterTrial`, or the block gives up, and the scan begins with its row.
constexpr int kStepsPerLook = 4, kTrialSteps = 16;
constexpr float kMaxAfterTrial = 1.0f / 64;

struct TransitionCall : ChannelCall {
  int* found;  // [B, H, segments - 1, 2], which the scan reads as `early_steps`
};

struct TransitionLayout : ChannelLayout<false, true> {
  static constexpr int kLoadedBytes = 5 * kTileBytes + kKeyDim * 4;  // of a stage: k F, k E, T and E_last
};

template <>
struct Block<TransitionLayout> : Block<ChannelLayout<false, true>> {};

// The number of steps of a sequence before the step `end`, which continues it. A warp reads 32 chunks at once.
template <bool Reverse>
__device__ __forceinline__ int steps_of_sequence(const DeltaCall& call, int chunks, int row, int end) {
  const int lane = int(threadIdx.x) % 32;
  for (int last = end; last > 0 && call.table != nullptr; last -= 32) {
    const int step = max(last - 1 - lane, 0);
    const bool begins = begins_sequence<Reverse>(chunk_at(call.table, call.tokens, row, chunk_of_step<Reverse>(chunks, step)).mark);
    const unsigned found = __ballot_sync(~0u, begins);
    if (found != 0) return end - last + __ffs(int(found));
  }
  return end;
}

// One warp; loads no step from `*stop` on, which the state's warpgroup sets.
template <bool Reverse>
__device__ __forceinline__ void load_transitions(const Block<TransitionLayout>& block, const ChannelCall& call,
                                                 const ChannelMaps& maps, const volatile int* stop) {
  using L = TransitionLayout;
  const int lane = block.thread % 32, head = block.work().head, row = block.work().row, end = block.work().end;
  const int64_t base = int64_t(row) * call.tokens * call.heads + head;
  Ring<L::kStages> ring;
  for (int i = 0; i < end; ++i) {
    const int chunk_index = chunk_of_step<Reverse>(block.work().chunks, block.work().stored - 1 - i);
    const Chunk chunk = chunk_at(call.table, call.tokens, row, chunk_index);
    float betas[2];
#pragma unroll
    for (int j = 0; j < 2; ++j) {
      const int at = lane * 2 + j;
      betas[j] = at < chunk.tokens ? __ldg(call.beta + base + int64_t(chunk.token + at) * call.heads) : 0.0f;
    }
    if (i >= L::kStages) {
      wait_for_phase(block.free_barrier(ring.index), ring.phase ^ 1);
      if (i >= *stop) return;
    }
    if (lane == 0) {
      const uint32_t to = block.stage(ring.index), barrier = block.loaded_barrier(ring.index);
      const int index = (row * call.heads + head) * call.chunks + chunk_index;
      arrive_and_expect(barrier, L::kLoadedBytes);
      copy_bulk(shared_address(block.decay(ring.index)), call.decay + int64_t(index) * kKeyDim, kKeyDim * 4, barrier);
      for (int half = 0; half < 2; ++half) {
        const int key = head * kKeyDim + half * 64;
        copy_rows(to + kKeyOffset + half * kTileBytes, &maps.key, key, chunk, row, barrier);
        copy_rows(to + kDecayedKeyOffset + half * kTileBytes, &maps.decayed_key, key, chunk, row, barrier);
      }
      copy_tile(to + kInverseOffset, &maps.inverse, 0, 0, index, barrier);
    }
    reinterpret_cast<float2*>(block.betas(ring.index))[lane] = {betas[0], betas[1]};
    __syncwarp();
    if (lane == 0) arrive(block.loaded_barrier(ring.index));
    ring.next();
  }
}

template <bool Reverse>
struct TransitionState : ChannelScanState<TransitionLayout, Reverse> {
  using L = TransitionLayout;
  using Base = ChannelScanState<L, Reverse>;
  using Base::block, Base::call, Base::warp, Base::lane, Base::t, Base::g, Base::state;

  __device__ __forceinline__ TransitionState(const Block<L>& b, const DeltaCall& c, const Maps& m) : Base(b, c, m) {}

  // Returns the number of steps, before which nothing passes on a state; all of them if the block gives up.
  __device__ __forceinline__ int run(float* warp_maxima, volatile int* stop) {
#pragma unroll
    for (int i = 0; i < 64; ++i) {
      const int value = block.work().first_value + warp * 16 + g + i % 4 / 2 * 8, key = i / 4 * 8 + t * 2 + i % 2;
      state[i / 4][i % 4] = value == key ? 1.0f : 0.0f;
    }
    const int end = block.work().end;
    Ring<L::kStages> stage;
    for (int i = 0; i < end; ++i) {
      this->wait_for_stage(stage);
      step(stage.index);
      const int done = i + 1;
      if (done % kStepsPerLook == 0) {
        const float most = maximum(warp_maxima);
        const bool has_vanished = most < kSmallestNormal;
        if (has_vanished || (done == kTrialSteps && !(most < kMaxAfterTrial))) {
          stop_loads(stage, i, end, stop);
          return has_vanished ? done : end;
        }
      }
      this->free_stage(stage.index);
      stage.next();
    }
    return end;
  }

  // Tells the loading warp to stop, and waits for what it has begun: the stages after this one.
  __device__ __forceinline__ void stop_loads(Ring<L::kStages> stage, int i, int end, volatile int* stop) const {
    if (block.thread == 0) *stop = i + L::kStages;
    synchronise<128>(2);
    this->free_stage(stage.index);
    for (int next = i + 1; next < min(i + L::kStages, end); ++next) {
      stage.next();
      this->wait_for_stage(stage);
    }
  }

  // The largest number of the block's columns; NaN if there is one.
  __device__ __forceinline__ float maximum(float* warp_maxima) const {
    float most = 0.0f;
#pragma unroll
    for (int i = 0; i < 64; ++i) {
      const float size = fabsf(state[i / 4][i % 4]);
      most = size <= most ? most : size;  // NaN stays
    }
    for (int lanes = 16; lanes > 0; lanes /= 2) {
      const float other = __shfl_xor_sync(~0u, most, lanes);
      most = other <= most ? most : other;
    }
    if (lane == 0) warp_maxima[warp] = most;
    synchronise<128>(2);
    for (int i = 0; i < 4; ++i) most = warp_maxima[i] <= most ? most : warp_maxima[i];
    synchronise<128>(2);
    return most;
  }

  __device__ __forceinline__ void step(int stage) {
    const uint32_t tiles = block.stage(stage);
    const uint32_t reads = tiles + (Reverse ? kDecayedKeyOffset : kKeyOffset);
    const uint32_t writes = tiles + (Reverse ? kKeyOffset : kDecayedKeyOffset);
    const uint64_t keys = swizzled_operand(reads), inverse = swizzled_operand(tiles + kInverseOffset);
    uint32_t left[8][4], rows[4][4];
    this->pack_state(left);
    float products[8][4];
    fence_products();
#pragma unroll
    for (int i = 0; i < 8; ++i) {
      WarpgroupProduct<8>::multiply(products, left[i], keys + (i / 4 * (kTileBytes / 16) + i % 4 * 2), i);
    }
    commit_products();
    wait_for_products<0>(products);
    if constexpr (Reverse) multiply_by_betas(products, stage);
    this->pack_rows(rows, products);
    fence_products();
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      if constexpr (Reverse) {
        WarpgroupProduct<8>::multiply(products, rows[i], inverse + i * 2, i);
      } else {
        multiply_rows(products, rows[i], inverse + i * (16 * 128 / 16), i);
      }
    }
    commit_products();
    wait_for_products<0>(products);
    if constexpr (!Reverse) multiply_by_betas(products, stage);
    this->pack_rows(rows, products);
    this->decay_state(stage);
    const uint64_t columns = swizzled_operand(writes, kTileBytes);
    fence_products();
#pragma unroll
    for (int i = 0; i < 4; ++i) multiply_rows(state, rows[i], columns + i * (16 * 128 / 16));
    commit_products();
    wait_for_state<0>(state);
  }

  __device__ __forceinline__ void multiply_by_betas(float (&products)[8][4], int stage) const {
    const float2* const betas = reinterpret_cast<const float2*>(block.betas(stage)) + t;
#pragma unroll
    for (int tile = 0; tile < 8; ++tile) {
      const float2 beta = betas[tile * 4];
#pragma unroll
      for (int i = 0; i < 4; ++i) products[tile][i] *= i % 2 ? -beta.y : -beta.x;
    }
  }
};

template <bool Reverse>
__global__ void __launch_bounds__(kChannelThreads, 1)
    channel_transitions_kernel(const TransitionCall call, const __grid_constant__ ChannelMaps maps) {
#if __CUDA_ARCH__ == 900
  extern __shared__ __align__(1024) char memory[];
  using L = TransitionLayout;
  const int segment_index = int(blockIdx.x) / 2, row_and_head = segment_index / (call.segments - 1);
  const int segment = segment_index % (call.segments - 1) + 1, row = row_and_head / call.heads;
  const int chunks = count_chunks(call);
  const StepRange range = segment_range(call, chunks, segment);
  if (!continues_sequence<Reverse>(call, chunks, row, range)) return;
  const int steps = steps_of_sequence<Reverse>(call, chunks, row, range.stored);
  const Block<L> block{{shared_address(memory), memory, int(threadIdx.x)}};
  volatile int* const stop = reinterpret_cast<volatile int*>(memory + L::kOutputOffset);  // no outputs are stored
  float* const warp_maxima = reinterpret_cast<float*>(memory + L::kOutputOffset + 16);
  if (threadIdx.x == 0) {
    block.work() = {{0, range.stored, steps}, row_and_head % call.heads, row, int(blockIdx.x) % 2 * 64, chunks};
    *stop = steps;
    for (int i = 0; i < L::kStages; ++i) start_barrier(block.loaded_barrier(i), 2), start_barrier(block.free_barrier(i), 4);
    publish_barriers();
  }
  __syncthreads();
  if (threadIdx.x < 128) {
    TransitionState<Reverse> state(block, call, maps);
    const int found = state.run(warp_maxima, stop);
    if (threadIdx.x == 0) call.found[blockIdx.x] = found;
  } else {
    load_transitions<Reverse>(block, call, maps, stop);
  }
#endif
}

}  // namespace ejkernel::delta_rule
