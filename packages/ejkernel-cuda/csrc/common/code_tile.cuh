// TurboQuant's codes as a cache format of paged decode attention: keys and values of 1 to 4 bits per coordinate.
//
//   bytes of codes -> tile in shared memory -> 8 bits (two codes) -> look-up: a pair of bfloat16 -> MMA
//   norms                                                         -> factors of scores and of weights
//
// A key is |x| codebook[code], and then, for products with the query's other columns, |r| times signs. The query is
// rotated before the call and the output after it. Norms are factors of a key's score, and of a value's weight, so that
// operands of products are entries of the codebooks alone.
//
// Look-ups: a table has a pair of entries for each pair of codes, and each lane has a table of its own in its own bank,
// so that look-ups never conflict. One byte permute makes the address: the pair of codes is its second byte, the lane
// its first.
//
// Fragments: scores are K Q^T, whose columns are up to eight query heads, and the output is V^T P^T: keys, and columns of
// values, are the rows of operand A, which are loaded without ldmatrix, since any lane may have any columns. Lanes take
// columns that are neighbours in memory.
//
// Source: Zandieh et al. 2025, arXiv:2504.19874 (TurboQuant).
#pragma once

#include "common/decode_tile.cuh"

namespace ejkernel {

// A cache of codes, with `Signs` signs per key.
template <int KeyBits, int ValueBits, int Signs>
struct Codes {};

constexpr int max_of(int a, int b) { return a > b ? a : b; }

template <int HeadDim, int KeyBits, int ValueBits, int Signs>
struct TileShape<HeadDim, Codes<KeyBits, ValueBits, Signs>> {
  static constexpr int kWarps = 12;
  static constexpr int kHeads = 8;  // columns of an MMA tile
  static constexpr int kStages = 2;
  static constexpr int kTileKeys = 32;
  static constexpr int kKeyBytes = HeadDim * KeyBits / 8, kValueBytes = HeadDim * ValueBits / 8;
  static constexpr int kSignBytes = Signs / 8;
  // Offsets within a stage of keys, which also has the norms of values: a word for both.
  static constexpr int kSigns = kTileKeys * kKeyBytes;
  static constexpr int kNorms = kSigns + kTileKeys * kSignBytes;
  static constexpr int kResidualNorms = kNorms + kTileKeys * 4;
  static constexpr int kEnd = kResidualNorms + (Signs > 0 ? kTileKeys * 4 : 0);
  // A warp has two stages of keys, then two of values, where its accumulators are stored for the merge.
  static constexpr int kTileBytes = max_of(kEnd, kHeads * HeadDim * 2), kValueTileBytes = kTileKeys * kValueBytes;
  static constexpr int kWarpSmemBytes = 2 * (kTileBytes + max_of(kValueTileBytes, kHeads * HeadDim * 2));
  // 256 bytes for each pair of codes: 32 lanes' entries for keys, then for values.
  static constexpr int kTable = kWarps * kWarpSmemBytes, kTableRow = 256;
  // The rotated queries of so many segments.
  static constexpr int kQuerySlots = Signs > 0 ? 8 : 16;
  static constexpr int kQueries = kTable + (kTableRow << 2 * max_of(KeyBits, ValueBits));
  static constexpr int kQueryBytes = (HeadDim + Signs) * kHeads * 2;
  static constexpr int kSmemBytes = kQueries + kQuerySlots * kQueryBytes;
  static constexpr int kKeysPerRound = kWarps * kTileKeys;
  static constexpr int kBlocksPerSm = 1;
  static constexpr bool kPrefetchesNextSegment = true;
  static_assert(kKeyBytes % 16 == 0 && kValueBytes % 16 == 0 && kSignBytes % 16 == 0, "rows are copied in 16 bytes");
};

// The row of a tile that has a key: neighbouring pairs of keys are exchanged in turn, so that the lanes that read the
// same chunk of keys 0, 2, 4 and 6 find them in different banks.
__device__ __forceinline__ int code_row(int key) { return key ^ (key >> 1 & 1); }

// The offset of a byte in a tile of rows. Rows of 64 bytes are swizzled.
template <int RowBytes>
__device__ __forceinline__ uint32_t code_offset(int row, int byte) {
  return row * RowBytes + (RowBytes == 64 ? byte ^ (row >> 2 & 1) << 5 : byte);
}

template <int Words>
__device__ __forceinline__ void load_words(uint32_t (&words)[Words], uint32_t from) {
  if constexpr (Words == 4) {
    asm volatile("ld.shared.v4.b32 {%0, %1, %2, %3}, [%4];"
                 : "=r"(words[0]), "=r"(words[1]), "=r"(words[2]), "=r"(words[3]) : "r"(from) : "memory");
  } else if constexpr (Words == 2) {
    asm volatile("ld.shared.v2.b32 {%0, %1}, [%2];" : "=r"(words[0]), "=r"(words[1]) : "r"(from) : "memory");
  } else {
#pragma unroll
    for (int n = 0; n < Words; ++n) {
      asm volatile("ld.shared.b32 %0, [%1];" : "=r"(words[n]) : "r"(from + n * 4) : "memory");
    }
  }
}

__device__ __forceinline__ void load_pair(float (&pair)[2], uint32_t from) {
  asm volatile("ld.shared.v2.f32 {%0, %1}, [%2];" : "=f"(pair[0]), "=f"(pair[1]) : "r"(from) : "memory");
}

__device__ __forceinline__ void store_word(uint32_t to, uint32_t word) {
  asm volatile("st.shared.b32 [%0], %1;" ::"r"(to), "r"(word) : "memory");
}

// Loads the `Bits` bits number `part` of a row, as words: 16, 48 or a multiple of 32.
template <int RowBytes, int Bits>
__device__ __forceinline__ void load_codes(uint32_t (&words)[(Bits + 31) / 32], uint32_t tile, int row, int part) {
  if constexpr (Bits % 32 == 0) {
    load_words(words, tile + code_offset<RowBytes>(row, part * (Bits / 8)));
  } else if constexpr (Bits == 16) {
    asm volatile("{\n.reg .b16 half;\nld.shared.b16 half, [%1];\ncvt.u32.u16 %0, half;\n}"
                 : "=r"(words[0]) : "r"(tile + code_offset<RowBytes>(row, part * 2)) : "memory");
  } else {
    static_assert(Bits == 48, "16, 48 or whole words");
    uint32_t both[2];
#pragma unroll
    for (int n = 0; n < 2; ++n) {
      asm volatile("ld.shared.b32 %0, [%1];"
                   : "=r"(both[n]) : "r"(tile + row * RowBytes + (part * 6 & ~3) + n * 4) : "memory");
    }
    words[0] = __funnelshift_r(both[0], both[1], part % 2 * 16);
    words[1] = both[1] >> part % 2 * 16;
  }
}

// Entries of the codebook for pair `pair` of codes. `table` has the address of the lane's column in its first byte, and
// zeros; the table itself is at shared address `base`.
template <int Bits, int Words>
__device__ __forceinline__ uint32_t look_up(const uint32_t (&words)[Words], int pair, uint32_t lane, uint32_t base) {
  const int bit = pair * 2 * Bits, word = bit / 32, shift = bit % 32;
  uint32_t offset;
  if constexpr (Bits == 4) {
    offset = __byte_perm(words[word], lane, 0x5504 | shift / 8 << 4);
  } else {
    constexpr uint32_t kMask = ((1u << 2 * Bits) - 1) << 8;
    const uint32_t next = word + 1 < Words ? words[word + 1 < Words ? word + 1 : 0] : 0;
    const uint32_t shifted = shift < 8             ? words[word] << (8 - shift)
                             : shift + 2 * Bits > 32 ? __funnelshift_r(words[word], next, shift - 8)
                                                     : words[word] >> (shift - 8);
    offset = (shifted & kMask) | lane;
  }
  uint32_t entries;
  asm("ld.shared.b32 %0, [%1];" : "=r"(entries) : "r"(base + offset));
  return entries;
}

// The sum over a warp's tiles, [columns, heads] in accumulators, and the softmax of head lane / 4.
template <int HeadDim>
struct CodeSoftmax {
  float row_max[2] = {-INFINITY, -INFINITY};
  float row_sum[2] = {0.f, 0.f};
  float acc[HeadDim / 16][4] = {};
};

// The query's columns as halves of operand A whose other rows are zero.
template <int HeadDim, int Signs>
struct CodeQuery {
  uint32_t columns[HeadDim / 16][2];
  uint32_t projections[Signs / 16 + 1][2];  // the products with the residuals' projection
  int segment = 0;                          // segments of the share before the next one
};

// Where columns `column` and the next one of a head's query lie in a slot: lane (g, t) has, of head g, columns
// t HeadDim / 4 + 4 step + (0, 1, 2, 3).
template <int HeadDim>
__device__ __forceinline__ uint32_t query_offset(int head, int column) {
  constexpr int kPart = HeadDim / 4;
  return column % kPart / 4 * 256 + (head * 4 + column / kPart) * 8 + column % 4 * 2;
}

// Where a projection lies in a slot. Lanes have those 16 apart, which share a word of signs, as pairs.
template <int HeadDim, int Signs>
__device__ __forceinline__ uint32_t projection_offset(int head, int projection) {
  const int part = projection / (Signs / 4), within = projection % (Signs / 4), pair = within / 32 * 16 + within % 16;
  return (HeadDim / 16 + pair / 2) * 256 + (head * 4 + part) * 8 + pair % 2 * 4 + within / 16 % 2 * 2;
}

// Multiplies a tile's keys with the queries, without norms; `signs` gets the products with signs. A lane's scores are of
// keys g and g + 8 of each 16, and heads 2 t and 2 t + 1.
template <int HeadDim, int KeyBits, int ValueBits, int Signs, typename Loader>
__device__ __forceinline__ void multiply_key_codes(
    float (&scores)[2][4], float (&signs)[2][4], const CodeQuery<HeadDim, Signs>& query, const Loader& loader,
    uint32_t stage) {
  using S = TileShape<HeadDim, Codes<KeyBits, ValueBits, Signs>>;
  constexpr int kBits = HeadDim / 4 * KeyBits;
  const int lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
#pragma unroll
  for (int tile = 0; tile < 2; ++tile) {
#pragma unroll
    for (int n = 0; n < 4; ++n) scores[tile][n] = signs[tile][n] = 0.f;
    uint32_t words[2][kBits / 32];
#pragma unroll
    for (int n = 0; n < 2; ++n) {
      load_codes<S::kKeyBytes, kBits>(words[n], stage, tile * 16 + n * 8 + code_row(g), t);
    }
#pragma unroll
    for (int step = 0; step < HeadDim / 16; ++step) {
      uint32_t a[4];
#pragma unroll
      for (int n = 0; n < 4; ++n) {
        a[n] = look_up<KeyBits>(words[n % 2], step * 2 + n / 2, lane * 4, loader.table);
      }
      Half<__nv_bfloat16>::multiply(scores[tile], a, query.columns[step][0], query.columns[step][1]);
    }
    if constexpr (Signs > 0) {
      uint32_t bits[2][Signs / 128];
#pragma unroll
      for (int n = 0; n < 2; ++n) {
        load_codes<S::kSignBytes, Signs / 4>(bits[n], stage + S::kSigns, tile * 16 + n * 8 + code_row(g), t);
      }
#pragma unroll
      for (int step = 0; step < Signs / 16; ++step) {
        uint32_t a[4];
#pragma unroll
        for (int n = 0; n < 4; ++n) {
          const int pair = step * 2 + n / 2;
          a[n] = (bits[n % 2][pair / 16] << (15 - pair % 16) & 0x80008000) ^ 0xbf80bf80;
        }
        Half<__nv_bfloat16>::multiply(signs[tile], a, query.projections[step][0], query.projections[step][1]);
      }
    }
  }
}

template <int HeadDim>
__device__ __forceinline__ void weigh_codes(
    CodeSoftmax<HeadDim>& softmax, float (&scores)[2][4], uint32_t valid_keys) {
  const int g = threadIdx.x % 32 / 4;
  if (valid_keys != ~0u) {
    const uint32_t lane_keys = valid_keys >> g;
#pragma unroll
    for (int n = 0; n < 8; ++n) {
      if (!(lane_keys >> (n / 2 * 8) & 1)) scores[n / 4][n % 4] = -INFINITY;
    }
  }
  // The maximum follows the scores only if one exceeds it by more than kMaxLead in base 2: weights then stay below
  // 2^kMaxLead, and most tiles need no exchange between lanes.
  float lane_max[2];
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    lane_max[i] = fmaxf(fmaxf(scores[0][i], scores[0][2 + i]), fmaxf(scores[1][i], scores[1][2 + i]));
  }
  constexpr float kMaxLead = 8.f;
  // -INFINITY is exceeded by any score.
  if (__any_sync(~0u, lane_max[0] > softmax.row_max[0] + kMaxLead || lane_max[1] > softmax.row_max[1] + kMaxLead)) {
    float alpha[2];
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      float row_max = fmaxf(softmax.row_max[i], lane_max[i]);
#pragma unroll
      for (int step = 4; step < 32; step *= 2) row_max = fmaxf(row_max, __shfl_xor_sync(~0u, row_max, step));
      alpha[i] = row_max == -INFINITY ? 1.f : exp2_fast(softmax.row_max[i] - row_max);
      softmax.row_max[i] = row_max;
      softmax.row_sum[i] *= alpha[i];
    }
#pragma unroll
    for (int m = 0; m < HeadDim / 16; ++m) {
#pragma unroll
      for (int n = 0; n < 4; ++n) softmax.acc[m][n] *= alpha[n % 2];
    }
  }
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    const float shift = softmax.row_max[i] == -INFINITY ? 0.f : softmax.row_max[i];
#pragma unroll
    for (int n = 0; n < 4; ++n) {
      float& score = scores[n / 2][n % 2 * 2 + i];
      score = exp2_fast(score - shift);
      softmax.row_sum[i] += score;
    }
  }
}

__device__ __forceinline__ uint32_t transpose_matrix(uint32_t rows) {
  uint32_t columns;
  asm volatile("movmatrix.sync.aligned.m8n8.trans.b16 %0, %1;" : "=r"(columns) : "r"(rows));
  return columns;
}

__device__ __forceinline__ float load_float(uint32_t from) {
  float x;
  asm volatile("ld.shared.f32 %0, [%1];" : "=f"(x) : "r"(from) : "memory");
  return x;
}

// Adds the weighted values of a tile to the accumulators; weights have the values' norms.
template <int HeadDim, int KeyBits, int ValueBits, int Signs, typename Loader>
__device__ __forceinline__ void multiply_value_codes(
    CodeSoftmax<HeadDim>& softmax, const uint32_t (&weights)[2][2], const Loader& loader, uint32_t stage) {
  using S = TileShape<HeadDim, Codes<KeyBits, ValueBits, Signs>>;
  constexpr int kBits = HeadDim / 8 * ValueBits;
  const int lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    uint32_t words[4][(kBits + 31) / 32];
#pragma unroll
    for (int key = 0; key < 4; ++key) {
      load_codes<S::kValueBytes, kBits>(
          words[key], stage, half * 16 + key / 2 * 8 + code_row(t * 2 + key % 2), g);
    }
    constexpr int kWords = (kBits + 31) / 32;
    constexpr bool kInterleaves = ValueBits % 2 == 0;
    // Codes of two keys next to each other, of even and of odd columns: a look-up is then an operand.
    uint32_t even[2][kWords], odd[2][kWords];
    if constexpr (kInterleaves) {
      constexpr uint32_t kLow = ValueBits == 4 ? 0x0f0f0f0f : 0x33333333;
#pragma unroll
      for (int n = 0; n < 2; ++n) {
#pragma unroll
        for (int word = 0; word < kWords; ++word) {
          const uint32_t first = words[n * 2][word], second = words[n * 2 + 1][word];
          even[n][word] = (first & kLow) | (second << ValueBits & ~kLow);
          odd[n][word] = (first >> ValueBits & kLow) | (second & ~kLow);
        }
      }
    }
#pragma unroll
    for (int m = 0; m < HeadDim / 16; ++m) {
      uint32_t a[4], pairs[4];
#pragma unroll
      for (int n = 0; n < 4; ++n) {
        const uint32_t(&codes)[kWords] = !kInterleaves ? words[n] : n % 2 == 1 ? odd[n / 2] : even[n / 2];
        pairs[n] = look_up<ValueBits>(codes, m, lane * 4 + 128, loader.table);
      }
#pragma unroll
      for (int n = 0; n < 4; ++n) {
        // Codes of 3 bits are looked up as two columns of a key, and become two keys of a column.
        a[n] = kInterleaves ? pairs[n] : __byte_perm(pairs[n / 2 * 2], pairs[n / 2 * 2 + 1], n % 2 ? 0x7632 : 0x5410);
      }
      Half<__nv_bfloat16>::multiply(softmax.acc[m], a, weights[half][0], weights[half][1]);
    }
  }
}

}  // namespace ejkernel
