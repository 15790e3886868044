// The quantised matmul with `transpose=False` of up to 64 rows of bfloat16, by warpgroup products (WGMMA).
//
//   x, words        device memory -> ring in shared memory (TMA)
//   scales, zeros   device memory -> shared memory (cp.async) -> producer -> factors of pairs of rows, in the ring
//   consumers       words, factors -> weights, in registers -> left operand; x -> right operand; sums stay in registers
//
// A block has 256 columns. Each of the two consumer warpgroups multiplies half of the codes of every word, so the
// warpgroups of a block have no sums to add up. Blocks of a cluster split the contracted elements of the same columns,
// and add up their sums through distributed shared memory, in a fixed order.
#pragma once

#include <cooperative_groups.h>

#include "quantized_matmul/warpgroups.cuh"

namespace ejkernel::quantized_matmul {

struct RowsMaps {
  TensorMap x, words;
};

struct RowsCall {
  const uint16_t *scales, *zeros;  // [k, n / 64], float16
  __nv_bfloat16* output;           // [m, n]
  int m, k, n, splits;
};

// The factors of two neighbouring contracted elements and a group, each a pair of bfloat16:
//
//   weight = (q - zero) scale = (q - whole) upper + ((q - whole) lower + (whole - zero) scale)
// `upper` and `lower` are the digits of the scale, `whole` is the zero rounded to an integer. The decoded code is 128 +
// q: subtracting `offset` = 128 + whole is exact, and `rest` is (whole - zero) scale - (128 + whole) lower. The terms
// that are rounded are small compared with the weight.
// beside the weight is small.
struct alignas(16) PairFactors {
  uint32_t upper, lower, rest, offset;

  static __device__ __forceinline__ PairFactors of(const float (&scale)[2], const float (&zero)[2]) {
    constexpr float kMost = 120;  // the largest |whole| for which 128 + whole is exact
    float lower[2], rest[2], offset[2];
    const uint32_t upper = Half<__nv_bfloat16>::pack(scale[0], scale[1]);
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const float whole = fminf(fmaxf(rintf(zero[i]), -kMost), kMost);
      lower[i] = scale[i] - __uint_as_float(i ? upper & 0xFFFF0000 : upper << 16);
      offset[i] = -128.0f - whole;
      rest[i] = fmaf(offset[i], lower[i], (whole - zero[i]) * scale[i]);
    }
    return {upper, Half<__nv_bfloat16>::pack(lower[0], lower[1]), Half<__nv_bfloat16>::pack(rest[0], rest[1]),
            Half<__nv_bfloat16>::pack(offset[0], offset[1])};
  }

  // The weights of two codes that were decoded on 128.
  __device__ __forceinline__ uint32_t weights(uint32_t codes) const {
    const auto two = [](uint32_t bits) { return *reinterpret_cast<const __nv_bfloat162*>(&bits); };
    const __nv_bfloat162 small = __hfma2(two(codes), two(lower), two(rest));
    const __nv_bfloat162 both = __hfma2(__hadd2(two(codes), two(offset)), two(upper), small);
    return *reinterpret_cast<const uint32_t*>(&both);
  }
};

template <int Rows>
struct RowsWarpgroups {
  static constexpr int kRows = Rows, kTiles = Rows / 8, kThreads = 384, kConsumers = 256, kWarps = kConsumers / 32;
  static constexpr int kTile = 256, kGroups = kTile / kGroup, kProducers = kThreads - kConsumers;
  static constexpr int kDepth = 128, kPairs = kDepth / 2;  // contracted elements of a stage
  // Layout of a stage: x in two halves of 64 contracted elements, rows of words of 128 bytes, factors by group.
  static constexpr int kXPartBytes = Rows * 128, kWordsAt = 2 * kXPartBytes, kWordBytes = kDepth * kTile / 2;
  static constexpr int kFactorsAt = kWordsAt + kWordBytes, kFactorBytes = kPairs * 16;  // of a group
  static constexpr int kStageBytes = kFactorsAt + kGroups * kFactorBytes, kStages = 3;
  // Scales and zeros before the producer converts them: 16 bytes per producer thread and stage, in a separate ring.
  static constexpr int kAhead = 2, kRawAt = kStages * kStageBytes, kRawBytes = kProducers * 16;
  static constexpr int kBarriersAt = kRawAt + kAhead * kRawBytes, kBytes = kBarriersAt + kStages * 16;
  static_assert(kStageBytes % 1024 == 0 && kWordsAt % 1024 == 0, "the swizzle is that of addresses");
  static_assert(Rows * kTile * 4 <= kBarriersAt, "partial sums take the place of the ring");

  const RowsCall& call;
  const RowsMaps& maps;
  char* const shared;
  const int part, first_n;
  int first, count;  // stages of this block

  __device__ __forceinline__ RowsWarpgroups(const RowsCall& c, const RowsMaps& m, char* s)
      : call(c), maps(m), shared(s), part(blockIdx.x % c.splits), first_n(blockIdx.x / c.splits * kTile) {
    const int units = (call.k + kDepth - 1) / kDepth;
    first = units * part / call.splits;
    count = units * (part + 1) / call.splits - first;
  }

  __device__ __forceinline__ uint32_t at(int stage) const { return shared_address(shared) + stage * kStageBytes; }
  // A stage's two mbarriers: copies and factors have arrived; all warps have read the stage.
  __device__ __forceinline__ uint32_t filled(int stage) const {
    return shared_address(shared) + kBarriersAt + stage * 16;
  }
  __device__ __forceinline__ uint32_t emptied(int stage) const { return filled(stage) + 8; }

  __device__ __forceinline__ void start_barriers() const {
    if (threadIdx.x == 0) {
#pragma unroll
      for (int stage = 0; stage < kStages; ++stage) {
        start_barrier(filled(stage), 1 + kProducers / 32);
        start_barrier(emptied(stage), kWarps);
      }
      publish_barriers();
    }
    __syncthreads();
  }

  __device__ __forceinline__ void copy(int unit, int stage) const {
    const int k = (first + unit) * kDepth;
    arrive_and_expect(filled(stage), 2 * kXPartBytes + kWordBytes);
    copy_tile(at(stage), &maps.x, k, 0, filled(stage));
    copy_tile(at(stage) + kXPartBytes, &maps.x, k + 64, 0, filled(stage));
    copy_tile(at(stage) + kWordsAt, &maps.words, first_n / 8, k, filled(stage));
  }

  // The producer warpgroup. A thread has a pair of contracted elements and two groups of each stage: it copies their
  // scales and zeros to shared memory that only it reads.
  __device__ __forceinline__ void produce() const {
    const int thread = threadIdx.x - kConsumers, pair = thread / 2, group = thread % 2 * 2;
    const int row_groups = call.n / kGroup;
    const bool inside = first_n / kGroup + group < row_groups;
    int k = first * kDepth + 2 * pair;
    int64_t from = int64_t(k) * row_groups + first_n / kGroup + group;
    const auto copy_raw = [&](int slot) {
      const uint32_t to = shared_address(shared) + kRawAt + slot * kRawBytes + thread * 16;
      const bool there = inside && k < call.k;
      const int64_t own = there ? from : 0, next = there ? from + row_groups : 0;
      copy_word_async(to, call.scales + own, there ? 4 : 0);
      copy_word_async(to + 4, call.scales + next, there ? 4 : 0);
      copy_word_async(to + 8, call.zeros + own, there ? 4 : 0);
      copy_word_async(to + 12, call.zeros + next, there ? 4 : 0);
      k += kDepth;
      from += int64_t(kDepth) * row_groups;
    };
#pragma unroll
    for (int slot = 0; slot < kAhead; ++slot) {
      if (slot < count) copy_raw(slot);
      commit_copies();
    }
    if (thread == 0) {
      for (int unit = 0; unit < min(kStages, count); ++unit) copy(unit, unit);
    }
    __syncwarp();
    int stage = 0, slot = 0;
    uint32_t phase = 0;
    for (int unit = 0; unit < count; ++unit) {
      if (unit >= kStages) {
        wait_for_phase(emptied(stage), phase ^ 1);
        if (thread == 0) copy(unit, stage);
        __syncwarp();
      }
      wait_for_copies<kAhead - 1>();
      const uint4 raw = *reinterpret_cast<const uint4*>(shared + kRawAt + slot * kRawBytes + thread * 16);
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        const auto number = [i](uint32_t two) { return half_bits_to_float(i ? two >> 16 : two); };
        const float scale[2] = {number(raw.x), number(raw.y)}, zero[2] = {number(raw.z), number(raw.w)};
        char* to = shared + stage * kStageBytes + kFactorsAt + (group + i) * kFactorBytes + pair * 16;
        *reinterpret_cast<PairFactors*>(to) = PairFactors::of(scale, zero);
      }
      __syncwarp();
      if (thread % 32 == 0) arrive(filled(stage));
      if (unit + kAhead < count) copy_raw(slot);
      commit_copies();
      if (++stage == kStages) stage = 0, phase ^= 1;
      if (++slot == kAhead) slot = 0;
    }
  }
};

// A consumer thread. Of a warp's group of 64 columns, lane group g has the word of columns 8g to 8g + 7. Warpgroup
// `half` multiplies its codes 2 half + i and 4 + 2 half + i: rows g and g + 8 of the left operand of product i.
template <int Rows>
struct RowsConsumer {
  using L = RowsWarpgroups<Rows>;
  static constexpr int kTiles = L::kTiles, kSteps = L::kDepth / 16, kBuffers = 4;

  // The operands of a step of 16 contracted elements: lane t has those at 2t, 2t + 1, 2t + 8 and 2t + 9.
  struct Step {
    uint32_t words[4];
    PairFactors factors[2];
  };

  const L& block;
  const int group, half, g, t;
  float sums[2][kTiles][4] = {};

  __device__ __forceinline__ explicit RowsConsumer(const L& b)
      : block(b),
        group(threadIdx.x / 32 % 4),
        half(threadIdx.x / 128),
        g(threadIdx.x % 32 / 4),
        t(threadIdx.x % 4) {}

  __device__ __forceinline__ void load(Step& to, const char* own, int step) const {
    const int piece = group * 2 + g / 4;  // 16 bytes, with the swizzle of TMA
    const char* words = own + L::kWordsAt + 2 * t * 128 + step * 2048 + g % 4 * 4;
    const char* even = words + (piece ^ 2 * t) * 16;
    const char* odd = words + 128 + (piece ^ (2 * t + 1)) * 16;
    to.words[0] = *reinterpret_cast<const uint32_t*>(even), to.words[1] = *reinterpret_cast<const uint32_t*>(odd);
    to.words[2] = *reinterpret_cast<const uint32_t*>(even + 1024);
    to.words[3] = *reinterpret_cast<const uint32_t*>(odd + 1024);
    const PairFactors* factors =
        reinterpret_cast<const PairFactors*>(own + L::kFactorsAt + group * L::kFactorBytes) + step * 8 + t;
    to.factors[0] = factors[0], to.factors[1] = factors[4];
  }

  __device__ __forceinline__ void decode(uint32_t (&weights)[2][4], const Step& from) const {
    const uint32_t low = half ? 0x0501 : 0x0400, high = low + 0x0202;  // selectors: byte `half` of both words
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const uint32_t a = __byte_perm(from.words[2 * i], from.words[2 * i + 1], low);
      const uint32_t b = __byte_perm(from.words[2 * i], from.words[2 * i + 1], high);
      weights[0][2 * i] = from.factors[i].weights(codes_on_128<0>(a));
      weights[0][2 * i + 1] = from.factors[i].weights(codes_on_128<0>(b));
      weights[1][2 * i] = from.factors[i].weights(codes_on_128<1>(a));
      weights[1][2 * i + 1] = from.factors[i].weights(codes_on_128<1>(b));
    }
  }

  // Keeps the compiler from moving the decoding between products, which would then wait for each other.
  static __device__ __forceinline__ void keep(uint32_t (&weights)[2][4]) {
#pragma unroll
    for (int i = 0; i < 8; ++i) asm volatile("" : "+r"(weights[i / 4][i % 4])::"memory");
  }

  // WGMMA's descriptor of x: address, strides between 16-byte pieces and between eight rows, swizzle.
  static __device__ __forceinline__ uint64_t right(uint32_t x, int step) {
    const uint32_t address = x + step / 4 * L::kXPartBytes + step % 4 * 32;
    return (address & 0x3FFFF) / 16 | 1 << 16 | uint64_t(1024 >> 4) << 32 | uint64_t(1) << 62;
  }

  __device__ __forceinline__ void run() {
    int stage = 0;
    uint32_t phase = 0;
    uint32_t weights[kBuffers][2][4];
    Step steps[2];
    for (int unit = 0; unit < block.count; ++unit) {
      wait_for_phase(block.filled(stage), phase);
      const char* own = block.shared + stage * L::kStageBytes;
      const uint32_t x = block.at(stage);
      load(steps[0], own, 0);
#pragma unroll
      for (int step = 0; step < kSteps; ++step) {
        if (step + 1 < kSteps) load(steps[(step + 1) % 2], own, step + 1);
        // Wait for the products that read the weight registers which are overwritten next.
        wait_for_products<kBuffers - 1>();
        decode(weights[step % kBuffers], steps[step % 2]);
        keep(weights[step % kBuffers]);
        fence_products();
#pragma unroll
        for (int i = 0; i < 2; ++i) {
          WarpgroupProduct<kTiles>::multiply(sums[i], weights[step % kBuffers][i], right(x, step), 1);
        }
        commit_products();
      }
      // No product is in flight at the end of an iteration: otherwise ptxas would wait after every product.
      wait_for_products<0>(sums[0]);
      wait_for_products<0>(sums[1]);
      __syncwarp();
      if (threadIdx.x % 32 == 0) arrive(block.emptied(stage));
      if (++stage == L::kStages) stage = 0, phase ^= 1;
    }
  }

  // Adds up the sums of all blocks of the cluster; each block computes its share of the outputs. The order of the pairs
  // of each eight columns alternates every two rows, so that stores of a half warp are in different banks.
  __device__ __forceinline__ void epilogue() {
    synchronise_first<L::kConsumers>();
    float* const partial = reinterpret_cast<float*>(block.shared);
#pragma unroll
    for (int tile = 0; tile < kTiles; ++tile) {
#pragma unroll
      for (int c = 0; c < 4; ++c) {
        const int row = tile * 8 + 2 * t + c % 2, pair = (c / 2 * 2 + half) ^ t;
        float* to = partial + row * L::kTile + group * kGroup + 8 * g;
        reinterpret_cast<float2*>(to)[pair] = {sums[0][tile][c], sums[1][tile][c]};
      }
    }
    synchronise_stores_of_cluster();
    constexpr int kBatch = Rows < 32 ? 1 : Rows / 16, kEights = L::kTile / 8;
    for (int i = threadIdx.x + block.part * L::kConsumers; i < block.call.m * kEights;
         i += kBatch * L::kConsumers * block.call.splits) {
      add_up<kBatch>(partial, i);
    }
    synchronise_cluster();  // other blocks may still be reading this block's sums
  }

  // Eight columns of up to `Batch` rows, whose loads do not depend on each other.
  template <int Batch>
  __device__ __forceinline__ void add_up(float* partial, int begin) const {
    const auto cluster = cooperative_groups::this_cluster();
    const RowsCall& call = block.call;
    constexpr int kEights = L::kTile / 8;
    const int step = L::kConsumers * call.splits, column = begin % kEights * 8;
    const int swap = threadIdx.x / 4 % 2 * 4;  // half of the lanes start with the upper four, in other banks
    float4 sum[Batch][2] = {};
    for (int other = 0; other < call.splits; ++other) {
      const float* from = cluster.map_shared_rank(partial, other) + column;
#pragma unroll
      for (int i = 0; i < Batch; ++i) {
        const int m = (begin + i * step) / kEights;
        if (m >= call.m) continue;
#pragma unroll
        for (int j = 0; j < 2; ++j) {
          const float4 more = *reinterpret_cast<const float4*>(from + m * L::kTile + (j * 4 ^ swap));
          sum[i][j].x += more.x, sum[i][j].y += more.y, sum[i][j].z += more.z, sum[i][j].w += more.w;
        }
      }
    }
    if (block.first_n + column >= call.n) return;
#pragma unroll
    for (int i = 0; i < Batch; ++i) {
      const int m = (begin + i * step) / kEights;
      if (m >= call.m) continue;
      uint32_t pairs[4];
#pragma unroll
      for (int j = 0; j < 2; ++j) {
        const uint32_t first = Half<__nv_bfloat16>::pack(sum[i][j].x, sum[i][j].y);
        const uint32_t second = Half<__nv_bfloat16>::pack(sum[i][j].z, sum[i][j].w);
        pairs[2 * j] = m & 2 ? second : first, pairs[2 * j + 1] = m & 2 ? first : second;
      }
      const bool upper_first = (swap != 0) != ((m & 4) != 0);
      *reinterpret_cast<uint4*>(call.output + int64_t(m) * call.n + block.first_n + column) =
          upper_first ? uint4{pairs[2], pairs[3], pairs[0], pairs[1]} : uint4{pairs[0], pairs[1], pairs[2], pairs[3]};
    }
  }
};

template <typename L>
__global__ void __launch_bounds__(L::kThreads, 1)
    rows_warpgroups_kernel(const RowsCall call, const __grid_constant__ RowsMaps maps) {
#if __CUDA_ARCH__ == 900
  extern __shared__ __align__(1024) char shared[];
  const L block(call, maps, shared);
  block.start_barriers();
  wait_for_previous_launch();
  if (threadIdx.x >= L::kConsumers) {
    block.produce();
    start_next_launch();
    synchronise_stores_of_cluster();
    synchronise_cluster();
  } else {
    RowsConsumer<L::kRows> consumer(block);
    consumer.run();
    start_next_launch();
    consumer.epilogue();
  }
#endif
}

}  // namespace ejkernel::quantized_matmul
