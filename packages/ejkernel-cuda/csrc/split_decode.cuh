// Decoding over a dense cache with split-KV: one query token a batch row attends to a range of the row's keys.
//
//   keys of a row   |------- split 0 -------|------- split 1 -------| ...      one block a split, KV head and 16 heads
//   tiles of 16     w0 w1 w2 w3 w0 w1 w2 w3 ..                                 interleaved over the block's warps
//
//   warp: cp.async -> ring of stages in shared memory -> MMA q K^T -> online softmax -> MMA p V -> acc in registers
//   block: warps merged in shared memory -> partial output, row maximum, denominator -> combine kernel over splits
//
// A block has one KV head of one row, up to 16 of its query heads (the rows of an MMA tile), and one split of the keys.
// Warps share nothing in the main loop: each has its stages and its softmax, so no barrier stops the block.
//
// Sources: Milakov & Gimelshein 2018 (online softmax); Dao et al. 2023, "Flash-Decoding" (splitting the keys).
#pragma once

#include <cmath>
#include <cstddef>

#include "tensor_core.cuh"

namespace ejkernel {

constexpr int kHeads = 16;  // query heads a block
constexpr int kKeys = 16;   // keys a tile
constexpr int kMostSplits = 64;
constexpr int kMergeThreads = 128;
constexpr float kLog2e = 1.4426950408889634f;
constexpr float kLn2 = 0.6931471805599453f;

template <typename T>
struct Decode {
  const T* query;       // [rows, heads, size]
  const T* keys;        // [rows, capacity, kv_heads, size]
  const T* values;      // [rows, capacity, kv_heads, value_size]
  const int* starts;    // [rows]
  const int* ends;      // [rows]
  const float* sinks;   // [sink_rows, heads] or null
  T* output;            // [rows, heads, value_size]
  float* lse;           // [rows, heads]
  float* partial;       // [splits, rows, heads, value_size], numerators relative to the split's own maximum
  float* statistics;    // [splits, rows, heads, 2], that maximum as a power of two, and the denominator
  int rows, capacity, heads, kv_heads, size, value_size, splits, rows_a_sink;
  int left, right;      // window around the last key
  float scale, cap;     // cap is 0 for none
};

// Warps, stages and shared memory of a padded head dimension: at most 96 KiB, which every chip has.
template <int Size>
struct Shape {
  // Two warps at 256 columns, where a warp's stages take 48 KiB. Warps of a block do not wait for each other, so three
  // stages of a warp are all that hides the latency of its copies.
  static constexpr int kWarps = Size == 256 ? 2 : 4;
  static constexpr int kStages = 3;
  static constexpr int kChunks = Size / 8;  // 16-byte pieces of a row
  static constexpr int kTileBytes = kKeys * Size * 2;
  static constexpr int kWarpBytes = kStages * 2 * kTileBytes;
  static constexpr int kBytes = kWarps * kWarpBytes;
  static_assert(kBytes >= kWarps * kHeads * (Size + 2) * 4, "the merge fits into the buffers");
};

// Swizzle: byte offset of a 16-byte piece in a tile. Pieces are permuted in a row so that eight rows touch all banks.
template <int Size>
__device__ __forceinline__ uint32_t piece(int row, int chunk) {
  // ldmatrix reads one piece of eight rows at a time. Rows are multiples of 128 bytes apart, so without the XOR all
  // eight would lie in the same four banks.
  return (row * Shape<Size>::kChunks + (chunk ^ (row & 7))) * 16;
}

// Starts copying keys `first` to `first + 15` of one head; those from `end` on, and sizes past `size`, become zeros.
template <int Size, typename T>
__device__ __forceinline__ void copy_tile(uint32_t to, const T* head, int first, int end, size_t stride, int size) {
  constexpr int kChunks = Shape<Size>::kChunks, kRows = 32 / kChunks;
  const int lane = threadIdx.x % 32, row = lane / kChunks, chunk = lane % kChunks;
  const bool inside = chunk * 8 < size;
  const T* from = head + chunk * 8;
#pragma unroll
  for (int pass = 0; pass < kKeys / kRows; ++pass) {
    const int key = first + row + pass * kRows;
    const bool there = inside && key < end;
    // Neighbouring lanes copy neighbouring pieces of a row. A copy of 0 bytes reads nothing; its address is a valid one
    // all the same. Zeros, since a slot past the end may hold NaN, and a weight of 0 times NaN would be NaN.
    copy_async(to + piece<Size>(row + pass * kRows, chunk), there ? from + key * stride : head, there ? 16 : 0);
  }
}

// The block's query heads as the left operand of a product, fragment by fragment.
template <int Size, typename T>
__device__ __forceinline__ void load_query(uint32_t (&query)[Size / 16][4], const T* heads, int count, int size) {
  const int lane = threadIdx.x % 32;
#pragma unroll
  for (int step = 0; step < Size / 16; ++step) {
#pragma unroll
    for (int part = 0; part < 4; ++part) {
      // The fragment of operand A of m16n8k16: two rows eight apart, two pairs of columns eight apart. Straight from
      // HBM: the block reads its queries once and keeps them in registers.
      const int head = lane / 4 + part % 2 * 8, column = step * 16 + lane % 4 * 2 + part / 2 * 8;
      const bool there = head < count && column < size;
      query[step][part] = there ? *reinterpret_cast<const uint32_t*>(heads + head * size + column) : 0;
    }
  }
}

// Scores of 16 heads and 16 keys, as powers of two; [half of the keys][(head, key), (head, key + 1), head + 8 twice].
template <int Size, typename T>
__device__ __forceinline__ void score_tile(
    float (&scores)[2][4], const uint32_t (&query)[Size / 16][4], uint32_t tile, float scale, float cap) {
  // Lanes 8 i to 8 i + 7 address matrix i: keys 0 to 7 in two pieces of 8 columns, then keys 8 to 15. A key is a column
  // of operand B, whose registers run along k, so no transposition.
  const int lane = threadIdx.x % 32, row = lane / 16 * 8 + lane % 8, chunk = lane / 8 % 2;
#pragma unroll
  for (int half = 0; half < 2; ++half) {
#pragma unroll
    for (int n = 0; n < 4; ++n) scores[half][n] = 0.f;
  }
#pragma unroll
  for (int step = 0; step < Size / 16; ++step) {
    uint32_t keys[4];
    load_matrices(keys, tile + piece<Size>(row, step * 2 + chunk));
    Half<T>::multiply(scores[0], query[step], keys[0], keys[1]);
    Half<T>::multiply(scores[1], query[step], keys[2], keys[3]);
  }
#pragma unroll
  for (int half = 0; half < 2; ++half) {
#pragma unroll
    for (int n = 0; n < 4; ++n) {
      // The same branch in all threads. Where exp 2x overflows to infinity, the quotient is 0 and tanh is 1.
      if (cap > 0.f) {  // tanh x = 1 - 2 / (exp 2x + 1)
        const float power = exp2_fast(2.f * kLog2e / cap * scale * scores[half][n]);
        scores[half][n] = kLog2e * cap * (1.f - __fdividef(2.f, power + 1.f));
      } else {
        scores[half][n] *= kLog2e * scale;
      }
    }
  }
}

// The online softmax of a warp's tiles so far, for heads lane / 4 and lane / 4 + 8.
template <int Size>
struct Softmax {
  float row_max[2] = {-INFINITY, -INFINITY};
  float row_sum[2] = {0.f, 0.f};  // of this lane's keys alone
  float acc[Size / 8][4] = {};
};

// One step of the online softmax: turns scores into weights, and rescales the accumulators where a row maximum rose.
// With `Parts` of 1 the block has at most eight heads, and the weights of the others are zeros.
template <int Parts, int Size>
__device__ __forceinline__ void weigh_tile(Softmax<Size>& softmax, float (&scores)[2][4], int left) {
  const int lane = threadIdx.x % 32;
  float alpha[2] = {1.f, 1.f};
  bool rose = false;
#pragma unroll
  for (int part = 0; part < Parts; ++part) {
    float row_max = softmax.row_max[part];
#pragma unroll
    for (int n = 0; n < 4; ++n) {
      float& score = scores[n / 2][part * 2 + n % 2];
      // Keys past the split's end: copied as zeros, their scores are 0 and would count.
      if (n / 2 * 8 + lane % 4 * 2 + n % 2 >= left) score = -INFINITY;
      row_max = fmaxf(row_max, score);
    }
    // The 16 keys of a row lie in four neighbouring lanes.
    row_max = fmaxf(row_max, __shfl_xor_sync(~0u, row_max, 1));
    row_max = fmaxf(row_max, __shfl_xor_sync(~0u, row_max, 2));
    // -INFINITY - -INFINITY would be NaN.
    const float shift = row_max == -INFINITY ? 0.f : row_max;
    alpha[part] = exp2_fast(softmax.row_max[part] - shift);
    rose |= row_max > softmax.row_max[part];
    softmax.row_max[part] = row_max;
    softmax.row_sum[part] *= alpha[part];
#pragma unroll
    for (int n = 0; n < 4; ++n) {
      float& score = scores[n / 2][part * 2 + n % 2];
      score = exp2_fast(score - shift);
      // Of this lane's keys: lanes are added once, behind the loop. Not rounded, unlike the weights that the product
      // takes.
      softmax.row_sum[part] += score;
    }
  }
#pragma unroll
  for (int n = 0; Parts == 1 && n < 4; ++n) scores[n / 2][2 + n % 2] = 0.f;
  // Lazy rescaling: row maxima seldom rise after the first tiles. One branch for the warp, whose lanes have to be
  // together at the next MMA.
  if (__any_sync(~0u, rose)) {
#pragma unroll
    for (int column = 0; column < Size / 8; ++column) {
#pragma unroll
      for (int n = 0; n < Parts * 2; ++n) softmax.acc[column][n] *= alpha[n / 2];
    }
  }
}

// Adds the values of a tile, weighted.
template <int Size, typename T>
__device__ __forceinline__ void sum_tile(Softmax<Size>& softmax, const float (&weights)[2][4], uint32_t tile) {
  // Values are transposed on the way: a row in memory is a key, and the registers of operand B run along keys.
  const int lane = threadIdx.x % 32, row = lane % 16, chunk = lane / 16;
  // The accumulator of the scores has, lane by lane, the layout of operand A: weights stay in their registers.
  const uint32_t left[4] = {
      Half<T>::pack(weights[0][0], weights[0][1]), Half<T>::pack(weights[0][2], weights[0][3]),
      Half<T>::pack(weights[1][0], weights[1][1]), Half<T>::pack(weights[1][2], weights[1][3])};
#pragma unroll
  for (int step = 0; step < Size / 16; ++step) {
    uint32_t values[4];
    load_matrices_transposed(values, tile + piece<Size>(row, step * 2 + chunk));
    Half<T>::multiply(softmax.acc[step * 2], left, values[0], values[1]);
    Half<T>::multiply(softmax.acc[step * 2 + 1], left, values[2], values[3]);
  }
}

// Output and lse of one head from its numerators, maximum and denominator; the sink joins the denominator.
template <typename T>
struct Finish {
  float factor, lse;
  __device__ Finish(const Decode<T>& call, int row, int head, float row_max, float row_sum) {
    // The sink may exceed every score, so it joins the maximum too. `whole` is 0 for a row with neither key nor sink,
    // which gets output 0 and lse -INFINITY. exp2f, not exp2_fast: here it is called once a head.
    const float sink = call.sinks == nullptr
                           ? -INFINITY
                           : kLog2e * call.sinks[size_t(row / call.rows_a_sink) * call.heads + head];
    const float shift = fmaxf(row_max, sink);
    const float whole = shift == -INFINITY ? 0.f : row_sum * exp2f(row_max - shift) + exp2f(sink - shift);
    factor = whole > 0.f ? exp2f(row_max - shift) / whole : 0.f;
    lse = whole > 0.f ? kLn2 * (shift + log2f(whole)) : -INFINITY;
  }
};

// Merges the softmaxes of a block's warps through shared memory, and stores the block's result.
template <int Size, typename T>
__device__ __forceinline__ void merge_warps(
    const Decode<T>& call, Softmax<Size>& softmax, float* shared, int row, int split, int first_head, int count) {
  constexpr int kWarps = Shape<Size>::kWarps;
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  // Over the ring of stages: the caller has waited until no warp reads it and no copy is under way.
  float* accs = shared + warp * kHeads * Size;
  float* statistics = shared + kWarps * kHeads * Size;  // [heads][warps][2]
#pragma unroll
  for (int part = 0; part < 2; ++part) {
    const int head = lane / 4 + part * 8;
    softmax.row_sum[part] += __shfl_xor_sync(~0u, softmax.row_sum[part], 1);
    softmax.row_sum[part] += __shfl_xor_sync(~0u, softmax.row_sum[part], 2);
    if (lane % 4 == 0) {
      statistics[(head * kWarps + warp) * 2] = softmax.row_max[part];
      statistics[(head * kWarps + warp) * 2 + 1] = softmax.row_sum[part];
    }
#pragma unroll
    for (int column = 0; column < Size / 8; ++column) {
      accs[head * Size + column * 8 + lane % 4 * 2] = softmax.acc[column][part * 2];
      accs[head * Size + column * 8 + lane % 4 * 2 + 1] = softmax.acc[column][part * 2 + 1];
    }
  }
  __syncthreads();
  // Warps are added in their order: two runs give the same bits.
  for (int head = warp; head < count; head += kWarps) {
    float row_max = -INFINITY, row_sum = 0.f, alphas[kWarps];
#pragma unroll
    for (int w = 0; w < kWarps; ++w) row_max = fmaxf(row_max, statistics[(head * kWarps + w) * 2]);
#pragma unroll
    for (int w = 0; w < kWarps; ++w) {
      // A warp without tiles has the maximum -INFINITY, and so alpha 0.
      alphas[w] = row_max == -INFINITY ? 0.f : exp2f(statistics[(head * kWarps + w) * 2] - row_max);
      row_sum += alphas[w] * statistics[(head * kWarps + w) * 2 + 1];
    }
    const size_t place = size_t(row) * call.heads + first_head + head;
    const size_t split_place = size_t(split) * call.rows * call.heads + place;
    const Finish<T> finish(call, row, first_head + head, row_max, row_sum);
    for (int column = lane; column < call.value_size; column += 32) {
      float sum = 0.f;
#pragma unroll
      for (int w = 0; w < kWarps; ++w) sum += alphas[w] * shared[(w * kHeads + head) * Size + column];
      if (call.splits == 1) {
        call.output[place * call.value_size + column] = Half<T>::round(sum * finish.factor);
      } else {
        // Not normalised: the combine kernel divides by the denominator of all splits, which the sink joins once.
        call.partial[split_place * call.value_size + column] = sum;
      }
    }
    if (lane == 0 && call.splits == 1) call.lse[place] = finish.lse;
    if (lane == 0 && call.splits > 1) {
      call.statistics[split_place * 2] = row_max;
      call.statistics[split_place * 2 + 1] = row_sum;
    }
  }
}

template <int Size, typename T>
__global__ void __launch_bounds__(Shape<Size>::kWarps * 32) decode_kernel(const Decode<T> call) {
  using S = Shape<Size>;
  extern __shared__ __align__(128) unsigned char shared[];
  const int group = call.heads / call.kv_heads, parts = (group + kHeads - 1) / kHeads;
  // Blocks that read the same keys for other query heads are neighbours: the second finds them in L2.
  const int part = blockIdx.x % parts, kv_head = blockIdx.x / parts % call.kv_heads;
  const int split = blockIdx.x / (parts * call.kv_heads) % call.splits;
  const int row = blockIdx.x / (parts * call.kv_heads * call.splits);
  const int first_head = kv_head * group + part * kHeads, count = min(kHeads, group - part * kHeads);

  const int last = call.ends[row] - 1;
  const int start = max(max(call.starts[row], 0), call.left < 0 ? 0 : last - call.left);
  const int end = min(min(last, last + call.right) + 1, call.capacity);
  // Splits are parts of the row's own range, so rows of any length keep all their blocks busy. Rounded up to whole
  // rounds of the block's warps: in all splits but the last ones, warps have equally many tiles.
  const int share = (max(end - start, 0) + call.splits - 1) / call.splits;
  const int length = (share + S::kWarps * kKeys - 1) / (S::kWarps * kKeys) * (S::kWarps * kKeys);
  const int warp = threadIdx.x / 32;
  const int first = start + split * length + warp * kKeys, limit = min(start + (split + 1) * length, end);
  const int tiles = max(limit - first + S::kWarps * kKeys - 1, 0) / (S::kWarps * kKeys);

  const size_t cache = size_t(row) * call.capacity * call.kv_heads + kv_head;
  const T* keys = call.keys + cache * call.size;
  const T* values = call.values + cache * call.value_size;
  const size_t key_stride = size_t(call.kv_heads) * call.size, value_stride = size_t(call.kv_heads) * call.value_size;
  const uint32_t ring = shared_address(shared) + warp * S::kWarpBytes;
  // A group is committed even where nothing is copied: the wait counts groups, one a tile.
  auto fetch = [&](int tile) {
    if (tile < tiles) {
      const uint32_t to = ring + tile % S::kStages * 2 * S::kTileBytes;
      const int key = first + tile * S::kWarps * kKeys;
      copy_tile<Size>(to, keys, key, limit, key_stride, call.size);
      copy_tile<Size>(to + S::kTileBytes, values, key, limit, value_stride, call.value_size);
    }
    commit_copies();
  };

#pragma unroll
  for (int tile = 0; tile < S::kStages - 1; ++tile) fetch(tile);
  // Behind the first copies: both latencies pass together.
  uint32_t query[Size / 16][4];
  load_query<Size>(query, call.query + (size_t(row) * call.heads + first_head) * call.size, count, call.size);
  Softmax<Size> softmax;
  for (int tile = 0; tile < tiles; ++tile) {
    wait_for_copies<S::kStages - 2>();
    __syncwarp();  // hazard: all copies must have arrived, and all lanes have read the stage that is refilled next
    fetch(tile + S::kStages - 1);
    const uint32_t at = ring + tile % S::kStages * 2 * S::kTileBytes;
    float scores[2][4];
    score_tile<Size, T>(scores, query, at, call.scale, call.cap);
    const int left = limit - first - tile * S::kWarps * kKeys;
    // The same branch in the whole block. With eight heads at most, the other eight rows need no exponentials.
    if (count <= 8) {
      weigh_tile<1>(softmax, scores, left);
    } else {
      weigh_tile<2>(softmax, scores, left);
    }
    sum_tile<Size, T>(softmax, scores, at + S::kTileBytes);
  }
  // Barrier: the merge overwrites the stages, which other warps still read.
  wait_for_copies<0>();
  __syncthreads();
  merge_warps<Size>(call, softmax, reinterpret_cast<float*>(shared), row, split, first_head, count);
}

// The combine of split-KV: merges the splits, one block for each head of a row.
template <typename T>
__global__ void __launch_bounds__(kMergeThreads) merge_kernel(const Decode<T> call) {
  // The launch before on the same stream has written all of it.
  __shared__ float row_maxima[kMostSplits], row_sums[kMostSplits];
  const size_t heads = size_t(call.rows) * call.heads, place = blockIdx.x;
  for (int split = threadIdx.x; split < call.splits; split += kMergeThreads) {
    row_maxima[split] = call.statistics[(split * heads + place) * 2];
    row_sums[split] = call.statistics[(split * heads + place) * 2 + 1];
  }
  __syncthreads();
  // Each thread goes through all splits by itself: at most 64, and no second barrier. A split without keys has the
  // maximum -INFINITY, weight 0 and a partial sum of zeros.
  float row_max = -INFINITY, row_sum = 0.f;
  for (int split = 0; split < call.splits; ++split) row_max = fmaxf(row_max, row_maxima[split]);
  const float shift = row_max == -INFINITY ? 0.f : row_max;
  for (int split = 0; split < call.splits; ++split) row_sum += exp2f(row_maxima[split] - shift) * row_sums[split];
  const Finish<T> finish(call, place / call.heads, place % call.heads, row_max, row_sum);
  for (int column = threadIdx.x; column < call.value_size; column += kMergeThreads) {
    // In the order of splits, so two runs give the same bits. Unrolled, so that several loads are under way.
    const float* partial = call.partial + place * call.value_size + column;
    float sum = 0.f;
#pragma unroll 8
    for (int split = 0; split < call.splits; ++split) {
      sum += exp2f(row_maxima[split] - shift) * partial[split * heads * call.value_size];
    }
    call.output[place * call.value_size + column] = Half<T>::round(sum * finish.factor);
  }
  if (threadIdx.x == 0) call.lse[place] = finish.lse;
}

}  // namespace ejkernel
