// The states before the segments of a long row, without the delta rule. A block sums up what the tokens of a part of a
// segment write, S^T = sum (F X^T) K, or in the reverse scan sum scale (E dO^T) Q, from zeros to the part's end; a
// second kernel adds up parts, each times the decay from its end to the segment's, and passes the sums on from segment
// to segment. Parts begin sequences with their states. A part whose decay has vanished there is not summed up, so with
// gates most blocks end at once.
#pragma once

#include "delta_rule/scan.cuh"

namespace ejkernel::delta_rule {

constexpr int kSegmentParts = 8;
constexpr int kSegmentThreads = 128 + 64, kFoldThreads = 256;

struct SegmentCall : DeltaCall {
  float* part_states;  // [B, H, segments - 1, parts, K, V]
  float* part_decays;  // [B, H, segments - 1, parts + 1], from a part's end to its segment's, and once the segment's own
  float* folded;       // [B, segments - 1, H, K, V], where `segment_states` of the scan are
};

struct SegmentLayout {
  static constexpr bool kDelta = false, kStoresStates = false, kStartsEarly = false;
  static constexpr int kStages = 3, kStageBytes = 3 * kTileBytes;  // queries or keys, and values
  static constexpr int kGatesOffset = kStages * kStageBytes, kSumsOffset = kGatesOffset + kStages * kGateBytes;
  static constexpr int kBarriersOffset = kSumsOffset + 128, kWorkOffset = kBarriersOffset + 16 * kStages;
  static constexpr int kSharedMemoryBytes = kWorkOffset + sizeof(Work);
};

template <bool Reverse>
struct PartState : ScanState<SegmentLayout, Reverse> {
  using L = SegmentLayout;
  using Base = ScanState<L, Reverse>;
  using Base::block, Base::call, Base::warp, Base::lane, Base::t, Base::state;

  __device__ __forceinline__ PartState(const Block<L>& b, const DeltaCall& c, const Maps& m) : Base(b, c, m) {}

  __device__ __forceinline__ void run() {
    this->clear_state();
    Ring<L::kStages> stage;
    for (int step = block.work().first; step < block.work().end; ++step) {
      wait_for_phase(block.stage_full_barrier(stage.index), stage.phase);
      const uint32_t tiles = block.shared + stage.index * L::kStageBytes;
      const float* const gates = block.gates(stage.index);
      this->begin_chunk(block.tokens(stage.index).mark);
      uint32_t values[4][4], decayed[4][4];
      this->load_values(values, tiles + 2 * kTileBytes - kValueOffset);
      this->multiply_values(decayed, values, gates + (Reverse ? 128 : 256) + t * 2, Reverse ? call.scale : 1.0f);
      const float chunk_decay = gates[5 * 64];
#pragma unroll
      for (int i = 0; i < 64; ++i) state[i / 4][i % 4] *= chunk_decay;
      const uint64_t rows = swizzled_operand(tiles, kTileBytes);
      fence_products();
#pragma unroll
      for (int i = 0; i < 4; ++i) multiply_rows(state, decayed[i], rows + i * (16 * 128 / 16));
      commit_products();
      wait_for_state<0>(state);
      fence_shared_stores();  // the values' loads come before the copy that overwrites them
      __syncwarp();
      if (lane == 0) arrive(block.stage_free_barrier(stage.index));
      stage.next();
    }
  }
};

template <bool Reverse>
__device__ __forceinline__ void load_part(const Block<SegmentLayout>& block, const DeltaCall& call, const Maps& maps) {
  using L = SegmentLayout;
  const Work work = block.work();
  const int heads = Reverse ? call.query_heads : call.key_heads;
  const int rows = work.head / (call.heads / heads) * kKeyDim;
  const int value = work.head / (call.heads / call.value_heads) * call.value_dim + work.first_value;
  Ring<L::kStages> ring;
  for (int step = work.first; step < work.end; ++step) {
    const uint32_t to = block.shared + ring.index * L::kStageBytes, barrier = block.stage_full_barrier(ring.index);
    const Chunk chunk = chunk_at(call.table, call.tokens, work.row, chunk_of_step<Reverse>(work.chunks, step));
    if (step - work.first >= L::kStages) wait_for_phase(block.stage_free_barrier(ring.index), ring.phase ^ 1);
    arrive_and_expect(barrier, L::kStageBytes);
    for (int i = 0; i < 2; ++i) {
      copy_rows(to + i * kTileBytes, Reverse ? &maps.query : &maps.key, rows + i * 64, chunk, work.row, barrier);
    }
    copy_rows(to + 2 * kTileBytes, &maps.value, value, chunk, work.row, barrier);
    ring.next();
  }
}

template <bool Reverse>
__global__ void __launch_bounds__(kSegmentThreads, 2)
    segment_states_kernel(const SegmentCall call, const __grid_constant__ Maps maps) {
#if __CUDA_ARCH__ == 900
  extern __shared__ __align__(1024) char memory[];
  using L = SegmentLayout;
  const int value_blocks = call.value_dim / kBlockValues, parts = int(blockIdx.x) / value_blocks;
  const int first_value = int(blockIdx.x) % value_blocks * kBlockValues;
  const int part = parts % kSegmentParts, segment_index = parts / kSegmentParts;
  const int segment = segment_index % (call.segments - 1), row_and_head = segment_index / (call.segments - 1);
  const int row = row_and_head / call.heads, head = row_and_head % call.heads;
  const int chunks = count_chunks(call);
  const StepRange steps = segment_range(call, chunks, segment);
  const int part_steps = (steps.end - steps.first + kSegmentParts - 1) / kSegmentParts, end = steps.end;
  const int part_begin = min(steps.first + part * part_steps, end), part_end = min(part_begin + part_steps, end);
  float* const sums = reinterpret_cast<float*>(memory + L::kSumsOffset);
  float log2_decay = 0.0f;
  const auto look_back_to = [&](int begin, int from) {
    return look_back<Reverse, false, kSegmentThreads, 4>(call, chunks, row, head, sums, begin, from, log2_decay);
  };
  const auto decay = [&] { return log2_decay < kVanishedLog2 ? 0.0f : exp2_fast(log2_decay); };
  look_back_to(part_end, end);
  const float decay_after = part_begin < part_end ? decay() : 0.0f;
  float* const decays = call.part_decays + int64_t(segment_index) * (kSegmentParts + 1);
  if (threadIdx.x == 0) decays[part] = decay_after;
  if (decay_after == 0.0f) {
    if (threadIdx.x == 0 && part == 0) decays[kSegmentParts] = 0.0f;
    return;
  }
  const int first = look_back_to(part_begin, part_end);
  if (threadIdx.x == 0 && part == 0) decays[kSegmentParts] = decay();
  const Block<L> block{shared_address(memory), memory, int(threadIdx.x)};
  if (threadIdx.x == 0) {
    block.work() = {{first, first, part_end}, head, row, first_value, chunks};
    for (int i = 0; i < L::kStages; ++i) {
      start_barrier(block.stage_full_barrier(i), 2), start_barrier(block.stage_free_barrier(i), 4);
    }
    publish_barriers();
  }
  __syncthreads();
  if (threadIdx.x < 128) {
    PartState<Reverse> state(block, call, maps);
    state.run();
    state.for_each(call.part_states, parts, [](float& element, float& stored) { stored = element; });
  } else if (threadIdx.x == 128) {
    load_part<Reverse>(block, call, maps);
  } else if (threadIdx.x >= 160) {
    load_gates<Reverse>(block, call);
  }
#endif
}

// One thread has four elements of a head's state.
__global__ void __launch_bounds__(kFoldThreads) fold_segments_kernel(const SegmentCall call) {
  const int pieces = kKeyDim * call.value_dim / 4, thread = int(blockIdx.x) * kFoldThreads + int(threadIdx.x);
  const int row_and_head = thread / pieces, piece = thread % pieces;
  const int row = row_and_head / call.heads, head = row_and_head % call.heads;
  const auto load = [&](const float* states, int64_t index) {
    return __ldg(reinterpret_cast<const float4*>(states) + index * pieces + piece);
  };
  float4 sum{0.0f, 0.0f, 0.0f, 0.0f};
  const auto add = [&sum](float factor, const float4& x) {
    sum.x += factor * x.x, sum.y += factor * x.y, sum.z += factor * x.z, sum.w += factor * x.w;
  };
  for (int segment = 0; segment < call.segments - 1; ++segment) {
    const int64_t index = int64_t(row_and_head) * (call.segments - 1) + segment;
    const float* const decays = call.part_decays + index * (kSegmentParts + 1);
    float4 parts[kSegmentParts];
    float factors[kSegmentParts];
#pragma unroll
    for (int i = 0; i < kSegmentParts; ++i) {
      factors[i] = __ldg(decays + i);
      parts[i] = {0.0f, 0.0f, 0.0f, 0.0f};  // a part that has vanished is not in memory
      if (factors[i] != 0.0f) parts[i] = load(call.part_states, index * kSegmentParts + i);
    }
    const float decay = __ldg(decays + kSegmentParts);
    sum = {decay * sum.x, decay * sum.y, decay * sum.z, decay * sum.w};
#pragma unroll
    for (int i = 0; i < kSegmentParts; ++i) add(factors[i], parts[i]);
    const int64_t to = (int64_t(row) * (call.segments - 1) + segment) * call.heads + head;
    reinterpret_cast<float4*>(call.folded)[to * pieces + piece] = sum;
  }
}

}  // namespace ejkernel::delta_rule
