// The quantised matmul's layout of `transpose=False`.
#pragma once

#include "quantized_call.cuh"

namespace ejkernel {

// Rows of words are k. A warp has 64 columns, and 64 k of a stage.
//
// The words of 64 columns are a strip by themselves, whose rows are in the order 0 2 4 6 1 3 5 7: at a time four
// threads read words of rows 2t, and the eight threads of each of them the words of a row, from different banks.
template <Code C, int Tiles, int WarpsN, typename T>
struct RowsFirst {
  static constexpr int kWarpsN = WarpsN, kWarpsK = kWarps / WarpsN, kRows = 8 * Tiles;
  static constexpr int kTile = 64 * kWarpsN, kDepth = 64 * kWarpsK;
  static constexpr int kWords = Decoder<C>::kWords;
  static constexpr int kStripRow = 32 * kWords;      // bytes
  static constexpr int kStrip = kDepth * kStripRow;  // bytes
  static constexpr int kRowBytes = 2 * kDepth + 16;  // of x, with 16 bytes that spread rows over the banks
  static constexpr int kRowsAt = kWarpsN * kStrip, kScalesAt = kRowsAt + kRows * kRowBytes;
  static constexpr int kGroupStride = kDepth + 4;    // factors of a group; two groups lie in different banks
  static constexpr int kScales = 4;                  // of a thread and stage: groups have 32 columns or more
  // Weights come in pairs of rows, whose factors take 16 bytes (`decode_pairs`).
  static constexpr bool kPaired = C == Code::kAffine4 && kHasPairs<T>;
  using Sums = float[4][Tiles][4];

  static __host__ __device__ int groups(int log_group) { return ((kTile - 1) >> log_group) + 2; }
  // Bytes of scales that are copied of a row. The first and the last 4 of them may be of other groups, too.
  static __host__ __device__ int scale_row(int log_group, int log_bytes) {
    return (((kTile >> log_group) << log_bytes) + 3) / 4 * 4 + 8;
  }
  static __host__ __device__ int stage_bytes(int log_group, int log_bytes) {
    return (kScalesAt + 2 * kDepth * scale_row(log_group, log_bytes) + 15) / 16 * 16;
  }
  // Factors of two stages.
  static __host__ __device__ int extra_bytes(int log_group) { return 2 * kGroupStride * groups(log_group) * 8; }
  // Where a row of a strip lies. A permutation of bits: the place of a sum of disjoint bits is the sum of places.
  static __host__ __device__ constexpr int place_of(int row) {
    return (row & ~7) | (row & 1) << 2 | (row >> 1 & 3);
  }
  // What a place moves the 16-byte pieces of rows of 64 bytes by, so that four rows lie in different banks.
  static __device__ __forceinline__ int swizzle(int place) { return kWords == 2 ? (place >> 1 & 1) * 32 : 0; }

  const QuantizedCall<T>& call;
  const Place<RowsFirst>& at;
  const float* table;
  float2* factors;
  int buffer, warp_group;  // factors of a stage; the group of a thread's columns
  // What this thread copies next.
  int k;  // of the first row of the stage
  const uint32_t* words;
  const T* x;
  uint32_t words_to, x_to;
  bool inside;
  int row_bytes, scale_bytes, scale_step, scale_from, scale_to;
  int64_t scale_byte;
  // The scales of a stage that this thread turns into factors, and where they go.
  int items, raw[kScales], factor_to[kScales];

  // Pieces of 16 bytes in a row of a tile, rows that a pass of the block copies; and those of x.
  static constexpr int kPieces = 2 * kWords * kWarpsN, kPassRows = kThreads / kPieces;
  static constexpr int kXPieces = kDepth / 8, kXPassRows = kThreads / kXPieces;

  __device__ __forceinline__ RowsFirst(const QuantizedCall<T>& c, const Place<RowsFirst>& p, char* extra, const float* t)
      : call(c), at(p), table(t), factors(reinterpret_cast<float2*>(extra)) {
    const int piece = threadIdx.x % kPieces, row = threadIdx.x / kPieces, place = place_of(row);
    const int word = at.first_n / 8 * kWords + piece * 4;
    k = at.first_stage * kDepth;
    inside = word < call.row_words;
    words = call.words + int64_t(k + row) * call.row_words + word;
    words_to = piece / (2 * kWords) * kStrip + place * kStripRow + (piece % (2 * kWords) * 16 ^ swizzle(place));
    const int x_row = threadIdx.x / kXPieces, x_piece = threadIdx.x % kXPieces;
    x = call.x + int64_t(x_row) * call.k + k + x_piece * 8;
    x_to = kRowsAt + x_row * kRowBytes + x_piece * 16;
    place_scales();
  }

  __device__ __forceinline__ void place_scales() {
    const int log_bytes = log_scale_bytes(call.scale), first_group = at.first_n >> call.log_group;
    const int count = ((at.first_n + kTile - 1) >> call.log_group) - first_group + 1;
    warp_group = ((at.first_n + at.warp_n * 64 + at.lane / 4 * 8) >> call.log_group) - first_group;
    buffer = groups(call.log_group) * kGroupStride;
    row_bytes = call.row_groups << log_bytes;
    scale_bytes = scale_row(call.log_group, log_bytes);
    // The row's bytes from the last multiple of 4, by as many threads as the next power of two has words.
    const int first_byte = (first_group << log_bytes) & ~3, shift = (first_group << log_bytes) & 3;
    const int needed = ((count << log_bytes) + shift + 3) / 4, log_threads = 32 - __clz(needed - 1);
    const int word = threadIdx.x & ((1 << log_threads) - 1);
    scale_step = kThreads >> log_threads;
    scale_from = threadIdx.x >> log_threads;
    scale_byte = int64_t(k + scale_from) * row_bytes + first_byte + word * 4;
    scale_to = kScalesAt + scale_from * scale_bytes + word * 4;
    if (word >= needed || first_byte + word * 4 >= row_bytes) scale_from = kDepth;
    constexpr int kItemRows = kPaired ? 2 : 1, kItems = kDepth / kItemRows;
    items = (kItems * count + kThreads - 1) / kThreads;
#pragma unroll
    for (int i = 0; i < kScales / kItemRows; ++i) {
      const int item = threadIdx.x + i * kThreads, r = item / count, group = item - r * count;
      raw[i] = kScalesAt + min(r, kItems - 1) * kItemRows * scale_bytes + shift + (group << log_bytes);
      // What is left over goes to the entries between two groups.
      const int place = kPaired ? 2 * r : place_of(r);
      factor_to[i] = r < kItems ? group * kGroupStride + place : kDepth + threadIdx.x % 2 * 2;
    }
  }

  // Starts the copies of the next stage. Words past the ends meet factors that are 0, or are of columns that
  // are not stored. Rows of x past the last are left out.
  __device__ __forceinline__ void copy(char* stage) {
    const uint32_t to = shared_address(stage);
    const uint32_t* from = words;
    const int limit = inside ? call.k - k - int(threadIdx.x / kPieces) : 0;
#pragma unroll
    for (int r = 0; r < kDepth; r += kPassRows) {
      copy_words<C>(to + words_to + place_of(r) * kStripRow, from, call.words, r < limit);
      from += int64_t(kPassRows) * call.row_words;
    }
    const int bytes = k + int(threadIdx.x % kXPieces) * 8 < call.k ? 16 : 0;
    const T* x_from = bytes ? x : call.x;
    const int64_t x_step = bytes ? int64_t(kXPassRows) * call.k : 0;
#pragma unroll
    for (int r = 0; r < kRows; r += kXPassRows) {
      if (r + int(threadIdx.x / kXPieces) < min(call.m, kRows)) copy_async(to + x_to + r * kRowBytes, x_from, bytes);
      x_from += x_step;
    }
    copy_scales(to + scale_to);
    k += kDepth;
    words += int64_t(kDepth) * call.row_words;
    x += kDepth;
  }

  __device__ __forceinline__ void copy_scales(uint32_t to) {
    const char* from = static_cast<const char*>(call.scales) + scale_byte;
    const char* zero_from = static_cast<const char*>(call.zeros) + scale_byte;
    for (int r = scale_from; r < kDepth; r += scale_step) {
      // Past the end of k scales are 0.
      const bool there = r < call.k - k;
      copy_word_async(to, there ? from : call.scales, there ? 4 : 0);
      if constexpr (kIsAffine<C>) {
        copy_word_async(to + kDepth * scale_bytes, there ? zero_from : call.zeros, there ? 4 : 0);
      }
      from += int64_t(scale_step) * row_bytes;
      zero_from += int64_t(scale_step) * row_bytes;
      to += scale_step * scale_bytes;
    }
    scale_byte += int64_t(kDepth) * row_bytes;
  }

  // Turns the scales of a stage that has arrived into factors, where no warp reads since the last stage ended.
  template <int Buffer>
  __device__ __forceinline__ void prepare(const char* stage) {
#pragma unroll
    for (int i = 0; i < (kPaired ? kScales / 2 : kScales); ++i) {
      if (i >= items) break;
      const char *scale = stage + raw[i], *zero = scale + kDepth * scale_bytes;
      float2* to = factors + Buffer * buffer + factor_to[i];
      const StoredScale stored = read_scale<C>(call.scale, scale, zero);
      if constexpr (kPaired) {
        const StoredScale next = read_scale<C>(call.scale, scale + scale_bytes, zero + scale_bytes);
        *reinterpret_cast<uint4*>(to) = pack_factors(pair_factors(stored), pair_factors(next));
      } else {
        *to = scale_factors<C>(call.scale, stored);
      }
    }
  }

  template <int Parity>
  __device__ __forceinline__ void multiply(Sums& sums, const char* stage) {
    const int g = at.lane / 4, t = at.lane % 4, first = at.warp_k * 64;
    const char* words = stage + at.warp_n * kStrip + (first + t) * kStripRow + (g * kWords * 4 ^ swizzle(t));
    const float2* scales = factors + Parity * buffer + warp_group * kGroupStride + first + (kPaired ? 2 : 1) * t;
    // The row of x whose address this thread gives.
    const int row = Tiles == 1 ? at.lane % 8 : at.lane / 16 * 8 + at.lane % 8;
    const uint32_t rows = shared_address(stage) + kRowsAt + first * 2 + row * kRowBytes + at.lane / 8 % 2 * 16;
#pragma unroll
    for (int step = 0; step < 4; ++step) {
      // The k of a thread in operand A are two pairs: 2t, 2t + 1 and 2t + 8, 2t + 9, at the places t + 4r. The weights
      // of eight columns.
      uint32_t weights[2][8];
#pragma unroll
      for (int pair = 0; pair < 2; ++pair) {
        const int place = step * kStepK + 8 * pair;
        decode_rows(weights[pair], words + place * kStripRow, scales + place);
      }
      uint32_t b[Tiles][2];
      load_rows(b, rows + step * kStepK * 2);
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        // Columns 8g + 2i are the upper rows of the tile, 8g + 2i + 1 the lower ones.
        const uint32_t a[4] = {weights[0][2 * i], weights[0][2 * i + 1], weights[1][2 * i], weights[1][2 * i + 1]};
#pragma unroll
        for (int j = 0; j < Tiles; ++j) Half<T>::multiply(sums[i][j], a, b[j][0], b[j][1]);
      }
    }
  }

  // The weights of eight columns in two rows of k, whose words are four places apart.
  __device__ __forceinline__ void decode_rows(uint32_t (&weights)[8], const char* words, const float2* scales) const {
    uint32_t packed[2][kWords];
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      if constexpr (kWords == 1) {
        packed[r][0] = *reinterpret_cast<const uint32_t*>(words + 4 * r * kStripRow);
      } else {
        const uint2 two = *reinterpret_cast<const uint2*>(words + 4 * r * kStripRow);
        packed[r][0] = two.x, packed[r][1] = two.y;
      }
    }
    if constexpr (kPaired) {
      const uint4 pair = *reinterpret_cast<const uint4*>(scales);
      uint32_t lower[4], upper[4];
      decode_pairs(lower, __byte_perm(packed[0][0], packed[1][0], 0x5410), pair);
      decode_pairs(upper, __byte_perm(packed[0][0], packed[1][0], 0x7632), pair);
#pragma unroll
      for (int i = 0; i < 4; ++i) weights[i] = lower[i], weights[4 + i] = upper[i];
    } else {
      float w[2][8];
#pragma unroll
      for (int r = 0; r < 2; ++r) Decoder<C>::decode(w[r], packed[r], scales[4 * r], table);
#pragma unroll
      for (int i = 0; i < 8; ++i) weights[i] = Half<T>::pack(w[0][i], w[1][i]);
    }
  }

  // Operand B of 16 k: x [rows, k], whose rows are columns of B.
  static __device__ __forceinline__ void load_rows(uint32_t (&b)[Tiles][2], uint32_t rows) {
    if constexpr (Tiles == 1) {
      load_two_matrices(b[0], rows);
    } else {
#pragma unroll
      for (int j = 0; j < Tiles; j += 2) {
        uint32_t four[4];
        load_matrices(four, rows + j * 8 * kRowBytes);
        b[j][0] = four[0], b[j][1] = four[1], b[j + 1][0] = four[2], b[j + 1][1] = four[3];
      }
    }
  }

  // Partial sums [rows, tile] of a warp to shared memory.
  __device__ __forceinline__ void store_sums(const Sums& sums, float* partial, int width) const {
    const int n = at.warp_n * 64 + at.lane / 4 * 8, m = at.lane % 4 * 2;
#pragma unroll
    for (int j = 0; j < Tiles; ++j) {
#pragma unroll
      for (int r = 0; r < 2; ++r) {
        float4* to = reinterpret_cast<float4*>(partial + (j * 8 + m + r) * width + n);
        to[0] = {sums[0][j][r], sums[0][j][r + 2], sums[1][j][r], sums[1][j][r + 2]};
        to[1] = {sums[2][j][r], sums[2][j][r + 2], sums[3][j][r], sums[3][j][r + 2]};
      }
    }
  }
};

}  // namespace ejkernel
