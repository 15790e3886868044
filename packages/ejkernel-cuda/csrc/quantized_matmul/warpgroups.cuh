// The quantised matmul with `transpose=True` of 17 to 64 rows of bfloat16, by warpgroup products (WGMMA).
//
//   a first launch        x -> permuted, with sums over its groups -> device memory; first words -> L2
//   producer              x, words, scales, zeros -> ring in shared memory (bulk copies)
//   consumers             words -> registers -> left operand; x -> right operand; products of a group -> scale -> sums
//
// Each of the two consumer warpgroups has 128 columns, in two halves: products of one half run while those of the other
// are scaled and its next words are decoded. Blocks of a cluster split the contracted elements of the same columns, and
// add up their sums through distributed shared memory, in a fixed order.
#pragma once

#include <cooperative_groups.h>

#include "common/dependent_launch.cuh"
#include "quantized_matmul/transposed.cuh"
#include "common/warpgroup_mma.cuh"

namespace ejkernel::quantized_matmul {

constexpr int kUnit = 256, kUnitGroups = kUnit / kGroup;
constexpr int kColumns = 256;  // columns per block

// A CUtensorMap: describes a matrix to TMA.
struct alignas(64) TensorMap {
  char bytes[128];
};

struct ArrangeCall {
  TensorMap words;
  const __nv_bfloat16* x;  // [m, k]
  char* arranged;          // units of permuted x, one after the other
  int m, k, n, splits;
};

// Tensor maps. Two rows of scales and zeros [n, k / 64] are one row of the map, so that its stride is a multiple of 16
// bytes.
struct Maps {
  TensorMap words, scales, zeros;
};

struct WarpgroupsCall {
  const char* x;          // x, permuted
  __nv_bfloat16* output;  // [m, n]
  int m, k, n, splits;
};

// The range of units that a block multiplies. Units come in pairs, whose scales are copied together.
struct Share {
  int first, count;
  __device__ __forceinline__ Share(int k, int splits, int part) {
    const int units = k / kUnit, pairs = (units + 1) / 2;
    first = pairs * part / splits * 2;
    count = min(pairs * (part + 1) / splits * 2, units) - first;
  }
};

// A unit of x, with the same layout in shared and device memory. In a group of 64, lane t of four has the codes of
// words 2t and 2t + 1; codes j and j + 4 of a word share a register. A row of a group has 128 bytes, with the swizzle
// of WGMMA.
//
//   y = sum over groups of  s sum_k x (128 + q)  -  s (128 + zero) sum_k x
//
// The second term is one more product per unit, of 16 contracted elements. Group t has the factors hi hi lo hi of -s
// (128 + zero), in two digits of bfloat16, and the factors high middle high low of the sum of x, in three.
template <int Rows>
struct XUnit {
  static constexpr int kGroupBytes = Rows * 128, kSumsAt = kUnitGroups * kGroupBytes, kBytes = kSumsAt + Rows * 32;

  // WGMMA's descriptors: address, strides between 16-byte pieces and between eight rows, swizzle.
  static __device__ __forceinline__ uint64_t step(uint32_t unit, int group, int j) {
    return (unit + (group * kGroupBytes + j * 32) / 16) | 1 << 16 | uint64_t(1024 >> 4) << 32 | uint64_t(1) << 62;
  }
  static __device__ __forceinline__ uint64_t sums(uint32_t unit) {
    return (unit + kSumsAt / 16) | Rows << 16 | uint64_t(128 >> 4) << 32;
  }

  // Stores eight elements of a row, those of one word, in permuted order. Eight lanes share a group.
  static __device__ __forceinline__ void arrange(char* unit, int group, int row, int word, const uint4& eight) {
    const int first = word % 2 * 4, t = word / 2;
    char* const own = unit + group * kGroupBytes + row * 128;
    const auto put = [&](int i, uint32_t pair) {
      *reinterpret_cast<uint32_t*>(own + ((first + i) ^ row % 8) * 16 + t * 4) = pair;
    };
    put(0, __byte_perm(eight.x, eight.z, 0x5410)), put(1, __byte_perm(eight.x, eight.z, 0x7632));
    put(2, __byte_perm(eight.y, eight.w, 0x5410)), put(3, __byte_perm(eight.y, eight.w, 0x7632));
    float sum = (Transposed<1>::pair_sum(eight.x) + Transposed<1>::pair_sum(eight.y)) +
                (Transposed<1>::pair_sum(eight.z) + Transposed<1>::pair_sum(eight.w));
    sum += __shfl_xor_sync(~0u, sum, 1);
    sum += __shfl_xor_sync(~0u, sum, 2);
    sum += __shfl_xor_sync(~0u, sum, 4);
    if (word) return;
    const float high = __bfloat162float(__float2bfloat16_rn(sum));
    const float middle = __bfloat162float(__float2bfloat16_rn(sum - high)), low = sum - high - middle;
    uint32_t* const digits = reinterpret_cast<uint32_t*>(unit + kSumsAt + row * 16) + group;
    digits[0] = Half<__nv_bfloat16>::pack(high, middle);
    digits[Rows * 4] = Half<__nv_bfloat16>::pack(high, low);
  }
};

constexpr int kArrangeThreads = 256;
constexpr int kPrefetchedUnits = 2;  // per block of the matmul kernel

// Permutes x. Rows past the last one are zeros.
template <int Rows>
__global__ void __launch_bounds__(kArrangeThreads) arrange_kernel(const __grid_constant__ ArrangeCall call) {
#if __CUDA_ARCH__ == 900
  // The matmul kernel waits for this launch before it reads anything.
  start_next_launch();
  const int i = blockIdx.x * kArrangeThreads + threadIdx.x;
  if (i % 32 == 0) {
    // Prefetching into L2 is safe before the previous launch is complete: the matmul kernel reads the data after that.
    const int blocks = (call.n + kColumns - 1) / kColumns * call.splits;
    const int block = i / 32 % blocks, unit = i / 32 / blocks;
    const Share share(call.k, call.splits, block % call.splits);
    if (unit < min(kPrefetchedUnits, share.count)) {
      prefetch_tile(&call.words, (share.first + unit) * (kUnit / 8), block / call.splits * kColumns);
    }
  }
  wait_for_previous_launch();
  const int groups = call.k / kGroup, word = i % 8, group = i / 8 % groups, row = i / 8 / groups;
  uint4 eight = {0, 0, 0, 0};
  if (row < call.m) eight = *reinterpret_cast<const uint4*>(call.x + int64_t(row) * call.k + group * kGroup + word * 8);
  XUnit<Rows>::arrange(
      call.arranged + int64_t(group / kUnitGroups) * XUnit<Rows>::kBytes, group % kUnitGroups, row, word, eight);
#endif
}

template <int Rows>
struct Warpgroups {
  using X = XUnit<Rows>;
  static constexpr int kRows = Rows, kTiles = Rows / 8, kConsumers = 256, kWarps = kConsumers / 32;
  static constexpr int kThreads = kConsumers + 128, kTile = kColumns;
  static constexpr int kConsumerRegisters = Rows == 64 ? 216 : 184, kProducerRegisters = 24;
  // Layout of a stage: x, and 128 bytes of words of each column.
  static constexpr int kWordsAt = X::kBytes, kWordBytes = kTile * 128;
  static constexpr int kStageBytes = kWordsAt + kWordBytes, kStages = 3;
  // Scales and zeros of two units, 16 bytes per column, double-buffered: first those of even columns, then of odd ones.
  static constexpr int kFactorsAt = kStages * kStageBytes, kOddAt = kTile * 8, kZerosAt = kTile * 16;
  static constexpr int kFactorBytes = kTile * 32;
  static constexpr int kBarriersAt = kFactorsAt + 2 * kFactorBytes, kBytes = kBarriersAt + kStages * 16;
  static constexpr int kWidth = kTile + 4;  // row stride of partial sums, so that rows are in different banks
  static_assert(kStageBytes % 1024 == 0 && kWordsAt % 1024 == 0, "the swizzle of words is that of their addresses");
  static_assert(kStages == 3, "with a unit's stage the place of the pair before the last one is free");
  static_assert(Rows * kWidth * 4 <= kBarriersAt, "partial sums take the place of the ring");
  static_assert(kBytes <= 227 * 1024, "a block has as much shared memory");

  const WarpgroupsCall& call;
  const Maps& maps;
  char* const shared;
  const int part, first_n;
  const Share share;

  __device__ __forceinline__ Warpgroups(const WarpgroupsCall& c, const Maps& m, char* s)
      : call(c),
        maps(m),
        shared(s),
        part(blockIdx.x % c.splits),
        first_n(blockIdx.x / c.splits * kTile),
        share(c.k, c.splits, part) {}

  __device__ __forceinline__ uint32_t at(int stage) const { return shared_address(shared) + stage * kStageBytes; }
  // Copies start at a multiple of 16 bytes. If a row of scales has an odd number of 8-byte units, pairs of units start
  // at an odd unit in odd rows.
  __device__ __forceinline__ int place(int unit, int odd) const { return unit + (odd && call.k % (2 * kUnit)); }
  __device__ __forceinline__ bool begins_pair(int unit, int odd) const { return !unit || place(unit, odd) % 2 == 0; }
  __device__ __forceinline__ static int factors_at(int place) { return kFactorsAt + place / 2 % 2 * kFactorBytes; }
  // A stage's two mbarriers: its copies have arrived; all warps have read it.
  __device__ __forceinline__ uint32_t copied(int stage) const {
    return shared_address(shared) + kBarriersAt + stage * 16;
  }
  __device__ __forceinline__ uint32_t emptied(int stage) const { return copied(stage) + 8; }

  __device__ __forceinline__ void start_barriers() const {
#pragma unroll
    for (int stage = 0; stage < kStages; ++stage) {
      start_barrier(copied(stage), 1);
      start_barrier(emptied(stage), kWarps);
    }
    publish_barriers();
  }

  __device__ __forceinline__ void copy(int unit, int stage) const {
    const int from = share.first + unit;
    const uint32_t barrier = copied(stage);
    const int factors = begins_pair(unit, 0) + begins_pair(unit, 1);
    arrive_and_expect(barrier, X::kBytes + kWordBytes + factors * (kFactorBytes / 2));
    copy_bulk(at(stage), call.x + int64_t(from) * X::kBytes, X::kBytes, barrier);
    copy_tile(at(stage) + kWordsAt, &maps.words, from * (kUnit / 8), first_n, barrier);
#pragma unroll
    for (int odd = 0; odd < 2; ++odd) {
      if (!begins_pair(unit, odd)) continue;
      const int own = place(unit, odd);
      const int group = (from - own % 2) * kUnitGroups + odd * (call.k / kGroup);
      const uint32_t to = shared_address(shared) + factors_at(own) + odd * kOddAt;
      copy_tile(to, &maps.scales, group, first_n / 2, barrier);
      copy_tile(to + kZerosAt, &maps.zeros, group, first_n / 2, barrier);
    }
  }

  // The producer: one thread.
  __device__ __forceinline__ void copy_all() const {
    wait_for_previous_launch();
    for (int unit = 0; unit < min(kStages, share.count); ++unit) copy(unit, unit);
    int stage = 0;
    uint32_t phase = 0;
    for (int unit = kStages; unit < share.count; ++unit) {
      wait_for_phase(emptied(stage), phase);
      copy(unit, stage);
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
  const int warp, lane, t, row;  // the thread's rows of words: `row` and `row` + 1
  float sums[2][kTiles][4] = {};

  // Even rows: four words of a half warp are in different banks, and so are eight scales.
  __device__ __forceinline__ explicit WarpgroupsConsumer(const L& b)
      : block(b),
        warp(threadIdx.x / 32),
        lane(threadIdx.x % 32),
        t(lane % 4),
        row(lane / 4 * 2) {}

  // The first column of the warp in half `half`.
  __device__ __forceinline__ int columns(int half) const { return warp / 4 * 128 + half * 64 + warp % 4 * 16; }

  __device__ __forceinline__ void run() {
    int stage = 0;
    uint32_t phase = 0;
    uint32_t codes[2][4][4];
    float products[2][kTiles][4];
    float scale[2][2];
    uint2 words[2];
    for (int unit = 0; unit < block.share.count; ++unit) {
      wait_for_phase(block.copied(stage), phase);
      const char* own = block.shared + stage * L::kStageBytes + L::kWordsAt;
      const int odd = block.place(unit, 1);
      const char* const even_factors = block.shared + L::factors_at(unit) + unit % 2 * 8;
      const char* const odd_factors = block.shared + L::factors_at(odd) + L::kOddAt + odd % 2 * 8;
      const uint32_t x = (block.at(stage) & 0x3FFFF) / 16;
      load_words(words, own, 0, 0);
#pragma unroll
      for (int group = 0; group < kUnitGroups; ++group) {
#pragma unroll
        for (int half = 0; half < 2; ++half) {
          const int factors_row = (columns(half) + row) * 8;
          const char* const factors[2] = {even_factors + factors_row, odd_factors + factors_row};
          Transposed<1>::decode(codes[half], words[0].x, words[1].x, 0);
          Transposed<1>::decode(codes[half], words[0].y, words[1].y, 2);
          uint32_t offsets[4];
          if (group == 0) decode_offsets(offsets, factors);
          fence_products();
          if (group == 0) WarpgroupProduct<kTiles>::multiply(sums[half], offsets, X::sums(x), 1);
#pragma unroll
          for (int j = 0; j < 4; ++j) {
            WarpgroupProduct<kTiles>::multiply(products[half], codes[half][j], X::step(x, group, j), j);
          }
          commit_products();
          // These loads overlap with the products.
          if (group < kUnitGroups - 1 || half == 0) load_words(words, own, 1 - half, group + half);
          // Wait for the products of the other half, which were issued before.
          if (group || half) {
            wait_for_products<1>(products[1 - half]);
            add(1 - half, products[1 - half], scale[1 - half]);
          }
          load_scales(scale[half], factors, group);
        }
      }
      wait_for_products<0>(products[1]);
      __syncwarp();
      if (lane == 0) arrive(block.emptied(stage));
      add(1, products[1], scale[1]);
      if (++stage == L::kStages) stage = 0, phase ^= 1;
    }
  }

  __device__ __forceinline__ void load_scales(float (&scale)[2], const char* const (&factors)[2], int group) const {
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      scale[r] = half_bits_to_float(*reinterpret_cast<const uint16_t*>(factors[r] + group * 2));
    }
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

  // Loads the words of a group.
  __device__ __forceinline__ void load_words(uint2 (&words)[2], const char* own, int half, int group) const {
    const char* const from = own + (columns(half) + row) * 128 + t % 2 * 8;
    const int at = ((group * 2 + t / 2) ^ row % 8) * 16;
    words[0] = *reinterpret_cast<const uint2*>(from + at);
    words[1] = *reinterpret_cast<const uint2*>(from + 128 + (at ^ 16));
  }

  // The left operand of the sums of x: lane t has group t.
  __device__ __forceinline__ void decode_offsets(uint32_t (&offsets)[4], const char* const (&factors)[2]) const {
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      const char* from = factors[r] + t * 2;
      const float scale = half_bits_to_float(*reinterpret_cast<const uint16_t*>(from));
      const float zero = half_bits_to_float(*reinterpret_cast<const uint16_t*>(from + L::kZerosAt));
      const float offset = scale * (-128.0f - zero), high = __bfloat162float(__float2bfloat16_rn(offset));
      offsets[r] = Half<__nv_bfloat16>::pack(high, high);
      offsets[2 + r] = Half<__nv_bfloat16>::pack(offset - high, high);
    }
  }

  // Adds up the sums of all blocks of the cluster; each block computes its share of the outputs.
  __device__ __forceinline__ void epilogue() {
    synchronise_first<L::kConsumers>();
    float* const partial = reinterpret_cast<float*>(block.shared);
#pragma unroll
    for (int i = 0; i < 2 * kTiles * 2; ++i) {
      const int half = i / (kTiles * 2), tile = i / 2 % kTiles, c = i % 2;
      *reinterpret_cast<float2*>(partial + (tile * 8 + 2 * t + c) * L::kWidth + columns(half) + row) = {
          sums[half][tile][c], sums[half][tile][c + 2]};
    }
    synchronise_stores_of_cluster();
    // The same number of loads in flight, over rows or over blocks.
    const int splits = block.call.splits;
    if (splits <= 2) {
      add_up<kTiles, 2>(partial);
    } else if (splits <= 4) {
      add_up<kTiles / 2, 4>(partial);
    } else {
      add_up<kTiles / 4, kMostSplits>(partial);
    }
    synchronise_cluster();  // other blocks may still be reading this block's sums
  }

  // Adds up the sums of the cluster's blocks. A thread has four columns of `Batch` rows at a time, and loads those of
  // up to `Most` blocks at once, so that no load waits for another.
  template <int Batch, int Most>
  __device__ __forceinline__ void add_up(float* partial) const {
    const auto cluster = cooperative_groups::this_cluster();
    const WarpgroupsCall& call = block.call;
    constexpr int kQuads = L::kTile / 4;
    const int column = threadIdx.x % kQuads * 4, step = L::kConsumers / kQuads * call.splits;
    for (int m = threadIdx.x / kQuads + block.part * (L::kConsumers / kQuads); m < call.m; m += Batch * step) {
      float4 own[Most][Batch] = {};
#pragma unroll
      for (int other = 0; other < Most; ++other) {
        if (other >= call.splits) continue;
        const float* from = cluster.map_shared_rank(partial, other) + column;
#pragma unroll
        for (int i = 0; i < Batch; ++i) {
          const int sum_row = m + i * step;
          if (sum_row < call.m) own[other][i] = *reinterpret_cast<const float4*>(from + sum_row * L::kWidth);
        }
      }
      if (block.first_n + column >= call.n) continue;
#pragma unroll
      for (int i = 0; i < Batch; ++i) {
        if (m + i * step >= call.m) continue;
        float4 sum = own[0][i];
#pragma unroll
        for (int other = 1; other < Most; ++other) {
          const float4& more = own[other][i];
          sum.x += more.x, sum.y += more.y, sum.z += more.z, sum.w += more.w;
        }
        const uint2 rounded = {Half<__nv_bfloat16>::pack(sum.x, sum.y), Half<__nv_bfloat16>::pack(sum.z, sum.w)};
        *reinterpret_cast<uint2*>(call.output + int64_t(m + i * step) * call.n + block.first_n + column) = rounded;
      }
    }
  }
};

template <typename L>
__global__ void __launch_bounds__(L::kThreads, 1)
    warpgroups_kernel(const WarpgroupsCall call, const __grid_constant__ Maps maps) {
#if __CUDA_ARCH__ == 900
  extern __shared__ __align__(1024) char shared[];
  const L block(call, maps, shared);
  const bool copies = threadIdx.x == L::kConsumers;
  if (copies) {
    prefetch_map(&maps.words), prefetch_map(&maps.scales), prefetch_map(&maps.zeros);
    block.start_barriers();
  }
  __syncthreads();
  if (threadIdx.x >= L::kConsumers) {
    give_registers<L::kProducerRegisters>();
    if (copies) {
      block.copy_all();
      // Not earlier: the next launch's prefetches into L2 would compete for bandwidth.
      start_next_launch();
    }
    __syncwarp();
    synchronise_stores_of_cluster();
    synchronise_cluster();
  } else {
    take_registers<L::kConsumerRegisters>();
    WarpgroupsConsumer<L::kRows> consumer(block);
    consumer.run();
    consumer.epilogue();
  }
#endif
}

}  // namespace ejkernel::quantized_matmul
