// TurboQuant's codes as a cache format of paged decode attention: keys and values of 1 to 4 bits per coordinate.
//
//   bytes of codes -> tile in shared memory -> a byte (two codes of 4 bits) -> look-up: a pair of bfloat16 -> MMA
//   norms                                                         -> factors of scores and of weights
//
// A key is |x| codebook[code], and then, for products with the query's other columns, |r| times signs. The query is
// rotated before the call and the output after it. Norms are factors of a key's score, and of a value's weight, so that
// operands of products are entries of the codebooks alone.
//
// Look-ups: a table has the entries of all codes of a byte, one pair for 4 bits, two for 2 and four for 1, and the lanes
// whose loads happen together have tables of their own in their own banks, so that look-ups never conflict. One byte
// permute makes the address: the codes are its second byte, the lane its first. With 3 bits a byte has two codes and two
// bits that the table ignores: words are shifted so that pairs of codes begin with a byte.
//
// Signs: one bit of a word becomes the last bits of a number, without a shift and without a table: see `sign_operand`.
//
// Fragments: scores are K Q^T, whose columns are up to eight query heads, and the output is V^T P^T: keys, and columns of
// values, are the rows of operand A, which are loaded without ldmatrix, since any lane may have any columns. Lanes take
// columns that are neighbours in memory.
//
// Source: Zandieh et al. 2025, arXiv:2504.19874 (TurboQuant).
#pragma once

#include "common/code_ptx.cuh"
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
  // 256 bytes for each byte of codes: the lanes' entries for keys, then for values.
  static constexpr int kTable = kWarps * kWarpSmemBytes, kTableRow = 256;
  // The rotated queries of so many segments.
  static constexpr int kQuerySlots = Signs > 0 ? 8 : 16;
  static constexpr int kQueries = kTable + (kTableRow << 8);
  static constexpr int kQueryBytes = (HeadDim + Signs) * kHeads * 2;
  static constexpr int kSmemBytes = kQueries + kQuerySlots * kQueryBytes;
  static constexpr int kKeysPerRound = kWarps * kTileKeys;
  static constexpr int kBlocksPerSm = 1;
  static constexpr bool kPrefetchesNextSegment = true;
  static_assert(kKeyBytes % 16 == 0 && kValueBytes % 16 == 0 && kSignBytes % 16 == 0, "rows are copied in 16 bytes");
};

// The row of a tile that has a key: some pairs of keys are exchanged, so that the lanes that read the same chunk of keys
// 0, 2, 4 and 6 find them in different banks.
template <int RowBytes>
__device__ __forceinline__ int code_row(int key) {
  return key ^ (RowBytes == 32 ? key >> 2 : key >> 1) & 1;
}

// The offset of a byte in a tile of rows. Rows of 64 bytes are swizzled.
template <int RowBytes>
__device__ __forceinline__ uint32_t code_offset(int row, int byte) {
  return row * RowBytes + (RowBytes == 64 ? byte ^ (row >> 2 & 1) << 5 : byte);
}

// Loads the `Bits` bits number `part` of a row, as words: 16 or a multiple of 32. 48 are two words of 24.
template <int RowBytes, int Bits>
__device__ __forceinline__ void load_codes(uint32_t (&words)[(Bits + 31) / 32], uint32_t tile, int row, int part) {
  if constexpr (Bits % 32 == 0) {
    load_words(words, tile + code_offset<RowBytes>(row, part * (Bits / 8)));
  } else if constexpr (Bits == 16) {
    words[0] = load_half_word(tile + code_offset<RowBytes>(row, part * 2));
  } else {
    static_assert(Bits == 48, "16, 48 or whole words");
    uint32_t both[2];
#pragma unroll
    for (int n = 0; n < 2; ++n) both[n] = load_word(tile + row * RowBytes + (part * 6 & ~3) + n * 4);
    words[0] = __byte_perm(both[0], both[1], part % 2 ? 0x5432 : 0x3210);
    words[1] = __byte_perm(both[0], both[1], part % 2 ? 0x7765 : 0x6543);
  }
}

// How the table of codes of `Bits` bits is read: `kWords` pairs of entries for a byte, and as many lanes as load together
// in a row of it.
template <int Bits>
struct CodeTable {
  static constexpr int kWords = Bits == 3 ? 1 : 4 / Bits;
  static constexpr int kLanes = 32 / kWords;
  static __device__ __forceinline__ uint32_t lane_offset(int lane) { return lane % kLanes * kWords * 4; }
  // The code number `n` of those of a row's lane's word.
  static __device__ __forceinline__ int code(int row, int lane, int n) {
    const int codes = row >> (lane % kWords * 2 + n) * Bits;
    return Bits == 4 && n == 1 ? codes : codes & ((1 << Bits) - 1);
  }
};

// The entries for byte `byte` of a word of codes. `lane` is the address of the lane's column, below 256; the table itself
// is at shared address `base`.
template <int Words>
__device__ __forceinline__ void look_up(
    uint32_t (&entries)[Words], uint32_t word, int byte, uint32_t lane, uint32_t base) {
  load_entries(entries, base + __byte_perm(word, lane, 0x5504 | byte << 4));
}

// The codes of two keys, in turns of two codes: a look-up of a byte with 2 codes of each, or 4, then gives the operands of
// both in the order of their registers.
template <int Bits, int Words>
__device__ __forceinline__ void interleave_pairs(uint32_t (&first)[Words], uint32_t (&second)[Words]) {
  constexpr uint32_t kEvenPairs = Bits == 2 ? 0x0f0f0f0f : 0x33333333;
#pragma unroll
  for (int n = 0; n < Words; ++n) {
    const uint32_t low = (first[n] & kEvenPairs) | (second[n] << 2 * Bits & ~kEvenPairs);
    second[n] = (first[n] >> 2 * Bits & kEvenPairs) | (second[n] & ~kEvenPairs);
    first[n] = low;
  }
}

// Operand A of a step of 16 columns for keys g and g + 8, of which a lane has the words `codes`. With 1 and 2 bits they
// are interleaved. With 3 bits, pair n of codes begins at bit 6 n, which is byte 3 (n / 4) of the codes shifted by
// 6 (n % 4) bits: pairs that are four apart share the shifts.
template <int Bits, int Words>
__device__ __forceinline__ void look_up_keys(
    uint32_t (&a)[4], const uint32_t (&codes)[2][Words], int step, int lane, uint32_t base) {
  using Table = CodeTable<Bits>;
  const uint32_t column = Table::lane_offset(lane);
  if constexpr (Table::kWords == 4) {
    look_up(a, codes[step % 2][step / 8], step / 2 % 4, column, base);
  } else if constexpr (Table::kWords == 2) {
#pragma unroll
    for (int n = 0; n < 2; ++n) {
      uint32_t entries[2];
      look_up(entries, codes[n][step / 4], step % 4, column, base);
      a[n * 2] = entries[0], a[n * 2 + 1] = entries[1];
    }
  } else {
#pragma unroll
    for (int n = 0; n < 4; ++n) {
      const int pair = step * 2 + n / 2, byte = Bits == 3 ? pair / 4 * 3 : pair, word = byte / 4;
      uint32_t shifted = codes[n % 2][word], entries[1];
      if constexpr (Bits == 3) {
        const uint32_t next = word + 1 < Words ? codes[n % 2][word + 1 < Words ? word + 1 : 0] : 0;
        if (pair % 4 > 0) shifted = __funnelshift_r(shifted, next, pair % 4 * 6);
      }
      look_up(entries, shifted, byte % 4, column, base);
      a[n] = entries[0];
    }
  }
}

// The sum over a warp's tiles, [columns, heads] in accumulators, and the softmax of head lane / 4.
template <int HeadDim>
struct CodeSoftmax {
  float row_max[2] = {-INFINITY, -INFINITY};
  float row_sum[2] = {0.f, 0.f};
  float acc[HeadDim / 16][4] = {};
};

// Which of a lane's columns of values element `half` (0 or 1) of tile m of the accumulators is. A look-up has every other
// column of as many as it has codes of one key.
template <int Bits>
__device__ __forceinline__ int value_column(int m, int half) {
  return Bits == 2 ? m / 2 * 4 + m % 2 + half * 2 : m * 2 + half;
}

// The query's columns as halves of operand A whose other rows are zero.
template <int HeadDim, int Signs>
struct CodeQuery {
  uint32_t columns[HeadDim / 16][2];
  uint32_t projections[Signs / 16 + 1][2];  // the products with the residuals' projection, times `sign_scale`
  float offset[2];                          // what the sums over signs begin with; see `sign_operand`
  int segment = 0;                          // segments of the share before the next one
};

// Where columns `column` and the next one of a head's query lie in a slot: lane (g, t) has, of head g, columns
// t HeadDim / 4 + 4 step + (0, 1, 2, 3). With keys of 1 bit, whose look-ups have every other pair of columns, two steps
// exchange their second and third pairs.
template <int HeadDim, int KeyBits>
__device__ __forceinline__ uint32_t query_offset(int head, int column) {
  constexpr int kPart = HeadDim / 4;
  const int slot = KeyBits == 1 ? (column & ~6) | (column & 2) << 1 | (column & 4) >> 1 : column;
  return slot % kPart / 4 * 256 + (head * 4 + column / kPart) * 8 + slot % 4 * 2;
}

// Where a projection lies in a slot. Lanes have those 16 apart, which share a word of signs, as pairs.
template <int HeadDim, int Signs>
__device__ __forceinline__ uint32_t projection_offset(int head, int projection) {
  const int part = projection / (Signs / 4), within = projection % (Signs / 4), pair = within / 32 * 16 + within % 16;
  return (HeadDim / 16 + pair / 2) * 256 + (head * 4 + part) * 8 + pair % 2 * 4 + within / 16 % 2 * 2;
}

// A pair of numbers of operand A for bits `pair` and 16 + `pair` of a word of signs: 1 + 2^(k - 7) if the bit is set,
// otherwise 1, where bit k of a bfloat16, the last but k of its 7 bits of mantissa, is the sign: one operation per pair,
// and four shifts per word. Products with queries times 2^(8 - k) are those with the signs and a sum that does not depend on
// signs, which `query.offset` subtracts. k is 3 to 6, so that this sum, which is rounded, is not much larger. Bit 15 needs
// no such sum: it is the sign of a bfloat16, and its queries are negated. `ones` is a pair of 1.
__device__ __forceinline__ constexpr int sign_bit(int pair) { return 3 + (pair + 1) % 4; }
__device__ __forceinline__ uint32_t sign_operand(uint32_t word, int pair, uint32_t ones) {
  if (pair == 15) return (word & 0x80008000) | ones;
  const int bit = sign_bit(pair);
  const uint32_t moved = pair < bit ? word << bit - pair : word >> pair - bit;
  return (moved & 0x00010001u << bit) | ones;
}

// The factor of queries for a pair of signs, and what the offset has of the product of this factor and a query.
__device__ __forceinline__ float sign_scale(int pair) { return pair == 15 ? -1.f : float(256 >> sign_bit(pair)); }
__device__ __forceinline__ float sign_offset(int pair) {
  return pair == 15 ? 0.f : -1.f - float(1 << sign_bit(pair)) / 256.f;
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
    for (int n = 0; n < 4; ++n) {
      scores[tile][n] = 0.f;
      signs[tile][n] = Signs > 0 ? query.offset[n % 2] : 0.f;
    }
    uint32_t words[2][kBits / 32];
#pragma unroll
    for (int n = 0; n < 2; ++n) {
      load_codes<S::kKeyBytes, kBits>(words[n], stage, tile * 16 + n * 8 + code_row<S::kKeyBytes>(g), t);
    }
    if constexpr (KeyBits < 3) interleave_pairs<KeyBits>(words[0], words[1]);
#pragma unroll
    for (int step = 0; step < HeadDim / 16; ++step) {
      uint32_t a[4];
      look_up_keys<KeyBits>(a, words, step, lane, loader.table);
      Half<__nv_bfloat16>::multiply(scores[tile], a, query.columns[step][0], query.columns[step][1]);
    }
    if constexpr (Signs > 0) {
      uint32_t bits[2][Signs / 128];
#pragma unroll
      for (int n = 0; n < 2; ++n) {
        load_codes<S::kSignBytes, Signs / 4>(
            bits[n], stage + S::kSigns, tile * 16 + n * 8 + code_row<S::kSignBytes>(g), t);
      }
#pragma unroll
      for (int step = 0; step < Signs / 16; ++step) {
        uint32_t a[4];
#pragma unroll
        for (int n = 0; n < 4; ++n) {
          const int pair = step * 2 + n / 2;
          a[n] = sign_operand(bits[n % 2][pair / 16], pair % 16, loader.ones);
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

// Adds the weighted values of a tile to the accumulators; weights have the values' norms.
template <int HeadDim, int KeyBits, int ValueBits, int Signs, typename Loader>
__device__ __forceinline__ void multiply_value_codes(
    CodeSoftmax<HeadDim>& softmax, const uint32_t (&weights)[2][2], const Loader& loader, uint32_t stage) {
  using S = TileShape<HeadDim, Codes<KeyBits, ValueBits, Signs>>;
  using Table = CodeTable<ValueBits>;
  constexpr int kBits = HeadDim / 8 * ValueBits, kWords = (kBits + 31) / 32;
  // Codes at even positions of a word. With 3 bits a word has 24.
  constexpr uint32_t kEven = ValueBits == 4   ? 0x0f0f0f0f
                             : ValueBits == 3 ? 0x001c71c7
                                              : 0x33333333;
  const int lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    uint32_t words[4][kWords];
#pragma unroll
    for (int key = 0; key < 4; ++key) {
      load_codes<S::kValueBytes, kBits>(
          words[key], stage, half * 16 + key / 2 * 8 + code_row<S::kValueBytes>(t * 2 + key % 2), g);
    }
    // Codes of two keys next to each other, of even and of odd columns: a word of a look-up is then an operand.
    uint32_t even[2][kWords], odd[2][kWords];
#pragma unroll
    for (int n = 0; n < 2; ++n) {
#pragma unroll
      for (int word = 0; word < kWords; ++word) {
        const uint32_t first = words[n * 2][word], second = words[n * 2 + 1][word];
        even[n][word] = (first & kEven) | (second << ValueBits & ~kEven);
        odd[n][word] = (first >> ValueBits & kEven) | (second & ~kEven);
      }
    }
#pragma unroll
    for (int byte = 0; byte < HeadDim / 16 / Table::kWords; ++byte) {
      uint32_t entries[4][Table::kWords];  // of even and odd columns, of keys 2 t and 2 t + 1, then of those 8 later
#pragma unroll
      for (int n = 0; n < 4; ++n) {
        const uint32_t(&codes)[kWords] = n % 2 == 1 ? odd[n / 2] : even[n / 2];
        // The pairs of 6 bits of a word of 24 begin with bytes of the word shifted by 0, 2, 4 and 6.
        const uint32_t word = ValueBits == 3 ? codes[byte / 4] << byte % 4 * 2 : codes[byte / 4];
        look_up(entries[n], word, byte % 4, Table::lane_offset(lane) + 128, loader.table);
      }
#pragma unroll
      for (int i = 0; i < Table::kWords; ++i) {
        uint32_t a[4];
#pragma unroll
        for (int n = 0; n < 4; ++n) {
          // Rows g and g + 8 are an even and an odd column, or both columns of a look-up.
          a[n] = Table::kWords == 1 ? entries[n][0] : entries[n / 2 * 2 + i][n % 2];
        }
        Half<__nv_bfloat16>::multiply(softmax.acc[byte * Table::kWords + i], a, weights[half][0], weights[half][1]);
      }
    }
  }
}

}  // namespace ejkernel
