// What the scans of both passes share with gates per key channel: loads of what was prepared (channel_pairs.cuh), the
// state's decay, and how a block begins. A block has a warpgroup with the state, and a warp that loads.
#pragma once

#include "delta_rule/scan.cuh"

namespace ejkernel::delta_rule {

constexpr int kChannelThreads = 128 + 32;

struct ChannelCall : DeltaCall {
  const float* decay;  // [B, H, chunks, K], E of the last token
  const int* early_steps;  // [B, H, segments - 1, 2], how many steps before all but the first segment; with the delta rule
};

struct ChannelMaps : Maps {  // its queries are q E, and its keys k F
  TensorMap decayed_key, scores, inverse;  // k E [B, T, H, K], A and T [B, H, chunks, 64, 64]
};

// Parts of a stage, in bytes: q E, k F and values are where other scans have queries, keys and values.
constexpr int kScoresOffset = 5 * kTileBytes, kDecayedKeyOffset = 6 * kTileBytes, kInverseOffset = 8 * kTileBytes;

template <bool StoresStates, bool Delta>
struct ChannelLayout {
  static constexpr bool kStoresStates = StoresStates, kDelta = Delta, kStartsEarly = true;
  static constexpr int kStages = !Delta ? 4 : StoresStates ? 2 : 3, kStageBytes = (Delta ? 9 : 6) * kTileBytes;
  static constexpr int kOutputOffset = kStages * kStageBytes, kStatesOffset = kOutputOffset + 4 * kOutputBytes;
  static constexpr int kWritesOffset = kStatesOffset + (StoresStates ? 4 * 2 * kStateTileBytes : 0);
  static constexpr int kDecayOffset = kWritesOffset + (StoresStates && Delta ? 4 * kOutputBytes : 0);
  static constexpr int kBetasOffset = kDecayOffset + kStages * kKeyDim * 4;
  static constexpr int kTokensOffset = kBetasOffset + (Delta ? kStages * kChunkTokens * 4 : 0);
  static constexpr int kBarriersOffset = kTokensOffset + kStages * 16;
  static constexpr int kWorkOffset = kBarriersOffset + 16 * kStages;
  static constexpr int kSharedMemoryBytes = kWorkOffset + sizeof(Work);
  static_assert(kSharedMemoryBytes <= 227 * 1024, "more shared memory than a block can have");
};

template <bool StoresStates, bool Delta>
struct Block<ChannelLayout<StoresStates, Delta>> {
  using L = ChannelLayout<StoresStates, Delta>;
  uint32_t shared;
  char* memory;
  int thread;

  __device__ __forceinline__ Work& work() const { return *reinterpret_cast<Work*>(memory + L::kWorkOffset); }

  __device__ __forceinline__ uint32_t stage(int s) const { return shared + s * L::kStageBytes; }
  __device__ __forceinline__ float* decay(int s) const {
    return reinterpret_cast<float*>(memory + L::kDecayOffset) + s * kKeyDim;
  }
  __device__ __forceinline__ float* betas(int s) const {
    return reinterpret_cast<float*>(memory + L::kBetasOffset) + s * kChunkTokens;
  }
  __device__ __forceinline__ StageTokens& tokens(int s) const {
    return *reinterpret_cast<StageTokens*>(memory + L::kTokensOffset + 16 * s);
  }
  __device__ __forceinline__ uint32_t loaded_barrier(int s) const { return shared + L::kBarriersOffset + 16 * s; }
  __device__ __forceinline__ uint32_t free_barrier(int s) const { return loaded_barrier(s) + 8; }
};

// ---- loads ----

template <typename L>
__device__ __forceinline__ void load_stage(const Block<L>& block, const ChannelCall& call, const ChannelMaps& maps,
                                           int stage, int chunk_index, const Chunk& chunk) {
  const uint32_t to = block.stage(stage), barrier = block.loaded_barrier(stage);
  const Work work = block.work();
  const int key = work.head * kKeyDim;
  const int value = work.head / (call.heads / call.value_heads) * call.value_dim + work.first_value;
  const int index = (work.row * call.heads + work.head) * call.chunks + chunk_index;
  arrive_and_expect(barrier, L::kStageBytes + kKeyDim * 4);
  copy_bulk(shared_address(block.decay(stage)), call.decay + int64_t(index) * kKeyDim, kKeyDim * 4, barrier);
  for (int i = 0; i < 2; ++i) {
    if constexpr (L::kDelta) {
      copy_rows(to + kDecayedKeyOffset + i * kTileBytes, &maps.decayed_key, key + i * 64, chunk, work.row, barrier);
    }
    copy_rows(to + i * kTileBytes, &maps.query, key + i * 64, chunk, work.row, barrier);
    copy_rows(to + kKeyOffset + i * kTileBytes, &maps.key, key + i * 64, chunk, work.row, barrier);
  }
  copy_rows(to + kValueOffset, &maps.value, value, chunk, work.row, barrier);
  if constexpr (L::kDelta) copy_tile(to + kInverseOffset, &maps.inverse, 0, 0, index, barrier);
  copy_tile(to + kScoresOffset, &maps.scores, 0, 0, index, barrier);
}

// One warp; a lane has two tokens' beta.
template <bool Reverse, typename L>
__device__ __forceinline__ void load_channel_stages(const Block<L>& block, const ChannelCall& call,
                                                    const ChannelMaps& maps) {
  const int lane = block.thread % 32;
  const Work work = block.work();
  const int64_t base = int64_t(work.row) * call.tokens * call.heads + work.head;
  Ring<L::kStages> ring;
  for (int step = work.first; step < work.end; ++step) {
    const int chunk_index = chunk_of_step<Reverse>(work.chunks, step);
    const Chunk chunk = chunk_at(call.table, call.tokens, work.row, chunk_index);
    [[maybe_unused]] float betas[2];
    if constexpr (L::kDelta) {
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        const int at = lane * 2 + i;
        betas[i] = at < chunk.tokens ? __ldg(call.beta + base + int64_t(chunk.token + at) * call.heads) : 0.0f;
      }
    }
    if (step - work.first >= L::kStages) wait_for_phase(block.free_barrier(ring.index), ring.phase ^ 1);
    if constexpr (L::kDelta) reinterpret_cast<float2*>(block.betas(ring.index))[lane] = {betas[0], betas[1]};
    if (lane == 0) {
      load_stage(block, call, maps, ring.index, chunk_index, chunk);
      block.tokens(ring.index) = {chunk.token, chunk.rows, chunk.mark};
    }
    __syncwarp();
    if (lane == 0) arrive(block.loaded_barrier(ring.index));
    ring.next();
  }
}

// ---- state ----

template <typename L, bool Reverse>
struct ChannelScanState : ScanState<L, Reverse> {
  using Base = ScanState<L, Reverse>;
  using Base::block, Base::warp, Base::lane, Base::t, Base::state;

  __device__ __forceinline__ ChannelScanState(const Block<L>& b, const DeltaCall& c, const Maps& m) : Base(b, c, m) {}

  __device__ __forceinline__ void wait_for_stage(const Ring<L::kStages>& stage) const {
    wait_for_phase(block.loaded_barrier(stage.index), stage.phase);
  }
  __device__ __forceinline__ void free_stage(int stage) const {
    __syncwarp();
    if (lane == 0) arrive(block.free_barrier(stage));
  }

  __device__ __forceinline__ void decay_state(int stage) {
    const float2* const decay = reinterpret_cast<const float2*>(block.decay(stage)) + t;
#pragma unroll
    for (int tile = 0; tile < 16; ++tile) {
      const float2 factors = decay[tile * 4];
#pragma unroll
      for (int i = 0; i < 4; ++i) state[tile][i] *= i % 2 ? factors.y : factors.x;
    }
  }

  // Converts [values, tokens] accumulators to left operands.
  static __device__ __forceinline__ void pack_rows(uint32_t (&rows)[4][4], const float (&products)[8][4]) {
#pragma unroll
    for (int i = 0; i < 16; ++i) {
      const int tile = i / 4 * 2 + i % 4 / 2, pair = i % 2 * 2;
      rows[i / 4][i % 4] = pack(products[tile][pair], products[tile][pair + 1]);
    }
  }
};

// ---- segments ----

// Returns the chunks that a block scans for a segment, as a range of steps. All threads of the block call it. Without
// the delta rule, the decays of the channels determine where the range begins; `memory` is shared memory that nothing
// else uses.
template <bool Reverse, bool Delta>
__device__ __forceinline__ StepRange steps_of_channel_segment(const ChannelCall& call, int chunks, int row, int head,
                                                              int segment, char* memory) {
  StepRange steps = segment_range(call, chunks, segment);
  if (!continues_sequence<Reverse>(call, chunks, row, steps)) return steps;
  const int64_t row_and_head = int64_t(row) * call.heads + head;
  if constexpr (Delta) {
    const int* const early = call.early_steps + (row_and_head * (call.segments - 1) + segment - 1) * 2;
    steps.first -= max(__ldg(early), __ldg(early + 1));
    return steps;
  }
  constexpr int kSteps = 8;
  const int thread = int(threadIdx.x), channel = thread % kKeyDim;
  int* const flags = reinterpret_cast<int*>(memory);
  float product = 1.0f;
  for (int last = steps.stored; last > 0; last -= kSteps) {
    float decays[kSteps];
#pragma unroll
    for (int i = 0; i < kSteps; ++i) {
      const int chunk = chunk_of_step<Reverse>(chunks, max(last - 1 - i, 0));
      decays[i] = __ldg(call.decay + (row_and_head * call.chunks + chunk) * kKeyDim + channel);
      if (begins_sequence<Reverse>(chunk_at(call.table, call.tokens, row, chunk).mark)) decays[i] = 0.0f;
    }
    int needed = kSteps + 1;  // steps after which the channel has vanished
#pragma unroll
    for (int i = 0; i < kSteps; ++i) {
      product *= decays[i];
      if (needed > kSteps && fabsf(product) < kSmallestNormal) needed = i + 1;
    }
    for (int lanes = 16; lanes > 0; lanes /= 2) {
      needed = max(needed, int(__shfl_xor_sync(~0u, float(needed), lanes)));
    }
    if (thread % 32 == 0) flags[thread / 32] = needed;
    __syncthreads();
    for (int i = 0; i < kChannelThreads / 32; ++i) needed = max(needed, flags[i]);
    __syncthreads();
    if (needed <= kSteps) {
      steps.first = max(last - needed, 0);
      return steps;
    }
  }
  steps.first = 0;
  return steps;
}

// Runs the roles of a block; `State` has the state's.
template <typename L, bool Reverse, typename State>
__device__ __forceinline__ void run_channel_block(const ChannelCall& call, const ChannelMaps& maps, char* memory) {
  const int value_blocks = call.value_dim / kBlockValues, first_value = int(blockIdx.x) % value_blocks * kBlockValues;
  const int segment = int(blockIdx.x) / value_blocks % call.segments;
  const int row_and_head = int(blockIdx.x) / value_blocks / call.segments;
  const int row = row_and_head / call.heads, head = row_and_head % call.heads;
  const int chunks = count_chunks(call);
  const StepRange steps =
      steps_of_channel_segment<Reverse, L::kDelta>(call, chunks, row, head, segment, memory + L::kDecayOffset);
  if (steps.first >= steps.end) return;
  const Block<L> block{shared_address(memory), memory, int(threadIdx.x)};
  if (threadIdx.x == 0) {
    block.work() = {steps, head, row, first_value, chunks};
    for (int i = 0; i < L::kStages; ++i) {
      start_barrier(block.loaded_barrier(i), 2), start_barrier(block.free_barrier(i), 4);
    }
    publish_barriers();
  }
  __syncthreads();
  if (threadIdx.x < 128) {
    State state(block, call, maps);
    state.run();
  } else {
    load_channel_stages<Reverse>(block, call, maps);
  }
}

}  // namespace ejkernel::delta_rule
