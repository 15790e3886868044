// Decode attention over codes: what a block does with a segment of a cache in the format of `code_tile.cuh`.
//
//   copies     keys 0 | keys 1, values 0 | keys 2, values 1 | ...
//   products             keys 0          | keys 1, values 0 | ...
//
// Keys are a tile ahead of values, so that products of keys and of values, which do not depend on each other, overlap.
// 12 warps share the look-up tables, and a block fills a multiprocessor. 16 warps are not faster.
#pragma once

#include "common/code_tile.cuh"
#include "common/decode.cuh"

namespace ejkernel {

// What a cache of codes has in addition to codes.
struct CodeParams {
  const unsigned char* signs;  // null if there are none
  Strides sign_strides;
  const uint32_t* key_norms;    // [pages, page_size, heads, 2] bfloat16
  const uint16_t* value_norms;  // [pages, page_size, heads] bfloat16
  const float *key_codebook, *value_codebook;
  int key_levels, value_levels;
  int columns_per_round, slots_per_round;  // by which a lane's key advances in a round of `kKeysPerRound`
};

// One warp's copies of a segment's tiles of codes and norms.
template <int HeadDim, int KeyBits, int ValueBits, int Signs>
struct TileLoader<HeadDim, Codes<KeyBits, ValueBits, Signs>> {
  using S = TileShape<HeadDim, Codes<KeyBits, ValueBits, Signs>>;
  const DecodeParams& call;
  const CodeParams& codes;
  uint32_t smem_ring, table, ones;  // `ones`: a pair of 1 in bfloat16
  int key, end_key, kv_head, tiles, page, column, slot;  // `key`, `column` and `slot` are of this lane's next key
  const int* entries;  // of the sequence's pages
  uint32_t valid_keys, token;  // of the newest tile of keys: one bit per key, and where this lane's key is in the cache
  int stage;                              // of that tile: 0 or 1
  uint32_t key_norm = 0, value_norm = 0;  // of this lane's key of the newest tile

  template <typename Params>
  __device__ __forceinline__ TileLoader(const Params& call, const void* shared)
      : call(call), codes(call), smem_ring(shared_address(shared) + threadIdx.x / 32 * S::kWarpSmemBytes),
        table(shared_address(shared) + S::kTable), ones(call.ones) {}

  __device__ __forceinline__ void start_segment(const KeySegment& segment) {
    const int first_key = segment.first_key + threadIdx.x / 32 * S::kTileKeys;
    end_key = segment.end_key;
    kv_head = segment.kv_head;
    tiles = max(end_key - first_key + S::kKeysPerRound - 1, 0) / S::kKeysPerRound;
    key = first_key + threadIdx.x % 32;
    column = key / call.page_size;
    slot = key - column * call.page_size;
    entries = call.tables + size_t(max(segment.sequence, 0)) * call.columns;
    stage = 1;
    look_up_page();
  }

  __device__ __forceinline__ uint32_t key_tile() const { return smem_ring + stage * S::kTileBytes; }
  __device__ __forceinline__ uint32_t value_tile() const {
    return smem_ring + 2 * S::kTileBytes + stage * S::kValueTileBytes;
  }

  __device__ __forceinline__ void prefetch_tiles() {
    load_keys(0);
    commit_copies();
    store_norms();
  }

  __device__ __forceinline__ void look_up_page() { page = key < end_key ? entries[column] : -1; }

  // Copies the rows of a tile. A token's place times `strides.slot` is that of its row, in pieces of 16 bytes.
  template <int RowBytes>
  __device__ __forceinline__ void copy_rows(uint32_t to, const unsigned char* from, const Strides& strides) const {
    constexpr int kChunks = RowBytes / 16;
    // A copy of 0 bytes reads nothing, but needs a valid address.
    const uint32_t own = token * strides.slot + kv_head * strides.head;
#pragma unroll
    for (int pass = 0; pass < kChunks; ++pass) {
      // Rows of a power of two of chunks have the same offset in each pass, and differ by constants.
      const int lane = threadIdx.x % 32, index = kChunks == 3 ? pass * 32 + lane : lane;
      const int first = kChunks == 3 ? 0 : pass * (32 / kChunks), row = index / kChunks, chunk = index % kChunks;
      const uint32_t offset = __shfl_sync(~0u, own, row + first);
      copy_async(to + code_offset<RowBytes>(code_row<RowBytes>(row), chunk * 16) + first * RowBytes,
          from + size_t(offset + chunk) * 16, valid_keys >> row >> first & 1 ? 16 : 0);
    }
  }

  // Starts copying the values of the newest tile of keys.
  __device__ __forceinline__ void load_values() const {
    copy_rows<S::kValueBytes>(value_tile(), call.values, call.value_strides);
  }

  // Starts copying a tile's keys and loading its norms, which `store_norms` stores.
  __device__ __forceinline__ void load_keys(int tile) {
    stage ^= 1;
    valid_keys = 0;
    if (tile >= tiles) return;
    const bool is_valid = page >= 0 && page < call.pages;
    valid_keys = __ballot_sync(~0u, is_valid);
    token = is_valid ? page * call.page_size + slot : 0;
    copy_rows<S::kKeyBytes>(key_tile(), call.keys, call.key_strides);
    if constexpr (Signs > 0) copy_rows<S::kSignBytes>(key_tile() + S::kSigns, codes.signs, codes.sign_strides);
    // The norms of missing keys may be NaN.
    key_norm = value_norm = 0;
    if (is_valid) {
      const size_t at = size_t(token) * call.kv_heads + kv_head;
      key_norm = load_norm_pair(codes.key_norms + at);
      value_norm = load_norm(codes.value_norms + at);
    }
    key += S::kKeysPerRound;
    column += codes.columns_per_round;
    slot += codes.slots_per_round;
    if (slot >= call.page_size) {
      slot -= call.page_size;
      ++column;
    }
    look_up_page();
  }

  __device__ __forceinline__ void store_norms() const {
    const uint32_t to = key_tile() + threadIdx.x % 32 * 4;
    store_word(to + S::kNorms, __byte_perm(key_norm, value_norm, 0x5410));
    if constexpr (Signs > 0) store_word(to + S::kResidualNorms, key_norm & 0xffff0000);
  }
};

template <int HeadDim, int KeyBits, int ValueBits, int Signs>
struct CacheFormat<HeadDim, Codes<KeyBits, ValueBits, Signs>> {
  using CacheT = Codes<KeyBits, ValueBits, Signs>;
  using S = TileShape<HeadDim, CacheT>;
  using Query = CodeQuery<HeadDim, Signs>;
  using Softmax = CodeSoftmax<HeadDim>;

  // Loads the query of the share's next segment from its slot, where a rotation has stored it.
  static __device__ __forceinline__ void load(
      Query& query, const DecodeParams&, const KeySegment&, const void* shared) {
    const uint32_t slot = shared_address(shared) + S::kQueries + query.segment++ % S::kQuerySlots * S::kQueryBytes +
                          threadIdx.x % 32 * 8;
#pragma unroll
    for (int step = 0; step < HeadDim / 16; ++step) load_words(query.columns[step], slot + step * 256);
#pragma unroll
    for (int step = 0; step < Signs / 16; ++step) {
      load_words(query.projections[step], slot + (HeadDim / 16 + step) * 256);
    }
    if constexpr (Signs > 0) {
      float sums[4] = {};  // of heads 2 t and 2 t + 1, in both halves
#pragma unroll
      for (int step = 0; step < Signs / 16; ++step) {
        uint32_t a[4];
#pragma unroll
        for (int n = 0; n < 4; ++n) {
          const float offset = sign_offset((step * 2 + n / 2) % 16);
          a[n] = Half<__nv_bfloat16>::pack(offset, offset);
        }
        Half<__nv_bfloat16>::multiply(sums, a, query.projections[step][0], query.projections[step][1]);
      }
      query.offset[0] = sums[0], query.offset[1] = sums[1];
    }
  }

  static __device__ __forceinline__ void store(Softmax& softmax, int heads, unsigned char* shared) {
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, g = lane / 4, t = lane % 4;
    float* accs = warp_accumulators<HeadDim, CacheT>(shared, warp);
    float* statistics = warp_statistics<HeadDim, CacheT>();
#pragma unroll
    for (int i = 0; i < 2; ++i) {
#pragma unroll
      for (int step = 4; step < 32; step *= 2) {
        softmax.row_sum[i] += __shfl_xor_sync(~0u, softmax.row_sum[i], step);
      }
      if (g == 0 && t * 2 + i < heads) {
        statistics[((t * 2 + i) * S::kWarps + warp) * 2] = softmax.row_max[i];
        statistics[((t * 2 + i) * S::kWarps + warp) * 2 + 1] = softmax.row_sum[i];
      }
    }
#pragma unroll
    for (int m = 0; m < HeadDim / 16; ++m) {
#pragma unroll
      for (int n = 0; n < 4; ++n) {
        const int head = t * 2 + n % 2, column = g * (HeadDim / 8) + value_column<ValueBits>(m, n / 2);
        if (head < heads) accs[acc_index(HeadDim, head, column)] = softmax.acc[m][n];
      }
    }
  }
};

// Turns products into scores in base 2, and these into weights of values, with the norms of both.
template <int HeadDim, int Signs, typename S>
__device__ __forceinline__ void make_weights(
    CodeSoftmax<HeadDim>& softmax, uint32_t (&weights)[2][2], float (&scores)[2][4], const float (&signs)[2][4],
    const DecodeParams& call, uint32_t stage, uint32_t valid_keys) {
  const int g = threadIdx.x % 32 / 4;
  const float factor = kLog2e * call.scale;
  uint32_t norms[4];  // of keys and of values, in bfloat16
#pragma unroll
  for (int n = 0; n < 4; ++n) {
    norms[n] = load_word(stage + S::kNorms + (n * 8 + g) * 4);
    const float norm = factor * __uint_as_float(norms[n] << 16);
    const float residual = Signs > 0 ? factor * load_float(stage + S::kResidualNorms + (n * 8 + g) * 4) : 0.f;
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      float& score = scores[n / 2][n % 2 * 2 + i];
      score *= norm;
      if constexpr (Signs > 0) score += residual * signs[n / 2][n % 2 * 2 + i];
    }
  }
  if (call.cap > 0.f) {
    const float factors[2] = {kLn2, kLn2};
    scale_scores(scores, factors, call.cap);
  }
  weigh_codes(softmax, scores, valid_keys);
#pragma unroll
  for (int n = 0; n < 4; ++n) {
    const float norm = __uint_as_float(norms[n] & 0xffff0000);
    weights[n / 2][n % 2] = transpose_matrix(Half<__nv_bfloat16>::pack(
        scores[n / 2][n % 2 * 2] * norm, scores[n / 2][n % 2 * 2 + 1] * norm));
  }
}

// Runs the main loop of a segment over codes. Keys are a tile ahead of values, so that the products of keys and those of
// values, which do not depend on each other, overlap.
template <int HeadDim, int KeyBits, int ValueBits, int Signs>
__device__ __forceinline__ void attend_tiles(
    CodeSoftmax<HeadDim>& softmax, const DecodeParams& call,
    TileLoader<HeadDim, Codes<KeyBits, ValueBits, Signs>>& loader, const CodeQuery<HeadDim, Signs>& query,
    int heads) {
  using S = TileShape<HeadDim, Codes<KeyBits, ValueBits, Signs>>;
  if (loader.tiles > 0) {
    uint32_t weights[2][2];
    float scores[2][4], signs[2][4];
    // Waits for the newest tile of keys and the values before it, and starts the next copies.
    uint32_t keys, values, valid_keys;
    const auto advance = [&](int tile) {
      wait_for_copies<0>();
      __syncwarp();  // hazard: all copies must have arrived, and all lanes have read the stages that are refilled next
      keys = loader.key_tile();
      valid_keys = loader.valid_keys;
      loader.load_values();
      values = loader.value_tile();
      loader.load_keys(tile + 1);
      commit_copies();
    };
    advance(0);
    multiply_key_codes<HeadDim, KeyBits, ValueBits, Signs>(scores, signs, query, loader, keys);
    make_weights<HeadDim, Signs, S>(softmax, weights, scores, signs, call, keys, valid_keys);
    loader.store_norms();
    for (int tile = 1; tile < loader.tiles; ++tile) {
      const uint32_t previous_values = values;
      advance(tile);
      multiply_key_codes<HeadDim, KeyBits, ValueBits, Signs>(scores, signs, query, loader, keys);
      multiply_value_codes<HeadDim, KeyBits, ValueBits, Signs>(softmax, weights, loader, previous_values);
      make_weights<HeadDim, Signs, S>(softmax, weights, scores, signs, call, keys, valid_keys);
      loader.store_norms();
    }
    wait_for_copies<0>();
    __syncwarp();
    multiply_value_codes<HeadDim, KeyBits, ValueBits, Signs>(softmax, weights, loader, values);
  }
  __syncwarp();  // hazard: lanes still read the stages that the merge and the next segment fill
}

}  // namespace ejkernel
