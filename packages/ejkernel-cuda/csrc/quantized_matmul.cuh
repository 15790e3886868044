// Few rows times a quantised matrix (ejkernel.families.quantized_matmul): out[m, n] = sum_k x[m, k] w[k, n].
//
// The 8 warps of a block have WarpsN tiles of columns side by side, and 8 / WarpsN shares of each stage's k. The
// blocks of a tile share k, too (split-K).
//
//   global memory: words, x, scales, zeros --cp.async, a ring of stages--> shared memory
//   shared memory -> registers: decode, scale -> MMA -> sums
//   partial sums of the warps and of the blocks of a cluster: shared memory -> output
//
// Weights are operand A of m16n8k16, so that an MMA has 16 columns of the matrix and 8 rows of x. Which codes are the
// rows of a tile and in which order k is contracted is free, so codes become operands where they are:
//
//   rows of words are k (RowsFirst)         8 codes of a word are 8 columns; the words of two k make a pair of A
//   rows of words are columns (Transposed)  8 codes of a word are 8 k; x is read in the order of the codes
//
// Sums run in a fixed order: two runs give the same bits.
#pragma once

#include <type_traits>

#include <cooperative_groups.h>

#include "quantized_codes.cuh"
#include "tensor_core.cuh"

namespace ejkernel {

constexpr int kThreads = 256;
constexpr int kWarps = kThreads / 32;
constexpr int kMostBlocks = 8;  // of a cluster
constexpr int kStepK = 16;      // of an MMA

template <typename T>
struct QuantizedCall {
  const T* x;
  const uint32_t* words;
  const void* scales;
  const void* zeros;
  T* output;     // [m, n]
  float* parts;  // [splits, m, n], where no cluster adds them up
  Scale scale;
  int m, k, n;
  int row_words, row_groups, log_group;
  int splits, stages;
  bool cluster;
};

// Waits until all but the newest `pending` groups of this thread's copies have arrived; instructions want a constant.
__device__ __forceinline__ void wait_for_all_but(int pending) {
  switch (pending) {
    case 0: return wait_for_copies<0>();
    case 1: return wait_for_copies<1>();
    case 2: return wait_for_copies<2>();
    case 3: return wait_for_copies<3>();
    default: return wait_for_copies<4>();
  }
}

// A block's place: its tile of columns and its share of the stages.
template <typename L>
struct Place {
  int warp_n, warp_k, lane, first_n, first_stage, count;

  template <typename T>
  __device__ __forceinline__ explicit Place(const QuantizedCall<T>& call) {
    const int warp = threadIdx.x / 32, part = blockIdx.x % call.splits;
    warp_n = warp % L::kWarpsN;
    warp_k = warp / L::kWarpsN;
    lane = threadIdx.x % 32;
    first_n = blockIdx.x / call.splits * L::kTile;
    const int stages = (call.k + L::kDepth - 1) / L::kDepth;
    first_stage = int64_t(stages) * part / call.splits;
    count = int64_t(stages) * (part + 1) / call.splits - first_stage;
  }
};

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

  // Starts the copies of the next stage. Words past the ends are left out: they meet factors that are 0, or are of
  // columns that are not stored. So are rows of x past the last.
  __device__ __forceinline__ void copy(char* stage) {
    const uint32_t to = shared_address(stage);
    const uint32_t* from = words;
    const int limit = inside ? call.k - k - int(threadIdx.x / kPieces) : 0;
#pragma unroll
    for (int r = 0; r < kDepth; r += kPassRows) {
      if (r < limit) copy_async(to + words_to + place_of(r) * kStripRow, from, 16);
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

// Rows of words are columns. A warp has 32 of them, and 64 bytes of each in a stage.
template <Code C, int Tiles, int WarpsN, typename T>
struct Transposed {
  static constexpr int kWarpsN = WarpsN, kWarpsK = kWarps / WarpsN, kRows = 8 * Tiles;
  static constexpr int kWords = Decoder<C>::kWords;
  static constexpr bool kPaired = C == Code::kAffine4 && kHasPairs<T>;
  static constexpr int kChunks = 4 / kWords;            // of 8 codes, in the 16 bytes of a thread
  static constexpr int kCodes = kChunks * 8;            // of a thread; groups have as many or more
  static constexpr int kWarpDepth = 4 * kCodes;
  static constexpr int kTile = 32 * kWarpsN, kDepth = kWarpDepth * kWarpsK;
  static constexpr int kRowBytes = 2 * kWarpDepth + 64;  // of x: two rows of it lie in different banks
  static constexpr int kRowsAt = kTile * kWarpsK * 64, kScalesAt = kRowsAt + kWarpsK * kRows * kRowBytes;
  using Sums = float[2][Tiles][4];

  // Bytes of scales that are copied of a row.
  static __host__ __device__ int scale_row(int log_group, int log_bytes) {
    const int bytes = (kDepth >> log_group) << log_bytes;
    return bytes > 4 ? bytes : 4;
  }
  static __host__ __device__ int stage_bytes(int log_group, int log_bytes) {
    return kScalesAt + 2 * kTile * scale_row(log_group, log_bytes);
  }
  static __host__ __device__ int extra_bytes(int) { return 0; }

  const QuantizedCall<T>& call;
  const Place<Transposed>& at;
  const float* table;
  // What this thread copies next.
  int k, own_k;  // of the first code of the stage that is copied next, and of the one that is multiplied next
  const uint32_t* words;
  const T* x;
  uint32_t words_to, x_to;
  int row_bytes, scale_bytes, scale_word, scale_from, scale_step;

  // Pieces of 16 bytes in a row of a stage, rows that a pass of the block copies; and those of x.
  static constexpr int kPieces = 4 * kWarpsK, kPassRows = kThreads / kPieces;
  static constexpr int kXPieces = kDepth / 8, kXPassRows = kThreads / kXPieces;

  __device__ __forceinline__ Transposed(const QuantizedCall<T>& c, const Place<Transposed>& p, char*, const float* t)
      : call(c), at(p), table(t) {
    k = own_k = at.first_stage * kDepth;
    const int piece = threadIdx.x % kPieces, row = threadIdx.x / kPieces;
    words = call.words + int64_t(at.first_n + row) * call.row_words + k / 8 * kWords + piece * 4;
    words_to = (piece / 4 * kTile + row) * 64 + piece % 4 * 16;
    const int x_row = threadIdx.x / kXPieces, chunk = threadIdx.x % kXPieces, warp = chunk * 8 / kWarpDepth;
    x = call.x + int64_t(x_row) * call.k + k + chunk * 8;
    // Chunk j of thread t is the (4j + t)-th, so that the reads of four threads are one piece of 64 bytes.
    const int place = chunk % kChunks * 4 + chunk % (4 * kChunks) / kChunks;
    x_to = kRowsAt + (warp * kRows + x_row) * kRowBytes + place * 16;
    const int log_bytes = log_scale_bytes(call.scale);
    row_bytes = call.row_groups << log_bytes;
    scale_bytes = scale_row(call.log_group, log_bytes);
    scale_word = threadIdx.x % (scale_bytes / 4);
    scale_from = threadIdx.x / (scale_bytes / 4);
    scale_step = kThreads / (scale_bytes / 4);
  }

  // Starts the copies of the next stage. Words past the ends are left out: they meet factors that are 0, or are of
  // columns that are not stored. So are rows of x past the last.
  __device__ __forceinline__ void copy(char* stage) {
    const uint32_t to = shared_address(stage);
    const uint32_t* from = words;
    const bool inside = k / 8 * kWords + int(threadIdx.x % kPieces) * 4 < call.row_words;
    const int limit = inside ? call.n - at.first_n - int(threadIdx.x / kPieces) : 0;
#pragma unroll
    for (int r = 0; r < kTile; r += kPassRows) {
      if (r < limit) copy_async(to + words_to + r * 64, from, 16);
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
    copy_scales(to + kScalesAt);
    words += kDepth / 8 * kWords;
    x += kDepth;
    k += kDepth;
  }

  // The byte of a row of scales where those of a stage begin, a multiple of 4.
  __device__ __forceinline__ int scale_byte(int first_k) const {
    return ((first_k >> call.log_group) << log_scale_bytes(call.scale)) & ~3;
  }

  __device__ __forceinline__ void copy_scales(uint32_t to) const {
    const int byte = scale_byte(k) + scale_word * 4, limit = byte < row_bytes ? call.n - at.first_n : 0;
    for (int r = scale_from; r < kTile; r += scale_step) {
      // Past the ends scales are 0.
      const bool there = r < limit;
      const int64_t from = there ? int64_t(at.first_n + r) * row_bytes + byte : 0;
      const uint32_t place = to + r * scale_bytes + scale_word * 4;
      copy_word_async(place, static_cast<const char*>(call.scales) + from, there ? 4 : 0);
      if constexpr (kIsAffine<C>) {
        const char* zeros = static_cast<const char*>(call.zeros);
        copy_word_async(place + kTile * scale_bytes, zeros + from, there ? 4 : 0);
      }
    }
  }

  // Where weights come in pairs, they are codes i and i + 4: so are x of a chunk, which the thread that copied it turns.
  template <int>
  __device__ __forceinline__ void prepare(char* stage) const {
    if constexpr (!kPaired) return;
#pragma unroll
    for (int r = 0; r < kRows; r += kXPassRows) {
      if (r + int(threadIdx.x / kXPieces) >= min(call.m, kRows)) continue;
      uint4* const chunk = reinterpret_cast<uint4*>(stage + x_to + r * kRowBytes);
      const uint4 x = *chunk;
      *chunk = {__byte_perm(x.x, x.z, 0x5410), __byte_perm(x.x, x.z, 0x7632), __byte_perm(x.y, x.w, 0x5410),
                __byte_perm(x.y, x.w, 0x7632)};
    }
  }

  template <int Parity>
  __device__ __forceinline__ void multiply(Sums& sums, const char* stage) {
    const int g = at.lane / 4, t = at.lane % 4;
    const char* own = stage + ((at.warp_k * kTile + at.warp_n * 32 + g) * 64 + t * 16);
    const char* rows = stage + kRowsAt + (at.warp_k * kRows + g) * kRowBytes + t * 16;
    const int first = own_k + at.warp_k * kWarpDepth + t * kCodes;
    const char* scales = stage + kScalesAt + (at.warp_n * 32 + g) * scale_bytes +
                         ((first >> call.log_group) << log_scale_bytes(call.scale)) - scale_byte(own_k);
    own_k += kDepth;
    uint4 pieces[4];
    std::conditional_t<kPaired, uint4, float2> factors[4];
#pragma unroll
    for (int r = 0; r < 4; ++r) {
      pieces[r] = *reinterpret_cast<const uint4*>(own + r * 8 * 64);
      const char* scale = scales + r * 8 * scale_bytes;
      const StoredScale stored = read_scale<C>(call.scale, scale, scale + kTile * scale_bytes);
      if constexpr (kPaired) {
        const PairFactors one = pair_factors(stored);
        factors[r] = pack_factors(one, one);
      } else {
        factors[r] = scale_factors<C>(call.scale, stored);
      }
    }
#pragma unroll
    for (int j = 0; j < kChunks; ++j) {
      // Pairs of weights of a chunk: the first and the last two make an MMA each.
      uint32_t weights[4][4];
#pragma unroll
      for (int r = 0; r < 4; ++r) {
        const uint32_t packed[4] = {pieces[r].x, pieces[r].y, pieces[r].z, pieces[r].w};
        if constexpr (kPaired) {
          decode_pairs(weights[r], packed[j], factors[r]);
        } else {
          float w[8];
          Decoder<C>::decode(w, packed + j * kWords, factors[r], table);
#pragma unroll
          for (int i = 0; i < 4; ++i) weights[r][i] = Half<T>::pack(w[2 * i], w[2 * i + 1]);
        }
      }
#pragma unroll
      for (int m = 0; m < Tiles; ++m) {
        const uint4 b = *reinterpret_cast<const uint4*>(rows + m * 8 * kRowBytes + j * 64);
#pragma unroll
        for (int i = 0; i < 2; ++i) {
          const uint32_t *upper = weights[2 * i], *lower = weights[2 * i + 1];
          Half<T>::multiply(sums[i][m], {upper[0], lower[0], upper[1], lower[1]}, b.x, b.y);
          Half<T>::multiply(sums[i][m], {upper[2], lower[2], upper[3], lower[3]}, b.z, b.w);
        }
      }
    }
  }

  __device__ __forceinline__ void store_sums(const Sums& sums, float* partial, int width) const {
    const int n = at.warp_n * 32 + at.lane / 4, m = at.lane % 4 * 2;
#pragma unroll
    for (int i = 0; i < 2; ++i) {
#pragma unroll
      for (int j = 0; j < Tiles; ++j) {
#pragma unroll
        for (int r = 0; r < 4; ++r) {
          partial[(j * 8 + m + r % 2) * width + n + i * 16 + r / 2 * 8] = sums[i][j][r];
        }
      }
    }
  }
};

// Shared memory of a block: the ring, which the partial sums take over at the end, and what the layout adds.
template <typename L>
__host__ __device__ int ring_bytes(int stages, int log_group, int log_bytes) {
  const int ring = L::stage_bytes(log_group, log_bytes) * stages, partial = L::kWarpsK * L::kRows * (L::kTile + 4) * 4;
  return ring > partial ? ring : partial;
}

__device__ __forceinline__ float4 plus(float4 a, float4 b) { return {a.x + b.x, a.y + b.y, a.z + b.z, a.w + b.w}; }

// The sum of four columns' partial sums at an address of this block's shared memory, over the blocks of a cluster.
__device__ __forceinline__ float4 sum_over_cluster(float4 sum, const float* partial, int blocks) {
#if __CUDA_ARCH__ >= 900
  float4 parts[kMostBlocks];
  // All reads are on their way before the first sum: those of another block's memory take long.
#pragma unroll
  for (int i = 0; i < kMostBlocks; ++i) {
    const int block = min(i, blocks - 1);
    parts[i] = *reinterpret_cast<const float4*>(
        cooperative_groups::this_cluster().map_shared_rank(const_cast<float*>(partial), block));
  }
#pragma unroll
  for (int i = 0; i < kMostBlocks; ++i) {
    if (i < blocks) sum = plus(sum, parts[i]);
  }
#endif
  return sum;
}

// Adds up the partial sums of warps, and of a cluster's blocks, each of which makes its share of the outputs.
template <typename L, typename T>
__device__ __forceinline__ void combine(const QuantizedCall<T>& call, const Place<L>& at, const float* partial) {
  constexpr int kWidth = L::kTile + 4, kQuads = L::kTile / 4;
  const int part = blockIdx.x % call.splits;
  const int first = call.cluster ? part * kThreads : 0, step = call.cluster ? call.splits * kThreads : kThreads;
  for (int i = first + threadIdx.x; i < call.m * kQuads; i += step) {
    const int m = i / kQuads, column = i % kQuads * 4, n = at.first_n + column;
    if (n >= call.n) continue;
    float4 sum = {0, 0, 0, 0};
    for (int warp = 0; warp < L::kWarpsK; ++warp) {
      const float* from = partial + (warp * L::kRows + m) * kWidth + column;
      sum = call.cluster ? sum_over_cluster(sum, from, call.splits)
                         : plus(sum, *reinterpret_cast<const float4*>(from));
    }
    const int64_t to = int64_t(m) * call.n + n;
    if (call.splits > 1 && !call.cluster) {
      *reinterpret_cast<float4*>(call.parts + int64_t(part) * call.m * call.n + to) = sum;
    } else {
      const uint2 rounded = {Half<T>::pack(sum.x, sum.y), Half<T>::pack(sum.z, sum.w)};
      *reinterpret_cast<uint2*>(call.output + to) = rounded;
    }
  }
}

// L: RowsFirst or Transposed. The `splits` blocks of a tile of columns are neighbours, and a cluster on request.
template <typename L, typename T>
__global__ void __launch_bounds__(kThreads, L::kRows <= 32 ? 2 : 1) quantized_kernel(const QuantizedCall<T> call) {
  extern __shared__ __align__(16) char shared[];
  __shared__ float table[16];
  const Place<L> at(call);
  const int log_bytes = log_scale_bytes(call.scale), ahead = call.stages - 1;
  const int bytes = L::stage_bytes(call.log_group, log_bytes);
  L layout(call, at, shared + ring_bytes<L>(call.stages, call.log_group, log_bytes), table);
  for (int stage = 0; stage < ahead; ++stage) {
    // A group of copies for every stage, be it empty, so that the number of pending groups says what has arrived.
    if (stage < at.count) layout.copy(shared + stage * bytes);
    commit_copies();
  }
  if (threadIdx.x < 16) {
    table[threadIdx.x] = call.scale == Scale::kFloat32 ? kNormalFloat[threadIdx.x] : kE2m1[threadIdx.x];
  }
  wait_for_all_but(ahead - 1);
  __syncthreads();
  layout.template prepare<0>(shared);
  typename L::Sums sums = {};
  char *slot = shared, *free_slot = shared + ahead * bytes;
  char* const last_slot = free_slot;
  const auto step = [&](auto parity, int stage) {
    constexpr int kParity = decltype(parity)::value;
    char* const next_slot = slot == last_slot ? shared : slot + bytes;
    wait_for_all_but(ahead - 2);
    // Every thread's copies of the stage and of the next one have arrived; no warp reads the last one's slot any more.
    __syncthreads();
    if (stage + ahead < at.count) layout.copy(free_slot);
    commit_copies();
    layout.template prepare<1 - kParity>(next_slot);
    layout.template multiply<kParity>(sums, slot);
    free_slot = slot;
    slot = next_slot;
  };
  for (int stage = 0; stage < at.count; stage += 2) {
    step(std::integral_constant<int, 0>(), stage);
    if (stage + 1 < at.count) step(std::integral_constant<int, 1>(), stage + 1);
  }
  // The partial sums take the place of the ring, which all warps have left.
  wait_for_copies<0>();
  __syncthreads();
  float* partial = reinterpret_cast<float*>(shared);
  layout.store_sums(sums, partial + at.warp_k * L::kRows * (L::kTile + 4), L::kTile + 4);
  if (!call.cluster) {
    __syncthreads();
    return combine(call, at, partial);
  }
  synchronise_stores_of_cluster();
  combine(call, at, partial);
  // No block ends while others read its shared memory.
  synchronise_cluster();
}

}  // namespace ejkernel
