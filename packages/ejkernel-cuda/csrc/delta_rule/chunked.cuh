// The forward pass of recurrences with a gate per head, in one kernel:
//   X^T = beta (V^T - E S^T K^T) T^T,   O^T = E S^T Q^T + X^T A^T,   S^T = E_last S^T + (F X^T) K
// with E = exp2(G), F = exp2(G_last - G); without the delta rule X = V, or a factor of each token times V. The registers of an accumulator are the left operand of the next product, so
// nothing of this chain passes through shared memory. For the backward pass the kernel stores S before each chunk, and X.
#pragma once

#include "delta_rule/scan.cuh"

namespace ejkernel::delta_rule {

template <bool StoresStates, bool Delta>
using ForwardLayout = Layout<StoresStates ? 3 : 4, StoresStates, Delta>;

template <typename L>
struct State : ScanState<L, false> {
  using Base = ScanState<L, false>;
  using Base::block, Base::call, Base::maps, Base::warp, Base::lane, Base::t, Base::state;
  float output[8][4];

  __device__ __forceinline__ State(const Block<L>& b, const DeltaCall& c, const Maps& m) : Base(b, c, m) {}

  __device__ __forceinline__ void run() {
    this->load_segment_state();
#pragma unroll
    for (int i = 0; i < 32; ++i) output[i / 4][i % 4] = 0.0f;
    Ring<L::kStages> stage;
    Ring<kPairSlots> slot;
    for (int chunk = block.work().first; chunk < block.work().end; ++chunk) {
      wait_for_phase(block.stage_full_barrier(stage.index), stage.phase);
      const int mark = block.tokens(stage.index).mark;
      this->begin_chunk(mark);
      if constexpr (L::kDelta) {
        step(chunk, stage.index, slot);
      } else {
        step_without_delta(chunk, stage.index, slot);
      }
      this->end_chunk(mark);
      stage.next(), slot.next();
    }
    if constexpr (L::kDelta) {
      this->wait_for_buffers();
      store_output(block.work().end - 1);
    }
    if (lane == 0) wait_for_stores();
  }

  __device__ __forceinline__ void step(int chunk, int stage, const Ring<kPairSlots>& slot) {
    const uint32_t tiles = block.stage(stage);
    const uint64_t q = swizzled_operand(tiles), k = swizzled_operand(tiles + kKeyOffset);
    const float* const gates = block.gates(stage) + t * 2;
    uint32_t left[8][4];
    this->pack_state(left);
    float state_products[8][4];
    fence_products();
#pragma unroll
    for (int i = 0; i < 8; ++i) {
      WarpgroupProduct<8>::multiply(state_products, left[i], k + (i / 4 * (kTileBytes / 16) + i % 4 * 2), i);
    }
    commit_products();
    wait_for_products<1>(output);  // complete before; without this line ptxas waits for all products here
    this->wait_for_buffers();
    if (chunk > block.work().first) store_output(chunk - 1);
    if (lane == 0) {
      block.work().stored_tokens[warp][0] = block.tokens(stage).token;
      block.work().stored_tokens[warp][1] = block.tokens(stage).rows;
    }
    if constexpr (L::kStoresStates) this->store_packed_state(left, chunk);
    fence_products();
#pragma unroll
    for (int i = 0; i < 8; ++i) {
      WarpgroupProduct<8>::multiply(output, left[i], q + (i / 4 * (kTileBytes / 16) + i % 4 * 2), i);
    }
    commit_products();
    const float chunk_decay = block.gates(stage)[5 * 64];
#pragma unroll
    for (int i = 0; i < 64; ++i) state[i / 4][i % 4] *= chunk_decay;
    uint32_t values[4][4];
    this->load_values(values, tiles);
    wait_for_products<1>(state_products);
    uint32_t rows[4][4];
#pragma unroll
    for (int tile = 0; tile < 8; ++tile) {
      const float2 beta = *reinterpret_cast<const float2*>(gates + 64 + tile * 8);
      const float2 beta_decay = *reinterpret_cast<const float2*>(gates + 192 + tile * 8);
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        const uint32_t pair = values[tile / 2][tile % 2 * 2 + i];
        const float low = __uint_as_float(pair << 16), high = __uint_as_float(pair & 0xFFFF0000u);
        rows[tile / 2][tile % 2 * 2 + i] = pack(beta.x * low - beta_decay.x * state_products[tile][2 * i],
                                                beta.y * high - beta_decay.y * state_products[tile][2 * i + 1]);
      }
    }
    wait_for_phase(block.slot_full_barrier(slot.index), slot.phase);
    const uint64_t inverse = swizzled_operand(block.slot(slot.index));
    const uint64_t scores = swizzled_operand(block.slot(slot.index) + kTileBytes);
    fence_products();
#pragma unroll
    for (int i = 0; i < 4; ++i) WarpgroupProduct<8>::multiply(state_products, rows[i], inverse + i * 2, i);
    commit_products();
    wait_for_products<1>(output);
#pragma unroll
    for (int tile = 0; tile < 8; ++tile) {
      const float2 decay = *reinterpret_cast<const float2*>(gates + 128 + tile * 8);
#pragma unroll
      for (int i = 0; i < 4; ++i) output[tile][i] *= i % 2 ? decay.y : decay.x;
    }
    wait_for_products<0>(state_products);
    uint32_t decayed[4][4];
#pragma unroll
    for (int tile = 0; tile < 8; ++tile) {
      const float2 decay_to_end = *reinterpret_cast<const float2*>(gates + 256 + tile * 8);
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        rows[tile / 2][tile % 2 * 2 + i] = pack(state_products[tile][2 * i], state_products[tile][2 * i + 1]);
        decayed[tile / 2][tile % 2 * 2 + i] = pack(state_products[tile][2 * i] * decay_to_end.x,
            state_products[tile][2 * i + 1] * decay_to_end.y);
      }
    }
    const uint64_t columns = swizzled_operand(tiles + kKeyOffset, kTileBytes);
    fence_products();
#pragma unroll
    for (int i = 0; i < 4; ++i) multiply_rows(state, decayed[i], columns + i * (16 * 128 / 16));
    commit_products();
#pragma unroll
    for (int i = 0; i < 4; ++i) WarpgroupProduct<8>::multiply(output, rows[i], scores + i * 2, 1);
    commit_products();
    if constexpr (L::kStoresStates) {
      this->store_rows(&maps.writes, block.shared + L::kWritesOffset + warp * kOutputBytes, chunk,
                       block.tokens(stage).token, block.tokens(stage).rows, [&](int i, int j) { return rows[i][j]; });
    }
    wait_for_state<0>(state);
    wait_for_products<0>(output);
    __syncwarp();
    if (lane == 0) arrive(block.stage_free_barrier(stage)), arrive(block.slot_free_barrier(slot.index));
  }

  __device__ __forceinline__ void step_without_delta(int chunk, int stage, const Ring<kPairSlots>& slot) {
    const uint32_t tiles = block.stage(stage);
    const uint64_t q = swizzled_operand(tiles);
    const float* const gates = block.gates(stage) + t * 2;
    const float skip = call.skip == nullptr ? 0.0f : __ldg(call.skip + block.work().head);
    uint32_t left[8][4];
    this->pack_state(left);
    fence_products();
#pragma unroll
    for (int i = 0; i < 8; ++i) {
      WarpgroupProduct<8>::multiply(output, left[i], q + (i / 4 * (kTileBytes / 16) + i % 4 * 2), i);
    }
    commit_products();
    this->wait_for_buffers();
    if constexpr (L::kStoresStates) this->store_packed_state(left, chunk);
    const float chunk_decay = block.gates(stage)[5 * 64];
#pragma unroll
    for (int i = 0; i < 64; ++i) state[i / 4][i % 4] *= chunk_decay;
    uint32_t values[4][4], decayed[4][4];
    this->load_values(values, tiles);
    this->multiply_values(decayed, values, gates + 256, 1.0f);
    wait_for_phase(block.slot_full_barrier(slot.index), slot.phase);
    const uint64_t scores = swizzled_operand(block.slot(slot.index) + kTileBytes);
    const uint64_t columns = swizzled_operand(tiles + kKeyOffset, kTileBytes);
    wait_for_products<0>(output);
#pragma unroll
    for (int tile = 0; tile < 8; ++tile) {
      const float2 decay = *reinterpret_cast<const float2*>(gates + 128 + tile * 8);
#pragma unroll
      for (int i = 0; i < 4; ++i) output[tile][i] *= i % 2 ? decay.y : decay.x;
    }
    fence_products();
#pragma unroll
    for (int i = 0; i < 4; ++i) WarpgroupProduct<8>::multiply(output, values[i], scores + i * 2, 1);
    commit_products();
#pragma unroll
    for (int i = 0; i < 4; ++i) multiply_rows(state, decayed[i], columns + i * (16 * 128 / 16));
    commit_products();
    wait_for_products<1>(output);
    this->store_rows(&maps.output, block.shared + L::kOutputOffset + warp * kOutputBytes, chunk,
                     block.tokens(stage).token, block.tokens(stage).rows, [&](int i, int j) {
      const int tile = 2 * i + j / 2, pair = j % 2 * 2;
      const float low = __uint_as_float(values[i][j] << 16), high = __uint_as_float(values[i][j] & 0xFFFF0000u);
      return pack(output[tile][pair] * call.scale + skip * low, output[tile][pair + 1] * call.scale + skip * high);
    });
    wait_for_state<0>(state);
    __syncwarp();
    if (lane == 0) arrive(block.stage_free_barrier(stage)), arrive(block.slot_free_barrier(slot.index));
  }

  // Stores the output of the chunk of the last step.
  __device__ __forceinline__ void store_output(int chunk) {
    const int* const tokens = block.work().stored_tokens[warp];
    this->store_rows(&maps.output, block.shared + L::kOutputOffset + warp * kOutputBytes, chunk, tokens[0], tokens[1],
                     [&](int i, int j) {
      const int tile = 2 * i + j / 2, pair = j % 2 * 2;
      return pack(output[tile][pair] * call.scale, output[tile][pair + 1] * call.scale);
    });
  }
};

template <bool StoresStates, bool Delta>
__global__ void __launch_bounds__(kThreads, 1)
    delta_kernel(const DeltaCall call, const __grid_constant__ Maps maps) {
#if __CUDA_ARCH__ == 900
  extern __shared__ __align__(1024) char memory[];
  using L = ForwardLayout<StoresStates, Delta>;
  run_block<L, false, State<L>>(call, maps, memory);
#endif
}

}  // namespace ejkernel::delta_rule
