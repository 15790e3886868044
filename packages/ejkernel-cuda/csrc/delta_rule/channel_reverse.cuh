// The scan of the backward pass with gates per key channel, from the last chunk to the first: as reverse.cuh, with q E, k E
// and k F (channel_pairs.cuh) in place of queries and keys:
//   dX^T = dS^T (k F)^T + scale dO^T A,   dY^T = dX^T T,   dS^T = E_last dS^T + scale dO^T (q E) - (beta dY^T) (k E)
// The kernel stores dY, without the delta rule dX, and dS of each chunk. In it dO has the place of the values.
#pragma once

#include "delta_rule/channel_block.cuh"

namespace ejkernel::delta_rule {

template <typename L>
struct ChannelReverseState : ChannelScanState<L, true> {
  using Base = ChannelScanState<L, true>;
  using Base::block, Base::call, Base::maps, Base::warp, Base::lane, Base::t, Base::state;

  __device__ __forceinline__ ChannelReverseState(const Block<L>& b, const DeltaCall& c, const Maps& m)
      : Base(b, c, m) {}

  __device__ __forceinline__ void run() {
    this->load_segment_state();
    Ring<L::kStages> stage;
    const int last = chunk_of_step<true>(block.work().chunks, block.work().end - 1);
    for (int chunk = chunk_of_step<true>(block.work().chunks, block.work().first); chunk >= last; --chunk) {
      this->wait_for_stage(stage);
      const int mark = block.tokens(stage.index).mark;
      this->begin_chunk(mark);
      step(chunk, stage.index);
      this->end_chunk(mark);
      stage.next();
    }
    if (lane == 0) wait_for_stores();
  }

  // Multiplies the pairs of a left operand with a constant.
  static __device__ __forceinline__ void scale_rows(uint32_t (&rows)[4][4], float scale) {
#pragma unroll
    for (int i = 0; i < 16; ++i) {
      const uint32_t pair = rows[i / 4][i % 4];
      rows[i / 4][i % 4] = pack(scale * __uint_as_float(pair << 16), scale * __uint_as_float(pair & 0xFFFF0000u));
    }
  }

  __device__ __forceinline__ void step(int chunk, int stage) {
    const uint32_t tiles = block.stage(stage);
    const uint64_t k = swizzled_operand(tiles + kKeyOffset), scores = swizzled_operand(tiles + kScoresOffset);
    uint32_t left[8][4], cotangents[4][4], rows[4][4];
    this->pack_state(left);
    this->load_values(cotangents, tiles);
    float products[8][4], pair_products[8][4];
    fence_products();
#pragma unroll
    for (int i = 0; i < 8; ++i) {
      WarpgroupProduct<8>::multiply(products, left[i], k + (i / 4 * (kTileBytes / 16) + i % 4 * 2), i);
    }
#pragma unroll
    for (int i = 0; i < 4; ++i) multiply_rows(pair_products, cotangents[i], scores + i * (16 * 128 / 16), i);
    commit_products();
    this->wait_for_buffers();
    this->store_packed_state(left, chunk);
    wait_for_products<0>(products);
    wait_for_products<0>(pair_products);
#pragma unroll
    for (int i = 0; i < 32; ++i) products[i / 4][i % 4] += call.scale * pair_products[i / 4][i % 4];
    this->pack_rows(rows, products);
    scale_rows(cotangents, call.scale);
    uint32_t written[4][4];
    if constexpr (L::kDelta) {
      const uint64_t inverse = swizzled_operand(tiles + kInverseOffset);
      fence_products();
#pragma unroll
      for (int i = 0; i < 4; ++i) multiply_rows(products, rows[i], inverse + i * (16 * 128 / 16), i);
      commit_products();
      wait_for_products<0>(products);
      this->pack_rows(rows, products);
      const float2* const betas = reinterpret_cast<const float2*>(block.betas(stage)) + t;
#pragma unroll
      for (int i = 0; i < 16; ++i) {
        const int tile = i / 4 * 2 + i % 4 / 2, pair = i % 2 * 2;
        const float2 beta = betas[tile * 4];
        written[i / 4][i % 4] = pack(-beta.x * products[tile][pair], -beta.y * products[tile][pair + 1]);
      }
    }
    this->decay_state(stage);
    const uint64_t query_rows = swizzled_operand(tiles, kTileBytes);
    const uint64_t key_rows = swizzled_operand(tiles + kDecayedKeyOffset, kTileBytes);
    fence_products();
#pragma unroll
    for (int i = 0; i < 4; ++i) multiply_rows(state, cotangents[i], query_rows + i * (16 * 128 / 16));
    if constexpr (L::kDelta) {
#pragma unroll
      for (int i = 0; i < 4; ++i) multiply_rows(state, written[i], key_rows + i * (16 * 128 / 16));
    }
    commit_products();
    this->store_rows(&maps.writes, block.shared + L::kOutputOffset + warp * kOutputBytes, chunk,
                       block.tokens(stage).token, block.tokens(stage).rows,
                     [&](int i, int j) { return rows[i][j]; });
    wait_for_state<0>(state);
    this->free_stage(stage);
  }
};

template <bool Delta>
__global__ void __launch_bounds__(kChannelThreads, 1)
    channel_reverse_kernel(const ChannelCall call, const __grid_constant__ ChannelMaps maps) {
#if __CUDA_ARCH__ == 900
  extern __shared__ __align__(1024) char memory[];
  using L = ChannelLayout<true, Delta>;
  run_channel_block<L, true, ChannelReverseState<L>>(call, maps, memory);
#endif
}

}  // namespace ejkernel::delta_rule
