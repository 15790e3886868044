// The quantised matmul with `transpose=True` of 17 to 64 rows of bfloat16: products of warpgroups (WGMMA).
//
//   x, words      device memory -> ring in shared memory (TMA)
//   producer      x -> in the order of the products, in its place; sums of its groups
//   consumers     words -> registers -> left operand; x -> right operand; products of a group -> scale -> sums
//
// Each of the two consumer warpgroups has 128 columns, in two halves: products of one half run while those of the other
// are scaled and its next words are decoded. Blocks of a cluster share the contracted elements of the same columns, and
// add their sums up through distributed shared memory, in a fixed order.
#pragma once

#include <cooperative_groups.h>

#include "dependent_launch.cuh"
#include "quantized_transposed.cuh"
#include "warpgroup_mma.cuh"

namespace ejkernel {

constexpr int kUnit = 256, kUnitGroups = kUnit / kGroup;

struct WarpgroupsCall {
  const uint16_t *scales, *zeros;  // [n, k / 64], float16
  __nv_bfloat16* output;           // [m, n]
  int m, k, n, splits;
};

// Describes a matrix to the copy engine.
struct alignas(64) TensorMap {
  char bytes[128];
};

struct Maps {
  TensorMap x, words;
};

// A unit of x in shared memory. Of a group of 64, lane t of four has the codes of words 2t and 2t + 1; of a word, codes j
// and j + 4 are in one register. A row of a group has 128 bytes, with the swizzle of TMA and WGMMA.
//
//   y = sum over groups of  s sum_k x (128 + q)  -  s (128 + zero) sum_k x
//
// The second part is one more product a unit, of 16 contracted elements: to group t belong hi hi lo hi of
// -s (128 + zero), in two digits of bfloat16, and high middle high low of the sum of x, in three.
template <int Rows>
struct XUnit {
  static constexpr int kGroupBytes = Rows * 128, kSumsAt = kUnitGroups * kGroupBytes, kBytes = kSumsAt + Rows * 32;

  // WGMMA's descriptors: address, steps between pieces of 16 bytes and between eight rows, swizzle.
  static __device__ __forceinline__ uint64_t step(uint32_t unit, int group, int j) {
    return (unit + (group * kGroupBytes + j * 32) / 16) | 1 << 16 | uint64_t(1024 >> 4) << 32 | uint64_t(1) << 62;
  }
  static __device__ __forceinline__ uint64_t sums(uint32_t unit) {
    return (unit + kSumsAt / 16) | Rows << 16 | uint64_t(128 >> 4) << 32;
  }

  // Brings a row of a group into order.
  static __device__ __forceinline__ void arrange(char* unit, int group, int row) {
    char* const own = unit + group * kGroupBytes + row * 128;
    const auto piece = [&](int i) { return reinterpret_cast<uint4*>(own + (i ^ row % 8) * 16); };
    uint32_t pairs[8][4];
    float sum = 0;
#pragma unroll
    for (int word = 0; word < 8; ++word) {
      const uint4 eight = *piece(word);
      const int half = word % 2 * 4, t = word / 2;
      pairs[half][t] = __byte_perm(eight.x, eight.z, 0x5410), pairs[half + 1][t] = __byte_perm(eight.x, eight.z, 0x7632);
      pairs[half + 2][t] = __byte_perm(eight.y, eight.w, 0x5410);
      pairs[half + 3][t] = __byte_perm(eight.y, eight.w, 0x7632);
      sum += (Transposed<1>::pair_sum(eight.x) + Transposed<1>::pair_sum(eight.y)) +
             (Transposed<1>::pair_sum(eight.z) + Transposed<1>::pair_sum(eight.w));
    }
#pragma unroll
    for (int i = 0; i < 8; ++i) *piece(i) = {pairs[i][0], pairs[i][1], pairs[i][2], pairs[i][3]};
    const float high = __bfloat162float(__float2bfloat16_rn(sum));
    const float middle = __bfloat162float(__float2bfloat16_rn(sum - high)), low = sum - high - middle;
    uint32_t* const digits = reinterpret_cast<uint32_t*>(unit + kSumsAt + row * 16) + group;
    digits[0] = Half<__nv_bfloat16>::pack(high, middle);
    digits[Rows * 4] = Half<__nv_bfloat16>::pack(high, low);
  }
};

template <int Rows>
struct Warpgroups {
  using X = XUnit<Rows>;
  static constexpr int kRows = Rows, kTiles = Rows / 8, kThreads = 384, kConsumers = 256, kWarps = kConsumers / 32;
  static constexpr int kTile = 256, kProducers = kThreads - kConsumers;
  static constexpr int kConsumerRegisters = Rows == 64 ? 216 : 184, kProducerRegisters = Rows == 64 ? 72 : 88;
  // Of a stage: x, 128 bytes of words of each column, and scales and zeros of four groups of each column.
  static constexpr int kWordsAt = (X::kBytes + 1023) / 1024 * 1024, kWordBytes = kTile * 128;
  static constexpr int kFactorsAt = kWordsAt + kWordBytes, kFactorBytes = 2 * 16 * 8;  // of a warp's half
  static constexpr int kStageBytes = kFactorsAt + kTile * 16, kStages = 3;
  static constexpr int kBarriersAt = kStages * kStageBytes, kBytes = kBarriersAt + kStages * 24;
  static constexpr int kWidth = kTile + 4;  // of partial sums: rows lie in different banks
  static_assert(kStageBytes % 1024 == 0 && kWordsAt % 1024 == 0, "the swizzle of words is that of their addresses");
  static_assert(Rows * kWidth * 4 <= kBarriersAt, "partial sums take the place of the ring");

  const WarpgroupsCall& call;
  const Maps& maps;
  char* const shared;
  const int part, first_n;
  int first, count;  // units of this block

  __device__ __forceinline__ Warpgroups(const WarpgroupsCall& c, const Maps& m, char* s)
      : call(c), maps(m), shared(s), part(blockIdx.x % c.splits), first_n(blockIdx.x / c.splits * kTile) {
    const int units = call.k / kUnit;
    first = units * part / call.splits;
    count = units * (part + 1) / call.splits - first;
  }

  __device__ __forceinline__ uint32_t at(int stage) const { return shared_address(shared) + stage * kStageBytes; }
  // A stage's barriers: its copies have arrived, its x is in order, all warps have read it.
  __device__ __forceinline__ uint32_t copied(int stage) const {
    return shared_address(shared) + kBarriersAt + stage * 24;
  }
  __device__ __forceinline__ uint32_t arranged(int stage) const { return copied(stage) + 8; }
  __device__ __forceinline__ uint32_t emptied(int stage) const { return copied(stage) + 16; }

  __device__ __forceinline__ void start_barriers() const {
    if (threadIdx.x == 0) {
#pragma unroll
      for (int stage = 0; stage < kStages; ++stage) {
        start_barrier(copied(stage), 1);
        start_barrier(arranged(stage), kProducers / 32);
        start_barrier(emptied(stage), kWarps);
      }
      publish_barriers();
    }
    __syncthreads();
  }

  __device__ __forceinline__ void copy(int unit, int stage) const {
    const int k = (first + unit) * kUnit;
    arrive_and_expect(copied(stage), kUnitGroups * X::kGroupBytes + kWordBytes);
#pragma unroll
    for (int group = 0; group < kUnitGroups; ++group) {
      copy_tile(at(stage) + group * X::kGroupBytes, &maps.x, k + group * kGroup, 0, copied(stage));
    }
    copy_tile(at(stage) + kWordsAt, &maps.words, k / 8, first_n, copied(stage));
  }

  // The producer warpgroup.
  __device__ __forceinline__ void produce() const {
    const int thread = threadIdx.x - kConsumers;
    const bool first_thread = thread == 0;
    if (first_thread) {
      for (int unit = 0; unit < min(kStages, count); ++unit) copy(unit, unit);
    }
    int stage = 0;
    uint32_t phase = 0;
    for (int unit = 0; unit < count; ++unit) {
      wait_for_phase(copied(stage), phase);
#pragma unroll
      for (int i = thread; i < kUnitGroups * Rows; i += kProducers) {
        X::arrange(shared + stage * kStageBytes, i / Rows, i % Rows);
      }
      fence_shared_stores();
      __syncwarp();
      if (thread % 32 == 0) arrive(arranged(stage));
      // The unit before has been read by now, or almost: a later one takes its place.
      if (first_thread && unit && unit + kStages - 1 < count) {
        const int before = stage ? stage - 1 : kStages - 1;
        wait_for_phase(emptied(before), stage ? phase : phase ^ 1);
        copy(unit + kStages - 1, before);
      }
      __syncwarp();
      if (++stage == kStages) stage = 0, phase ^= 1;
    }
  }
};

// A consumer thread.
template <int Rows>
struct WarpgroupsConsumer {
  using L = Warpgroups<Rows>;
  using X = XUnit<Rows>;
  static constexpr int kTiles = L::kTiles;

  const L& block;
  const int warp, lane, t, row;
  bool copies[2];  // whether the column of this lane's scales is one
  const uint16_t* factors[2];
  float sums[2][kTiles][4] = {};

  // Rows 0 2 4 6 and 1 3 5 7 of eight: four words of a half warp lie in different banks.
  __device__ __forceinline__ explicit WarpgroupsConsumer(const L& b)
      : block(b),
        warp(threadIdx.x / 32),
        lane(threadIdx.x % 32),
        t(lane % 4),
        row(lane / 4 % 4 * 2 + lane / 16) {
    const int row_groups = b.call.k / kGroup;
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int column = b.first_n + columns(half) + lane % 16;
      copies[half] = column < b.call.n;
      factors[half] = (lane < 16 ? b.call.scales : b.call.zeros) + int64_t(column) * row_groups + b.first * kUnitGroups;
    }
  }

  // The first column of the warp's half.
  __device__ __forceinline__ int columns(int half) const { return warp / 4 * 128 + half * 64 + warp % 4 * 16; }

  // Of the next unit, four scales or zeros a lane. What is past the last column stays as it is: it is not stored.
  __device__ __forceinline__ void copy_factors(int stage) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const uint32_t to = block.at(stage) + L::kFactorsAt + columns(half) * 16 + lane * 8;
      if (copies[half]) copy_four_async(to, factors[half]);
      factors[half] += kUnitGroups;
    }
  }

  __device__ __forceinline__ void run() {
#pragma unroll
    for (int stage = 0; stage < L::kStages - 1; ++stage) {
      if (stage < block.count) copy_factors(stage);
      commit_copies();
    }
    int stage = 0, next = L::kStages - 1;
    uint32_t phase = 0;
    uint32_t codes[2][4][4];
    float products[2][kTiles][4];
    float scale[2][2];
    for (int unit = 0; unit < block.count; ++unit) {
      wait_for_copies<L::kStages - 2>();
      __syncwarp();  // scales of the other lanes have arrived, and they have read what the next ones replace
      if (unit + L::kStages - 1 < block.count) copy_factors(next);
      commit_copies();
      wait_for_phase(block.copied(stage), phase);
      const char* own = block.shared + stage * L::kStageBytes;
      const uint32_t x = (block.at(stage) & 0x3FFFF) / 16;
      wait_for_phase(block.arranged(stage), phase);
#pragma unroll
      for (int group = 0; group < kUnitGroups; ++group) {
#pragma unroll
        for (int half = 0; half < 2; ++half) {
          decode(codes[half], own, half, group);
          uint32_t offsets[4];
          if (group == 0) decode_offsets(offsets, own, half);
          fence_products();
          if (group == 0) WarpgroupProduct<kTiles>::multiply(sums[half], offsets, X::sums(x), 1);
#pragma unroll
          for (int j = 0; j < 4; ++j) {
            WarpgroupProduct<kTiles>::multiply(products[half], codes[half][j], X::step(x, group, j), j);
          }
          commit_products();
          // The products of the other half, which came before.
          if (group || half) {
            wait_for_products<1>(products[1 - half]);
            add(1 - half, products[1 - half], scale[1 - half]);
          }
          load_scales(scale[half], own, half, group);
        }
      }
      wait_for_products<0>(products[1]);
      __syncwarp();
      if (lane == 0) arrive(block.emptied(stage));
      add(1, products[1], scale[1]);
      next = stage;
      if (++stage == L::kStages) stage = 0, phase ^= 1;
    }
  }

  __device__ __forceinline__ void load_scales(float (&scale)[2], const char* own, int half, int group) const {
    const char* from = own + L::kFactorsAt + columns(half) * 16 + row * 8 + group * 2;
#pragma unroll
    for (int r = 0; r < 2; ++r) scale[r] = half_bits_to_float(*reinterpret_cast<const uint16_t*>(from + r * 64));
  }

  __device__ __forceinline__ void add(int half, const float (&products)[kTiles][4], const float (&scale)[2]) {
#pragma unroll
    for (int tile = 0; tile < kTiles; ++tile) {
#pragma unroll
      for (int c = 0; c < 4; ++c) {
        sums[half][tile][c] = fmaf(scale[c / 2], products[tile][c], sums[half][tile][c]);
      }
    }
  }

  // The left operands of a group: words of rows `row` and `row` + 8.
  __device__ __forceinline__ void decode(uint32_t (&codes)[4][4], const char* own, int half, int group) const {
    const char* from = own + L::kWordsAt + (columns(half) + row) * 128 + ((group * 2 + t / 2) ^ row) * 16 + t % 2 * 8;
    const uint2 upper = *reinterpret_cast<const uint2*>(from), lower = *reinterpret_cast<const uint2*>(from + 1024);
    Transposed<1>::decode(codes, upper.x, lower.x, 0);
    Transposed<1>::decode(codes, upper.y, lower.y, 2);
  }

  // The left operand of the sums of x: of group t.
  __device__ __forceinline__ void decode_offsets(uint32_t (&offsets)[4], const char* own, int half) const {
    const char* from = own + L::kFactorsAt + columns(half) * 16 + row * 8 + t * 2;
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      const float scale = half_bits_to_float(*reinterpret_cast<const uint16_t*>(from + r * 64));
      const float zero = half_bits_to_float(*reinterpret_cast<const uint16_t*>(from + r * 64 + 128));
      const float offset = scale * (-128.0f - zero), high = __bfloat162float(__float2bfloat16_rn(offset));
      offsets[r] = Half<__nv_bfloat16>::pack(high, high);
      offsets[2 + r] = Half<__nv_bfloat16>::pack(offset - high, high);
    }
  }

  // Adds up the sums of all blocks of the cluster; each block has its part of the outputs.
  __device__ __forceinline__ void epilogue() {
    synchronise_first<L::kConsumers>();
    float* const partial = reinterpret_cast<float*>(block.shared);
#pragma unroll
    for (int i = 0; i < 2 * kTiles * 4; ++i) {
      const int half = i / (kTiles * 4), tile = i / 4 % kTiles, c = i % 4;
      partial[(tile * 8 + 2 * t + c % 2) * L::kWidth + columns(half) + row + c / 2 * 8] = sums[half][tile][c];
    }
    synchronise_stores_of_cluster();
    constexpr int kQuads = L::kTile / 4, kBatch = Rows < 32 ? 4 : Rows / 8;
    for (int i = threadIdx.x + block.part * L::kConsumers; i < block.call.m * kQuads;
         i += kBatch * L::kConsumers * block.call.splits) {
      add_up<kBatch>(partial, i);
    }
    synchronise_cluster();  // other blocks still read this one's sums
  }

  // Four columns of `Batch` rows, or of fewer: their loads do not wait for each other.
  template <int Batch>
  __device__ __forceinline__ void add_up(float* partial, int begin) const {
    const auto cluster = cooperative_groups::this_cluster();
    const WarpgroupsCall& call = block.call;
    constexpr int kQuads = L::kTile / 4;
    const int step = L::kConsumers * call.splits, column = begin % kQuads * 4;
    float4 sum[Batch] = {};
    for (int other = 0; other < call.splits; ++other) {
      const float* from = cluster.map_shared_rank(partial, other) + column;
#pragma unroll
      for (int i = 0; i < Batch; ++i) {
        const int m = (begin + i * step) / kQuads;
        if (m >= call.m) continue;
        const float4 more = *reinterpret_cast<const float4*>(from + m * L::kWidth);
        sum[i].x += more.x, sum[i].y += more.y, sum[i].z += more.z, sum[i].w += more.w;
      }
    }
    if (block.first_n + column >= call.n) return;
#pragma unroll
    for (int i = 0; i < Batch; ++i) {
      const int m = (begin + i * step) / kQuads;
      if (m >= call.m) continue;
      const uint2 rounded = {
          Half<__nv_bfloat16>::pack(sum[i].x, sum[i].y), Half<__nv_bfloat16>::pack(sum[i].z, sum[i].w)};
      *reinterpret_cast<uint2*>(call.output + int64_t(m) * call.n + block.first_n + column) = rounded;
    }
  }
};

template <typename L>
__global__ void __launch_bounds__(L::kThreads, 1)
    warpgroups_kernel(const WarpgroupsCall call, const __grid_constant__ Maps maps) {
#if __CUDA_ARCH__ == 900
  extern __shared__ __align__(1024) char shared[];
  const L block(call, maps, shared);
  block.start_barriers();
  wait_for_previous_launch();
  if (threadIdx.x >= L::kConsumers) {
    give_registers<L::kProducerRegisters>();
    block.produce();
    start_next_launch();
    synchronise_stores_of_cluster();
    synchronise_cluster();
  } else {
    take_registers<L::kConsumerRegisters>();
    WarpgroupsConsumer<L::kRows> consumer(block);
    consumer.run();
    start_next_launch();
    consumer.epilogue();
  }
#endif
}

}  // namespace ejkernel
