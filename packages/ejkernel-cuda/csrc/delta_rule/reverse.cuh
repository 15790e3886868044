// The scan of the backward pass, from the last chunk to the first, in one kernel. Where the forward pass writes X = T beta (V - E K S), with dS the gradient of the state after the chunk and dO the output's:
//   dX^T = F dS^T K^T + scale dO^T A,   dY^T = dX^T T,   dS^T = E_last dS^T + scale (E dO^T) Q - (beta E dY^T) K
// The kernel stores dY, the gradient of V without beta, and dS of each chunk. In it dO has the place of the values.
// Without the delta rule dY is 0, and the kernel stores dX, with a factor f of each token and a skip f dX + skip dO: the
// gradient of V.
#pragma once

#include "delta_rule/scan.cuh"

namespace ejkernel::delta_rule {

template <bool Delta>
using ReverseLayout = Layout<3, true, Delta>;

template <typename L>
struct ReverseState : ScanState<L, true> {
  using Base = ScanState<L, true>;
  using Base::block, Base::call, Base::maps, Base::warp, Base::lane, Base::t, Base::state;

  __device__ __forceinline__ ReverseState(const Block<L>& b, const DeltaCall& c, const Maps& m) : Base(b, c, m) {}

  __device__ __forceinline__ void run() {
    this->load_segment_state();
    Ring<L::kStages> stage;
    Ring<kPairSlots> slot;
    for (int chunk = chunk_of_step<true>(block.work().chunks, block.work().first);
         chunk >= chunk_of_step<true>(block.work().chunks, block.work().end - 1); --chunk) {
      wait_for_phase(block.stage_full_barrier(stage.index), stage.phase);
      const int mark = block.tokens(stage.index).mark;
      this->begin_chunk(mark);
      step(chunk, stage.index, slot);
      this->end_chunk(mark);
      stage.next(), slot.next();
    }
    if (lane == 0) wait_for_stores();
  }

  __device__ __forceinline__ void step(int chunk, int stage, const Ring<kPairSlots>& slot) {
    const uint32_t tiles = block.stage(stage);
    const uint64_t k = swizzled_operand(tiles + kKeyOffset);
    const uint64_t query_rows = swizzled_operand(tiles, kTileBytes);
    const uint64_t key_rows = swizzled_operand(tiles + kKeyOffset, kTileBytes);
    const float* const gates = block.gates(stage) + t * 2;
    uint32_t left[8][4], cotangents[4][4];
    this->pack_state(left);
    float state_products[8][4], pair_products[8][4];
    fence_products();
#pragma unroll
    for (int i = 0; i < 8; ++i) {
      WarpgroupProduct<8>::multiply(state_products, left[i], k + (i / 4 * (kTileBytes / 16) + i % 4 * 2), i);
    }
    commit_products();
    this->load_values(cotangents, tiles);
    wait_for_phase(block.slot_full_barrier(slot.index), slot.phase);
    const uint64_t inverse = swizzled_operand(block.slot(slot.index));
    const uint64_t scores = swizzled_operand(block.slot(slot.index) + kTileBytes);
    fence_products();
#pragma unroll
    for (int i = 0; i < 4; ++i) multiply_rows(pair_products, cotangents[i], scores + i * (16 * 128 / 16), i);
    commit_products();
    this->wait_for_buffers();
    this->store_packed_state(left, chunk);
    const float chunk_decay = block.gates(stage)[5 * 64];
#pragma unroll
    for (int i = 0; i < 64; ++i) state[i / 4][i % 4] *= chunk_decay;
    uint32_t decayed[4][4], rows[4][4];
    wait_for_products<1>(state_products);
    this->multiply_values(decayed, cotangents, gates + 128, call.scale);
    wait_for_products<0>(pair_products);
#pragma unroll
    for (int tile = 0; tile < 8; ++tile) {
      const float2 decay_to_end = *reinterpret_cast<const float2*>(gates + 256 + tile * 8);
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        state_products[tile][i] = (i % 2 ? decay_to_end.y : decay_to_end.x) * state_products[tile][i] +
                                  call.scale * pair_products[tile][i];
      }
    }
    if constexpr (!L::kDelta) {
      if (call.skip != nullptr) add_skip(state_products, cotangents);
    }
#pragma unroll
    for (int i = 0; i < 16; ++i) {
      const int tile = i / 4 * 2 + i % 4 / 2, pair = i % 2 * 2;
      rows[i / 4][i % 4] = pack(state_products[tile][pair], state_products[tile][pair + 1]);
    }
    fence_products();
    if constexpr (L::kDelta) {
#pragma unroll
      for (int i = 0; i < 4; ++i) multiply_rows(state_products, rows[i], inverse + i * (16 * 128 / 16), i);
      commit_products();
    }
#pragma unroll
    for (int i = 0; i < 4; ++i) multiply_rows(state, decayed[i], query_rows + i * (16 * 128 / 16));
    commit_products();
    if constexpr (L::kDelta) add_reads_of_keys(state_products, rows, gates, key_rows);
    this->store_rows(&maps.writes, block.shared + L::kWritesOffset + warp * kOutputBytes, chunk,
                     block.tokens(stage).token, block.tokens(stage).rows, [&](int i, int j) { return rows[i][j]; });
    wait_for_state<0>(state);
    __syncwarp();
    if (lane == 0) arrive(block.stage_free_barrier(stage)), arrive(block.slot_free_barrier(slot.index));
  }

  // Adds the output's gradient times the skip.
  __device__ __forceinline__ void add_skip(float (&rows)[8][4], const uint32_t (&cotangents)[4][4]) const {
    const float skip = __ldg(call.skip + block.work().head);
#pragma unroll
    for (int i = 0; i < 16; ++i) {
      const int tile = i / 4 * 2 + i % 4 / 2, pair = i % 2 * 2;
      rows[tile][pair] += skip * __uint_as_float(cotangents[i / 4][i % 4] << 16);
      rows[tile][pair + 1] += skip * __uint_as_float(cotangents[i / 4][i % 4] & 0xFFFF0000u);
    }
  }

  // Takes dY, the product in flight, and adds to dS what passes through the tokens' reads with their keys.
  __device__ __forceinline__ void add_reads_of_keys(float (&state_products)[8][4], uint32_t (&rows)[4][4],
                                                    const float* gates, uint64_t key_rows) {
    wait_for_products<1>(state_products);
    uint32_t written[4][4];
#pragma unroll
    for (int tile = 0; tile < 8; ++tile) {
      const float2 beta_decay = *reinterpret_cast<const float2*>(gates + 192 + tile * 8);
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        const float first = state_products[tile][2 * i], second = state_products[tile][2 * i + 1];
        rows[tile / 2][tile % 2 * 2 + i] = pack(first, second);
        written[tile / 2][tile % 2 * 2 + i] = pack(-beta_decay.x * first, -beta_decay.y * second);
      }
    }
    fence_products();
#pragma unroll
    for (int i = 0; i < 4; ++i) multiply_rows(state, written[i], key_rows + i * (16 * 128 / 16));
    commit_products();
  }
};

template <bool Delta>
__global__ void __launch_bounds__(kThreads, 1)
    delta_reverse_kernel(const DeltaCall call, const __grid_constant__ Maps maps) {
#if __CUDA_ARCH__ == 900
  extern __shared__ __align__(1024) char memory[];
  using L = ReverseLayout<Delta>;
  run_block<L, true, ReverseState<L>>(call, maps, memory);
#endif
}

}  // namespace ejkernel::delta_rule
