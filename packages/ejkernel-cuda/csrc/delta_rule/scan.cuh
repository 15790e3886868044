// The state of a scan in registers, how a block begins, and its roles.
#pragma once

#include "delta_rule/pairs.cuh"

namespace ejkernel::delta_rule {

// The state's warpgroup: what both scans do with the state, and with tokens as accumulators hold them.
template <typename L, bool Reverse>
struct ScanState {
  const Block<L>& block;
  const DeltaCall& call;
  const Maps& maps;
  const int warp, lane, t, g;
  float state[16][4];  // [values g and g + 8, keys tile * 8 + t * 2 and the next one]

  __device__ __forceinline__ ScanState(const Block<L>& b, const DeltaCall& c, const Maps& m)
      : block(b),
        call(c),
        maps(m),
        warp(b.thread / 32 % 4),
        lane(b.thread % 32),
        t(b.thread % 4),
        g(b.thread % 32 / 4) {}

  // Calls `use` with each element of the state and with the corresponding one of states [..., K, V], at an index.
  template <typename T, typename Use>
  __device__ __forceinline__ void for_each(T* states, int64_t index, Use use) {
    const int64_t first = index * kKeyDim + t * 2;
    T* at = states + first * call.value_dim + block.work().first_value + warp * 16 + g;
#pragma unroll
    for (int tile = 0; tile < 16; ++tile) {
#pragma unroll
      for (int i = 0; i < 4; ++i) use(state[tile][i], at[i % 2 * call.value_dim + i / 2 * 8]);
      at += 8 * call.value_dim;
      asm volatile("" : "+l"(at));  // otherwise 64 addresses are kept in registers through the loop over chunks
    }
  }

  __device__ __forceinline__ void clear_state() {
#pragma unroll
    for (int i = 0; i < 64; ++i) state[i / 4][i % 4] = 0.0f;
  }

  // The state before a block's first step, if it is not that of a sequence.
  __device__ __forceinline__ void load_segment_state() {
    clear_state();
    const Work& work = block.work();
    if (call.segment_states == nullptr || work.first == 0) return;
    const int segment = work.first / ((work.chunks + call.segments - 1) / call.segments);
    const int64_t starts = int64_t(work.row) * (call.segments - 1) + segment - 1;
    for_each(call.segment_states, starts * call.heads + work.head,
             [](float& element, const float& stored) { element = stored; });
  }

  // The state before a sequence, where a chunk begins one.
  __device__ __forceinline__ void begin_chunk(int mark) {
    if (!begins_sequence<Reverse>(mark)) return;
    clear_state();
    if (call.initial_states == nullptr || mark / 4 >= call.sequences) return;
    for_each(call.initial_states, int64_t(mark / 4) * call.heads + block.work().head,
             [](float& element, const float& stored) { element = stored; });
  }

  // Stores the state after a sequence, where a chunk ends one.
  __device__ __forceinline__ void end_chunk(int mark) {
    if (!ends_sequence<Reverse>(mark) || mark / 4 >= call.sequences) return;
    for_each(call.final_states, int64_t(mark / 4) * call.heads + block.work().head,
             [](float& element, float& stored) { stored = element; });
  }

  // Whether the results of a chunk, which the block scans, are its own: in the order of either scan.
  __device__ __forceinline__ bool is_stored(int chunk) const {
    if constexpr (!L::kStartsEarly) return true;
    const Work& work = block.work();
    return chunk_of_step<Reverse>(work.chunks, chunk) >= work.stored;
  }

  // Converts the state to the left operand of products over keys.
  __device__ __forceinline__ void pack_state(uint32_t (&left)[8][4]) const {
#pragma unroll
    for (int i = 0; i < 32; ++i) {
      const int tile = i / 4 * 2 + i % 4 / 2, pair = i % 2 * 2;
      left[i / 4][i % 4] = pack(state[tile][pair], state[tile][pair + 1]);
    }
  }

  // Loads a warp's 16 value channels of a chunk's tokens, transposed: the left operand of products over tokens.
  __device__ __forceinline__ void load_values(uint32_t (&values)[4][4], uint32_t tiles) const {
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const int token = i * 16 + lane / 16 * 8 + lane % 8, column = warp * 2 + lane / 8 % 2;
      load_matrices_transposed(values[i], tiles + kValueOffset + token * 128 + ((column ^ (token & 7)) << 4));
    }
  }

  // Multiplies them with a factor of each token, from shared memory, and with a constant.
  __device__ __forceinline__ void multiply_values(uint32_t (&products)[4][4], const uint32_t (&values)[4][4],
                                                  const float* factors, float constant) const {
#pragma unroll
    for (int tile = 0; tile < 8; ++tile) {
      const float2 factor = *reinterpret_cast<const float2*>(factors + tile * 8);
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        const uint32_t pair = values[tile / 2][tile % 2 * 2 + i];
        const float low = __uint_as_float(pair << 16), high = __uint_as_float(pair & 0xFFFF0000u);
        products[tile / 2][tile % 2 * 2 + i] = pack(low * (factor.x * constant), high * (factor.y * constant));
      }
    }
  }

  // Stores a warp's 16 value channels of a chunk's tokens, `count` from `token` on, by TMA, through `warp_buffer`. `rows(i, j)` are the registers
  // of such a left operand. The buffer's last store has to have read it.
  template <typename Rows>
  __device__ __forceinline__ void store_rows(const TensorMap* map, uint32_t warp_buffer, int chunk, int token, int count,
                                             Rows rows) {
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const int token = i * 16 + lane / 16 * 8 + lane % 8;
      store_matrices_transposed(warp_buffer + token * 32 + lane / 8 % 2 * 16, rows(i, 0), rows(i, 1), rows(i, 2),
                                rows(i, 3));
    }
    fence_shared_stores();
    __syncwarp();
    if (lane == 0 && is_stored(chunk)) {
      const int column = block.work().head * call.value_dim + block.work().first_value + warp * 16;
      store_tile(map, column, kChunkTokens - count, token + count, block.work().row, warp_buffer);
    }
  }

  // Stores a warp's 16 value channels of the state by TMA.
  __device__ __forceinline__ void store_packed_state(const uint32_t (&left)[8][4], int chunk) {
    const uint32_t buffer = block.shared + L::kStatesOffset + warp * 2 * kStateTileBytes;
#pragma unroll
    for (int i = 0; i < 8; ++i) {
      store_matrices(buffer + i / 4 * kStateTileBytes + block_row(0, i % 4 * 2, lane), left[i][0], left[i][1],
                     left[i][2], left[i][3]);
    }
    fence_shared_stores();
    __syncwarp();
    if (lane == 0 && is_stored(chunk)) {
      const int index = (block.work().row * call.heads + block.work().head) * call.chunks + chunk;
      const int first_row = block.work().first_value + warp * 16;
      store_tile(&maps.states, 0, first_row, index, buffer);
      store_tile(&maps.states, 64, first_row, index, buffer + kStateTileBytes);
    }
  }

  __device__ __forceinline__ void wait_for_buffers() const {
    if (lane == 0) wait_for_store_reads();
    __syncwarp();
  }
};

// Runs the roles of a block; `State` has the state's.
template <typename L, bool Reverse, typename State>
__device__ __forceinline__ void run_block(const DeltaCall& call, const Maps& maps, char* memory) {
  const int value_blocks = call.value_dim / kBlockValues, first_value = int(blockIdx.x) % value_blocks * kBlockValues;
  const int segment = int(blockIdx.x) / value_blocks % call.segments;
  const int row_and_head = int(blockIdx.x) / value_blocks / call.segments;
  const int row = row_and_head / call.heads, head = row_and_head % call.heads;
  const int chunks = count_chunks(call);
  const StepRange steps = steps_of_segment<Reverse, L::kDelta, kThreads>(
      call, chunks, row, head, segment, reinterpret_cast<float*>(memory + L::kGatesOffset));
  if (steps.first >= steps.end) return;
  const Block<L> block{shared_address(memory), memory, int(threadIdx.x)};
  // Blocks above the diagonal are zeros, and nothing writes them.
  for (int i = threadIdx.x; i < kPairSlots * kPairSlotBytes / 16; i += kThreads) {
    reinterpret_cast<uint4*>(memory + L::kPairSlotsOffset)[i] = {0, 0, 0, 0};
  }
  fence_shared_stores();
  if (threadIdx.x == 0) {
    block.work() = {steps, head, row, first_value, chunks};
    prefetch_map(&maps.query), prefetch_map(&maps.key), prefetch_map(&maps.value);
    prefetch_map(Reverse ? &maps.writes : &maps.output);
    if constexpr (L::kStoresStates) prefetch_map(&maps.states);
    for (int i = 0; i < L::kStages; ++i) start_barrier(block.stage_full_barrier(i), 2),
        start_barrier(block.stage_free_barrier(i), 8);
    for (int i = 0; i < kPairSlots; ++i) start_barrier(block.slot_full_barrier(i), 4),
        start_barrier(block.slot_free_barrier(i), 4);
    publish_barriers();
  }
  __syncthreads();
  const int role = threadIdx.x / 128;
  if (role == 0) {
    give_registers<40>();
    if (threadIdx.x == 0) load_tiles<Reverse>(block, call, maps);
    if (threadIdx.x / 32 == 1) load_gates<Reverse>(block, call);
  } else if (role == 1) {
    take_registers<216>();
    State state(block, call, maps);
    state.run();
  } else {
    Pairs<L> pairs(block, call, role - 2);
    pairs.run();
  }
}

}  // namespace ejkernel::delta_rule
