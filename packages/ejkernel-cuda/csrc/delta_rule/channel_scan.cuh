// The scan of the forward pass with gates per key channel: as chunked.cuh, with A, T, q E, k E and k F, which another kernel
// prepares (channel_pairs.cuh):
//   X^T = (beta V^T - beta S^T (k E)^T) T^T,   O^T = S^T (q E)^T + X^T A^T,   S^T = E_last S^T + X^T (k F)
// Without the delta rule X = V. For the backward pass the kernel stores S before each chunk, and X.
#pragma once

#include "delta_rule/channel_block.cuh"

namespace ejkernel::delta_rule {

template <typename L>
struct ChannelState : ChannelScanState<L, false> {
  using Base = ChannelScanState<L, false>;
  using Base::block, Base::call, Base::maps, Base::warp, Base::lane, Base::t, Base::state;
  float output[8][4];

  __device__ __forceinline__ ChannelState(const Block<L>& b, const DeltaCall& c, const Maps& m) : Base(b, c, m) {}

  __device__ __forceinline__ void run() {
    this->load_segment_state();
#pragma unroll
    for (int i = 0; i < 32; ++i) output[i / 4][i % 4] = 0.0f;
    Ring<L::kStages> stage;
    for (int chunk = block.work().first; chunk < block.work().end; ++chunk) {
      this->wait_for_stage(stage);
      const int mark = block.tokens(stage.index).mark;
      this->begin_chunk(mark);
      step(chunk, stage.index);
      this->end_chunk(mark);
      stage.next();
    }
    if (lane == 0) wait_for_stores();
  }

  // What tokens write with the delta rule, before the inverse: beta (V - S k E).
  __device__ __forceinline__ void subtract_reads(uint32_t (&values)[4][4], const float (&reads)[8][4],
                                                 int stage) const {
    const float2* const betas = reinterpret_cast<const float2*>(block.betas(stage)) + t;
#pragma unroll
    for (int tile = 0; tile < 8; ++tile) {
      const float2 beta = betas[tile * 4];
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        const uint32_t pair = values[tile / 2][tile % 2 * 2 + i];
        const float low = __uint_as_float(pair << 16), high = __uint_as_float(pair & 0xFFFF0000u);
        values[tile / 2][tile % 2 * 2 + i] =
            pack(beta.x * (low - reads[tile][2 * i]), beta.y * (high - reads[tile][2 * i + 1]));
      }
    }
  }

  __device__ __forceinline__ void step(int chunk, int stage) {
    const uint32_t tiles = block.stage(stage);
    const uint64_t q = swizzled_operand(tiles), k = swizzled_operand(tiles + kDecayedKeyOffset);
    uint32_t left[8][4], writes[4][4];
    this->pack_state(left);
    this->load_values(writes, tiles);
    float products[8][4];
    fence_products();
    if constexpr (L::kDelta) {
#pragma unroll
      for (int i = 0; i < 8; ++i) {
        WarpgroupProduct<8>::multiply(products, left[i], k + (i / 4 * (kTileBytes / 16) + i % 4 * 2), i);
      }
      commit_products();
    }
#pragma unroll
    for (int i = 0; i < 8; ++i) {
      WarpgroupProduct<8>::multiply(output, left[i], q + (i / 4 * (kTileBytes / 16) + i % 4 * 2), i);
    }
    commit_products();
    this->wait_for_buffers();
    if constexpr (L::kStoresStates) this->store_packed_state(left, chunk);
    if constexpr (L::kDelta) {
      wait_for_products<1>(products);
      subtract_reads(writes, products, stage);
      const uint64_t inverse = swizzled_operand(tiles + kInverseOffset);
      fence_products();
#pragma unroll
      for (int i = 0; i < 4; ++i) WarpgroupProduct<8>::multiply(products, writes[i], inverse + i * 2, i);
      commit_products();
      wait_for_products<0>(products);
      this->pack_rows(writes, products);
    }
    wait_for_products<0>(output);
    this->decay_state(stage);
    const uint64_t scores = swizzled_operand(tiles + kScoresOffset);
    const uint64_t columns = swizzled_operand(tiles + kKeyOffset, kTileBytes);
    fence_products();
#pragma unroll
    for (int i = 0; i < 4; ++i) WarpgroupProduct<8>::multiply(output, writes[i], scores + i * 2, 1);
    commit_products();
#pragma unroll
    for (int i = 0; i < 4; ++i) multiply_rows(state, writes[i], columns + i * (16 * 128 / 16));
    commit_products();
    if constexpr (L::kStoresStates && L::kDelta) {
      this->store_rows(&maps.writes, block.shared + L::kWritesOffset + warp * kOutputBytes, chunk,
                       block.tokens(stage).token, block.tokens(stage).rows,
                       [&](int i, int j) { return writes[i][j]; });
    }
    wait_for_products<1>(output);
    this->store_rows(&maps.output, block.shared + L::kOutputOffset + warp * kOutputBytes, chunk,
                     block.tokens(stage).token, block.tokens(stage).rows, [&](int i, int j) {
      const int tile = 2 * i + j / 2, pair = j % 2 * 2;
      return pack(output[tile][pair] * call.scale, output[tile][pair + 1] * call.scale);
    });
    wait_for_state<0>(state);
    this->free_stage(stage);
  }
};

template <bool StoresStates, bool Delta>
__global__ void __launch_bounds__(kChannelThreads, 1)
    channel_kernel(const ChannelCall call, const __grid_constant__ ChannelMaps maps) {
#if __CUDA_ARCH__ == 900
  extern __shared__ __align__(1024) char memory[];
  using L = ChannelLayout<StoresStates, Delta>;
  run_channel_block<L, false, ChannelState<L>>(call, maps, memory);
#endif
}

}  // namespace ejkernel::delta_rule
