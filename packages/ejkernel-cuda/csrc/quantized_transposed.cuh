// The quantised matmul's layout of `transpose=True`.
#pragma once

#include <type_traits>

#include "quantized_call.cuh"

namespace ejkernel {

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

  // Starts the copies of the next stage. Words past the ends meet factors that are 0, or are of columns that
  // are not stored. Rows of x past the last are left out.
  __device__ __forceinline__ void copy(char* stage) {
    const uint32_t to = shared_address(stage);
    const uint32_t* from = words;
    const bool inside = k / 8 * kWords + int(threadIdx.x % kPieces) * 4 < call.row_words;
    const int limit = inside ? call.n - at.first_n - int(threadIdx.x / kPieces) : 0;
#pragma unroll
    for (int r = 0; r < kTile; r += kPassRows) {
      copy_words<C>(to + words_to + r * 64, from, call.words, r < limit);
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

}  // namespace ejkernel
