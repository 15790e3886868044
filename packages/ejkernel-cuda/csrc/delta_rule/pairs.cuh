// What the scans of the gated delta rule share: both go through the chunks of 64 tokens of a row, from the first one
// (chunked.cuh) or from the last one (reverse.cuh).
//
// A block has one head of one row and 64 of its value channels, and its warpgroups have roles:
//   loads    one warp copies queries, keys and values of a chunk by TMA; another one sums up the gates
//   pairs    two warpgroups alternate between chunks: T = (I + M)^-1 with M_ij = beta_i exp2(G_i - G_j) <k_i, k_j>
//            below the diagonal, and A_ij = exp2(G_i - G_j) <q_i, k_j> on and below it. Neither depends on the state.
//   state    one warpgroup, in which the state is transposed, [values, keys], as an accumulator in registers
#pragma once

#include "delta_rule/ptx.cuh"
#include "delta_rule/segments.cuh"

namespace ejkernel::delta_rule {

constexpr int kPairSlots = 3, kPairWarpgroups = 2;
constexpr int kThreads = 128 * (2 + kPairWarpgroups);

// A CUtensorMap.
struct alignas(64) TensorMap {
  char bytes[128];
};

struct Maps {
  TensorMap query, key, value, output;
  TensorMap writes, states;  // [B, T, H, V], and [B, H, chunks, V, K]: only of a kernel that stores them
};

constexpr int kTileBytes = kChunkTokens * 128;  // 64 rows of 64 channels
constexpr int kKeyOffset = 2 * kTileBytes, kValueOffset = 4 * kTileBytes, kStageBytes = 5 * kTileBytes;
constexpr int kPairSlotBytes = 2 * kTileBytes;
constexpr int kOutputBytes = kChunkTokens * 32, kStateTileBytes = 16 * 128;  // of a warp; the state has two tiles
// Values per token, float32, by stage: G, beta, E, beta E, F; once E of the last token, and what the chunk is.
constexpr int kGateBytes = 5 * 256 + 16;
constexpr int kScratchRowBytes = 80, kScratchBytes = 16 * kScratchRowBytes;

// A scan that keeps `Stages` chunks, and stores the states before its chunks or not; and its shared memory, in bytes.
// Without the delta rule a token writes its value, and beta is not read.
template <int Stages, bool StoresStates, bool Delta>
struct Layout {
  static constexpr int kStages = Stages;
  static constexpr bool kDelta = Delta;
  static constexpr bool kStartsEarly = Delta;  // blocks, before their segments (segments.cuh)
  static constexpr bool kStoresStates = StoresStates;
  static constexpr int kPairSlotsOffset = kStages * kStageBytes;
  static constexpr int kStatesOffset = kPairSlotsOffset + kPairSlots * kPairSlotBytes;
  static constexpr int kOutputOffset = kStatesOffset + (kStoresStates ? 4 * 2 * kStateTileBytes : 0);
  static constexpr int kWritesOffset = kOutputOffset + 4 * kOutputBytes;
  static constexpr int kGatesOffset = kWritesOffset + (kStoresStates ? 4 * kOutputBytes : 0);
  static constexpr int kScratchOffset = kGatesOffset + kStages * kGateBytes;
  static constexpr int kBarriersOffset = kScratchOffset + 2 * kPairWarpgroups * kScratchBytes;
  static constexpr int kWorkOffset = kBarriersOffset + 16 * kStages + 16 * kPairSlots;
  static constexpr int kSharedMemoryBytes = kWorkOffset + sizeof(Work);
  static_assert(kSharedMemoryBytes <= 227 * 1024, "more shared memory than a block can have");
};

// Of a stage: its chunk's first token, the rows that are stored, and its mark.
struct StageTokens {
  int token, rows, mark;
};

// Copies a chunk's rows of an array [B, T, columns]; those past its tokens are zeros. A map of such an array
// (tensor_maps.cuh) has two dimensions of rows, of which the first ends where a chunk does.
__device__ __forceinline__ void copy_rows(uint32_t to, const TensorMap* map, int column, const Chunk& chunk, int row,
                                          uint32_t barrier) {
  copy_tile(to, map, column, kLoadedRowsEnd - chunk.tokens, chunk.token + chunk.tokens, row, kLoadedRowsEnd, barrier);
}

// Stores some of a chunk's rows, from row `first` on; those past the ones it has are not stored.
__device__ __forceinline__ void store_chunk_rows(const TensorMap* map, int column, const Chunk& chunk, int first, int row,
                                                 uint32_t from) {
  store_tile(map, column, kChunkTokens - chunk.rows + first, chunk.token + chunk.rows, row, from);
}

template <typename L>
struct Block {
  uint32_t shared;
  char* memory;
  int thread;

  __device__ __forceinline__ Work& work() const { return *reinterpret_cast<Work*>(memory + L::kWorkOffset); }
  __device__ __forceinline__ uint32_t stage(int s) const { return shared + s * kStageBytes; }
  __device__ __forceinline__ uint32_t slot(int s) const { return shared + L::kPairSlotsOffset + s * kPairSlotBytes; }
  __device__ __forceinline__ const float* gates(int s) const {
    return reinterpret_cast<const float*>(memory + L::kGatesOffset + s * kGateBytes);
  }
  __device__ __forceinline__ StageTokens& tokens(int s) const {
    return *reinterpret_cast<StageTokens*>(memory + L::kGatesOffset + s * kGateBytes + 5 * 256 + 4);
  }
  __device__ __forceinline__ uint32_t stage_full_barrier(int s) const { return shared + L::kBarriersOffset + 16 * s; }
  __device__ __forceinline__ uint32_t stage_free_barrier(int s) const { return stage_full_barrier(s) + 8; }
  __device__ __forceinline__ uint32_t slot_full_barrier(int s) const {
    return shared + L::kBarriersOffset + 16 * (L::kStages + s);
  }
  __device__ __forceinline__ uint32_t slot_free_barrier(int s) const { return slot_full_barrier(s) + 8; }
};

// The slot that a loop has reached in a ring buffer of `Size` slots, and the parity of its mbarrier.
template <int Size>
struct Ring {
  int index = 0;
  uint32_t phase = 0;
  __device__ __forceinline__ void next() {
    if (++index == Size) index = 0, phase ^= 1;
  }
};

// Byte offset of the lane's row of four 8x8 matrices in a swizzled tile: rows from `row` on (8 and 8), 16-byte columns
// `column` and the next one.
__device__ __forceinline__ uint32_t block_row(int row, int column, int lane) {
  const int r = row + lane % 16;
  return r * 128 + (((column + lane / 16) ^ (r & 7)) << 4);
}

// c += a b for a and b of 16 x 16, b as four transposed 8x8 matrices: (rows 0, columns 0), (8, 0), (0, 8), (8, 8).
__device__ __forceinline__ void multiply_16(float (&c)[2][4], const uint32_t (&a)[4], const uint32_t (&b)[4]) {
  Half<__nv_bfloat16>::multiply(c[0], a, b[0], b[1]);
  Half<__nv_bfloat16>::multiply(c[1], a, b[2], b[3]);
}

__device__ __forceinline__ uint32_t pack(float low, float high) { return Half<__nv_bfloat16>::pack(low, high); }

// Converts accumulators to a left operand.
__device__ __forceinline__ void pack_16(uint32_t (&a)[4], const float (&c)[2][4], float sign = 1.0f) {
#pragma unroll
  for (int i = 0; i < 4; ++i) a[i] = pack(sign * c[i / 2][i % 2 * 2], sign * c[i / 2][i % 2 * 2 + 1]);
}

__device__ __forceinline__ void transpose_16(uint32_t (&b)[4], const uint32_t (&a)[4]) {
#pragma unroll
  for (int i = 0; i < 4; ++i) b[i] = transpose(a[i]);
}

// ---- loads ----

template <bool Reverse, typename L>
__device__ __forceinline__ void load_tiles(const Block<L>& block, const DeltaCall& call, const Maps& maps) {
  const Work work = block.work();
  const int query = work.head / (call.heads / call.query_heads) * kKeyDim;
  const int key = work.head / (call.heads / call.key_heads) * kKeyDim;
  const int value = work.head / (call.heads / call.value_heads) * call.value_dim + work.first_value;
  Ring<L::kStages> ring;
  for (int step = work.first; step < work.end; ++step) {
    const uint32_t to = block.stage(ring.index), barrier = block.stage_full_barrier(ring.index);
    const Chunk chunk = chunk_at(call.table, call.tokens, work.row, chunk_of_step<Reverse>(work.chunks, step));
    if (step - work.first >= L::kStages) wait_for_phase(block.stage_free_barrier(ring.index), ring.phase ^ 1);
    arrive_and_expect(barrier, kStageBytes);
    copy_rows(to + kKeyOffset, &maps.key, key, chunk, work.row, barrier);
    copy_rows(to + kKeyOffset + kTileBytes, &maps.key, key + 64, chunk, work.row, barrier);
    copy_rows(to, &maps.query, query, chunk, work.row, barrier);
    copy_rows(to + kTileBytes, &maps.query, query + 64, chunk, work.row, barrier);
    copy_rows(to + kValueOffset, &maps.value, value, chunk, work.row, barrier);
    ring.next();
  }
}

// One warp; a lane has two tokens.
template <bool Reverse, typename L>
__device__ __forceinline__ void load_gates(const Block<L>& block, const DeltaCall& call) {
  const Work work = block.work();
  const int lane = block.thread % 32;
  const int64_t base = int64_t(work.row) * call.tokens * call.heads + work.head;
  float gate[2], beta[2];
  Chunk fetched;
  const auto fetch = [&](int step) {
    fetched = chunk_at(call.table, call.tokens, work.row, chunk_of_step<Reverse>(work.chunks, step));
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const bool valid = lane * 2 + i < fetched.tokens;
      const int64_t at = base + int64_t(fetched.token + lane * 2 + i) * call.heads;
      gate[i] = valid && call.gates != nullptr ? __ldg(call.gates + at) : 0.0f;
      beta[i] = !valid ? 0.0f : L::kDelta || call.beta != nullptr ? __ldg(call.beta + at) : 1.0f;
    }
  };
  fetch(work.first);
  Ring<L::kStages> ring;
  for (int step = work.first; step < work.end; ++step) {
    const float first = clamped_log2_gate(gate[0]), both = first + clamped_log2_gate(gate[1]);
    const float2 betas = {beta[0], beta[1]};
    const Chunk chunk = fetched;
    if (step + 1 < work.end) fetch(step + 1);
    float sum = both;
#pragma unroll
    for (int lanes = 1; lanes < 32; lanes *= 2) {
      const float earlier_sum = __shfl_up_sync(~0u, sum, lanes);
      if (lane >= lanes) sum += earlier_sum;
    }
    const float last = __shfl_sync(~0u, sum, 31);
    const float2 sums = {sum - both + first, sum};
    const float2 decay = {exp2_fast(sums.x), exp2_fast(sums.y)};
    if (step - work.first >= L::kStages) {
      wait_for_phase(block.stage_free_barrier(ring.index), ring.phase ^ 1);
    }
    float2* const stage_values =
        reinterpret_cast<float2*>(block.memory + L::kGatesOffset + ring.index * kGateBytes) + lane;
    stage_values[0] = sums;
    stage_values[32] = betas;
    stage_values[64] = decay;
    stage_values[96] = {betas.x * decay.x, betas.y * decay.y};
    const float2 written = L::kDelta ? float2{1.0f, 1.0f} : betas;
    stage_values[128] = {exp2_fast(last - sums.x) * written.x, exp2_fast(last - sums.y) * written.y};
    if (lane == 31) reinterpret_cast<float*>(stage_values + 129)[0] = decay.y;
    if (lane == 0) block.tokens(ring.index) = {chunk.token, chunk.rows, chunk.mark};
    __syncwarp();
    if (lane == 0) arrive(block.stage_full_barrier(ring.index));
    ring.next();
  }
}

// ---- pairs ----

template <typename L>
struct Pairs {
  const Block<L>& block;
  const DeltaCall& call;
  const int group;
  // Whether a group waits for only some of the chunks of a stage: every second one there.
  static constexpr bool kSkipsChunks = L::kStages % kPairWarpgroups != 0;
  int warp, lane, t, g;
  uint32_t strictly_lower[8][2];  // M in bfloat16: rows g and g + 8 of the warp's 16 rows
  uint32_t inverse[4];   // the inverse's block on the diagonal

  __device__ __forceinline__ Pairs(const Block<L>& b, const DeltaCall& c, int warpgroup_index)
      : block(b),
        call(c),
        group(warpgroup_index),
        warp(b.thread / 32 % 4),
        lane(b.thread % 32),
        t(b.thread % 4),
        g(b.thread % 32 / 4) {}

  __device__ __forceinline__ void synchronise_group() const { synchronise<128>(1 + group); }

  __device__ __forceinline__ void run() {
    Ring<L::kStages> stage;
    Ring<kPairSlots> slot;
    for (int i = 0; i < group; ++i) stage.next(), slot.next();
    for (int step = group; step < block.work().end - block.work().first; step += kPairWarpgroups) {
      solve_chunk(step, stage, slot);
#pragma unroll
      for (int i = 0; i < kPairWarpgroups; ++i) stage.next(), slot.next();
    }
  }

  __device__ __forceinline__ void store_block(uint32_t tile, int row, int column, const uint32_t (&a)[4]) const {
    store_matrices(tile + block_row(row, column, lane), a[0], a[1], a[2], a[3]);
  }

  __device__ __forceinline__ void load_block(uint32_t (&b)[4], uint32_t tile, int row, int column) const {
    load_matrices_transposed(b, tile + block_row(row, column, lane));
  }

  __device__ __forceinline__ void solve_chunk(int step, const Ring<L::kStages>& stage, const Ring<kPairSlots>& slot) {
    // The compiler must not hoist values that depend on these out of the loop: they would take registers.
    asm volatile("" : "+r"(warp), "+r"(lane), "+r"(t), "+r"(g));
    const uint32_t inverses = block.slot(slot.index);
    // Every second chunk of a stage has the same parity. If the copy of the stage's chunk before this one is late, the
    // barrier still has the parity for which this group waits, and it would go on at once, with an old chunk. So it first
    // waits until the state's warps have read the chunk before, which the slot had too.
    static_assert(!kSkipsChunks || L::kStages == kPairSlots, "the slot and the stage have different chunks before");
    if constexpr (kSkipsChunks) wait_for_slot(step, slot);
    wait_for_phase(block.stage_full_barrier(stage.index), stage.phase);
    float diagonal[2][4];
    compute_scores_and_system(stage.index, diagonal, step, slot);
    if constexpr (L::kDelta) {
      invert_diagonal(diagonal);
      invert_rest(inverses, step);
    }
    fence_shared_stores();
    __syncwarp();
    if (lane == 0) arrive(block.slot_full_barrier(slot.index));
  }

  // Waits until the state's warps have read the chunk that the slot had before.
  __device__ __forceinline__ void wait_for_slot(int step, const Ring<kPairSlots>& slot) const {
    if (step >= kPairSlots) wait_for_phase(block.slot_free_barrier(slot.index), slot.phase ^ 1);
  }

  // Multiplies keys with keys and with queries, applies the decay, and stores the scores of queries in shared memory.
  __device__ __forceinline__ void compute_scores_and_system(int stage, float (&diagonal)[2][4], int step,
      const Ring<kPairSlots>& slot) {
    float keys[8][4], queries[8][4];
    const uint64_t q = swizzled_operand(block.stage(stage)), k = swizzled_operand(block.stage(stage) + kKeyOffset);
    fence_products();
    if constexpr (L::kDelta) {
#pragma unroll
      for (int i = 0; i < 8; ++i) {
        const int at = i / 4 * (kTileBytes / 16) + i % 4 * 2;
        multiply_shared(keys, k + at, k + at, i);
      }
    }
#pragma unroll
    for (int i = 0; i < 8; ++i) {
      const int at = i / 4 * (kTileBytes / 16) + i % 4 * 2;
      multiply_shared(queries, q + at, k + at, i);
    }
    commit_products();
    const float* const gates = block.gates(stage);
    float sums[2], betas[2];
#pragma unroll
    for (int i = 0; i < 2; ++i) sums[i] = gates[warp * 16 + g + i * 8], betas[i] = gates[64 + warp * 16 + g + i * 8];
    if constexpr (L::kDelta) wait_for_products<0>(keys);
    wait_for_products<0>(queries);
    uint32_t scores[8][2];
#pragma unroll
    for (int tile = 0; tile < 8; ++tile) {
      scores[tile][0] = scores[tile][1] = strictly_lower[tile][0] = strictly_lower[tile][1] = 0;
      if (tile > 2 * warp + 1) continue;
      const float2 column_sums = *reinterpret_cast<const float2*>(gates + tile * 8 + t * 2);
      [[maybe_unused]] const float2 column_betas = *reinterpret_cast<const float2*>(gates + 64 + tile * 8 + t * 2);
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const int row = warp * 16 + g + i / 2 * 8, column = tile * 8 + t * 2 + i % 2;
        const float decay = exp2_fast(sums[i / 2] - (i % 2 ? column_sums.y : column_sums.x));
        queries[tile][i] = column <= row ? queries[tile][i] * decay : 0.0f;
        if constexpr (!L::kDelta) queries[tile][i] *= i % 2 ? column_betas.y : column_betas.x;
        if constexpr (L::kDelta) {
          const float pair = column < row ? keys[tile][i] * decay * betas[i / 2] : 0.0f;
          keys[tile][i] = pair;
          if (tile / 2 == warp) diagonal[tile % 2][i] = pair;
        }
      }
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        scores[tile][i] = pack(queries[tile][2 * i], queries[tile][2 * i + 1]);
        if constexpr (L::kDelta) strictly_lower[tile][i] = pack(keys[tile][2 * i], keys[tile][2 * i + 1]);
      }
    }
    __syncwarp();
    if (lane == 0) arrive(block.stage_free_barrier(stage));
    if constexpr (!kSkipsChunks) wait_for_slot(step, slot);
    const uint32_t to = block.slot(slot.index) + kTileBytes;
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      if (i > warp) continue;
      store_matrices(to + block_row(warp * 16, 2 * i, lane), scores[2 * i][0], scores[2 * i][1], scores[2 * i + 1][0],
                     scores[2 * i + 1][1]);
    }
  }

  // Computes (I + L)^-1 of the warp's 16 rows, L `lower`: blocks of 1, 2, 4 and 8 rows are joined, and the block below
  // the diagonal is minus the product of the second inverse, L's block, and the first inverse.
  __device__ __forceinline__ void invert_diagonal(const float (&lower)[2][4]) {
    float result[2][4];
    uint32_t packed[4], right[4];
#pragma unroll
    for (int i = 0; i < 8; ++i) {
      const int row = g + i % 4 / 2 * 8, column = i / 4 * 8 + t * 2 + i % 2;
      result[i / 4][i % 4] = (row == column) - (row / 2 == column / 2 ? lower[i / 4][i % 4] : 0.0f);
    }
    pack_16(packed, lower);
    transpose_16(right, packed);
    pack_16(inverse, result);
#pragma unroll
    for (int level = 1; level < 4; ++level) {
      uint32_t masked[4], transposed[4];
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const int row = i % 2 * 8 + t * 2, column = i / 2 * 8 + g;  // and the next row
        const bool joined = row >> (level + 1) == column >> (level + 1) && row >> level != column >> level;
        masked[i] = joined ? right[i] : 0;
      }
      float product[2][4] = {}, change[2][4] = {};
      multiply_16(product, inverse, masked);
      transpose_16(transposed, inverse);
      pack_16(packed, product);
      multiply_16(change, packed, transposed);
#pragma unroll
      for (int i = 0; i < 8; ++i) result[i / 4][i % 4] -= change[i / 4][i % 4];
      pack_16(inverse, result);
    }
  }

  // Joins the inverses of blocks of 16 and of 32 rows, which different warps have.
  __device__ __forceinline__ void invert_rest(uint32_t tile, int step) {
    // Alternates between two buffers, so that no warp overwrites what another one still reads of the previous chunk.
    const int scratch_index = step / kPairWarpgroups % 2 * kPairWarpgroups + group;
    const uint32_t scratch =
        block.shared + L::kScratchOffset + scratch_index * kScratchBytes + lane % 16 * kScratchRowBytes + lane / 16 * 16;
    store_block(tile, warp * 16, warp * 2, inverse);
    if (warp == 2) {
      store_matrices(scratch, strictly_lower[0][0], strictly_lower[0][1], strictly_lower[1][0], strictly_lower[1][1]);
      store_matrices(scratch + 32, strictly_lower[2][0], strictly_lower[2][1], strictly_lower[3][0],
          strictly_lower[3][1]);
    }
    synchronise_group();
    uint32_t joined[4], right[4], left[4];
    if (warp % 2 == 1) {
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        // Selects values, not array elements: an array that is indexed at run time would be in local memory.
        const uint32_t first = strictly_lower[i / 2][i % 2], third = strictly_lower[4 + i / 2][i % 2];
        left[i] = warp == 1 ? first : third;
      }
      transpose_16(right, left);
      float product[2][4] = {}, change[2][4] = {};
      multiply_16(product, inverse, right);
      pack_16(left, product);
      load_block(right, tile, (warp - 1) * 16, (warp - 1) * 2);
      multiply_16(change, left, right);
      pack_16(joined, change, -1.0f);
      store_block(tile, warp * 16, (warp - 1) * 2, joined);
    }
    synchronise_group();
    if (warp < 2) return;
    float product[2][2][4] = {}, change[2][2][4] = {};
#pragma unroll
    for (int i = 0; i < 2; ++i) {
#pragma unroll
      for (int j = 0; j < 4; ++j) left[j] = strictly_lower[2 * i + j / 2][j % 2];
      transpose_16(right, left);
      multiply_16(product[i], inverse, right);
      if (warp == 3) {
        load_matrices_transposed(right, scratch + i * 32);
        multiply_16(product[i], joined, right);
      }
    }
    pack_16(left, product[0]);
    load_block(right, tile, 0, 0);
    multiply_16(change[0], left, right);
    pack_16(left, product[1]);
    load_block(right, tile, 16, 0);
    multiply_16(change[0], left, right);
    load_block(right, tile, 16, 2);
    multiply_16(change[1], left, right);
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      pack_16(left, change[i], -1.0f);
      store_block(tile, warp * 16, 2 * i, left);
    }
  }
};

}  // namespace ejkernel::delta_rule
