// Decode attention: one query token per row attends to a range of keys. A block's warps share nothing in the main loop.
//
//   a row's segment of keys: tiles w0 w1 w2 w3 w0 w1 w2 w3 ..            interleaved over the block's warps
//
//   warp: cp.async -> ring of stages in shared memory -> MMA q K^T -> online softmax -> MMA p V -> acc in registers
//   block: merges its warps' softmaxes in shared memory -> the row's output, or a partial result that a combine merges
//
// A segment is a range of keys of one KV head of one row, with up to 16 of its query heads (the rows of an MMA tile).
// Each warp has pipeline stages and a softmax of its own, so the main loop has no barrier. `split_decode.cuh` and
// `paged_decode.cuh` assign segments to blocks.
//
// Keys are in pages, or contiguous. A tile's pages are looked up one tile before its copies are issued, one key per
// lane. Caches have 16 bits per element, or 8, which are converted to float16 between shared memory and the MMA.
//
// Sources: Milakov & Gimelshein 2018 (online softmax); Dao et al. 2023, "Flash-Decoding" (splitting the keys); Kwon et
// al. 2023, arXiv:2309.06180 (paged attention).
#pragma once

#include "common/decode_tile.cuh"

namespace ejkernel {

// The output column of element n (0 or 1) of accumulator `index`.
template <typename CacheT>
__device__ __forceinline__ int output_column(int index, int n) {
  const int lane = threadIdx.x % 32;
  return sizeof(CacheT) == 2 ? index * 8 + lane % 4 * 2 + n : index / 2 * 16 + (lane % 4 * 2 + n) * 2 + index % 2;
}

// Output and lse of one head, from its unnormalised sum, maximum and denominator; the sink is added to the denominator.
struct OutputScale {
  float factor, lse;
  __device__ OutputScale(
      const DecodeParams& call, int row, int head, float row_max, float row_sum, bool in_sequence = true) {
    // The sink may exceed every score, so it joins the maximum too. `denominator` is 0 for a row with neither key nor
    // sink, which gets output 0 and lse -INFINITY. exp2f is called only once per head, so it need not be exp2_fast.
    const float sink = call.sinks == nullptr || !in_sequence
                           ? -INFINITY
                           : kLog2e * call.sinks[size_t(row / call.rows_per_sink) * call.heads + head];
    const float shift = fmaxf(row_max, sink);
    const float denominator = shift == -INFINITY ? 0.f : row_sum * exp2f(row_max - shift) + exp2f(sink - shift);
    factor = denominator > 0.f ? call.value_scale * exp2f(row_max - shift) / denominator : 0.f;
    lse = denominator > 0.f ? kLn2 * (shift + log2f(denominator)) : -INFINITY;
  }
};

// A warp stores its accumulators for the merge in the last stage of its ring: the next segment starts with the other
// stages.
template <int HeadDim, typename CacheT>
__device__ __forceinline__ float* warp_accumulators(unsigned char* shared, int warp) {
  using S = TileShape<HeadDim, CacheT>;
  static_assert(S::kHeads * HeadDim * 4 <= 2 * S::kTileBytes, "accumulators fit into a stage");
  return reinterpret_cast<float*>(shared + warp * S::kWarpSmemBytes + (S::kStages - 1) * 2 * S::kTileBytes);
}

// The index of a column in a head's row of accumulators. Rows of neighbouring heads are a multiple of 128 bytes apart;
// without the XOR, which permutes groups of eight columns, lanes that store eight heads would conflict in a few banks.
__device__ __forceinline__ int acc_index(int size, int head, int column) {
  return head * size + (column ^ head % 4 * 8);
}

template <int HeadDim, typename CacheT>
__device__ __forceinline__ float* warp_statistics() {
  __shared__ float statistics[kHeadsPerBlock * TileShape<HeadDim, CacheT>::kWarps * 2];  // [heads][warps][2]
  return statistics;
}

// Stores a warp's softmax of `heads` heads for the merge. The warp has read its last stage, and no copy into it is in
// flight.
template <int HeadDim, typename CacheT>
__device__ __forceinline__ void store_warp_softmax(OnlineSoftmax<HeadDim>& softmax, int heads, unsigned char* shared) {
  constexpr int kWarps = TileShape<HeadDim, CacheT>::kWarps;
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  float* accs = warp_accumulators<HeadDim, CacheT>(shared, warp);
  float* statistics = warp_statistics<HeadDim, CacheT>();
#pragma unroll
  for (int part = 0; part < 2; ++part) {
    const int head = lane / 4 + part * 8;
    softmax.row_sum[part] += __shfl_xor_sync(~0u, softmax.row_sum[part], 1);
    softmax.row_sum[part] += __shfl_xor_sync(~0u, softmax.row_sum[part], 2);
    if (head < heads) {  // unused rows are not stored: the next copies, or the end of the launch, would wait for them
      if (lane % 4 == 0) {
        statistics[(head * kWarps + warp) * 2] = softmax.row_max[part];
        statistics[(head * kWarps + warp) * 2 + 1] = softmax.row_sum[part];
      }
#pragma unroll
      for (int index = 0; index < HeadDim / 8; ++index) {
#pragma unroll
        for (int n = 0; n < 2; ++n) {
          accs[acc_index(HeadDim, head, output_column<CacheT>(index, n))] = softmax.acc[index][part * 2 + n];
        }
      }
    }
  }
}

// Merges the softmaxes that a block's warps stored, and stores the segment's result. The caller puts a barrier before
// it, and another one before a warp's last stage is filled again.
template <int HeadDim, typename CacheT>
__device__ __forceinline__ void merge_warps(
    const DecodeParams& call, const KeySegment& segment, unsigned char* shared) {
  constexpr int kWarps = TileShape<HeadDim, CacheT>::kWarps;
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  const float* statistics = warp_statistics<HeadDim, CacheT>();
  // Warps are added in a fixed order, so that results are reproducible bit for bit.
  for (int head = warp; head < segment.num_heads; head += kWarps) {
    float row_max = -INFINITY, row_sum = 0.f, alphas[kWarps];
#pragma unroll
    for (int w = 0; w < kWarps; ++w) row_max = fmaxf(row_max, statistics[(head * kWarps + w) * 2]);
#pragma unroll
    for (int w = 0; w < kWarps; ++w) {
      // A warp without tiles has the maximum -INFINITY, and so its alpha is 0.
      alphas[w] = row_max == -INFINITY ? 0.f : exp2f(statistics[(head * kWarps + w) * 2] - row_max);
      row_sum += alphas[w] * statistics[(head * kWarps + w) * 2 + 1];
    }
    const size_t row_head = size_t(segment.row) * call.heads + segment.first_head + head;
    const bool is_only_segment = segment.partial == nullptr;
    const OutputScale output_scale(call, segment.row, segment.first_head + head, row_max, row_sum,
        segment.sequence >= 0);
    for (int column = lane; column < call.value_size; column += 32) {
      float sum = 0.f;
#pragma unroll
      for (int w = 0; w < kWarps; ++w) {
        sum += alphas[w] * warp_accumulators<HeadDim, CacheT>(shared, w)[acc_index(HeadDim, head, column)];
      }
      if (is_only_segment) {
        store_output(call, row_head * call.value_size + column, sum * output_scale.factor);
      } else {
        // Not normalised: the combine kernel divides by the denominator of all segments, which the sink joins once.
        segment.partial[size_t(head) * call.value_size + column] = sum;
      }
    }
    if (lane == 0 && is_only_segment) call.lse[row_head] = output_scale.lse;
    if (lane == 0 && !is_only_segment) {
      segment.statistics[head * 2] = row_max;
      segment.statistics[head * 2 + 1] = row_sum;
    }
  }
}

// One warp's copies of a segment's tiles, and which of the tiles' keys exist.
template <int HeadDim, typename CacheT>
struct TileLoader {
  using S = TileShape<HeadDim, CacheT>;
  const DecodeParams& call;
  const unsigned char *keys, *values;
  uint32_t smem_ring;
  int first_key, end_key, sequence, tiles, page, slot;
  uint32_t valid_keys[S::kStages];  // of the tiles whose copies are in flight: one bit per key

  __device__ __forceinline__ TileLoader(const DecodeParams& call, const void* shared)
      : call(call), smem_ring(shared_address(shared) + threadIdx.x / 32 * S::kWarpSmemBytes) {}

  // Starts a segment and looks up its first pages. The warp has read all stages of its ring but the last one, which the
  // first copies do not write.
  __device__ __forceinline__ void start_segment(const KeySegment& segment) {
    first_key = segment.first_key + threadIdx.x / 32 * S::kTileKeys;
    end_key = segment.end_key;
    sequence = segment.sequence;
    tiles = max(end_key - first_key + S::kKeysPerRound - 1, 0) / S::kKeysPerRound;
    // Offsets within a head count 16-byte chunks in 32 bits; without pages, a sequence's start is added to the pointer.
    const size_t row = call.tables == nullptr ? max(sequence, 0) : 0;
    keys = call.keys + (row * call.key_strides.page + size_t(segment.kv_head) * call.key_strides.head) * 16;
    values = call.values + (row * call.value_strides.page + size_t(segment.kv_head) * call.value_strides.head) * 16;
    look_up_page(0);
  }

  __device__ __forceinline__ void prefetch_tiles() {
#pragma unroll
    for (int tile = 0; tile < S::kStages - 1; ++tile) valid_keys[tile] = load_tile(tile);
  }

  // Looks up the page and slot of this lane's key of a tile.
  __device__ __forceinline__ void look_up_page(int tile) {
    const int key = first_key + tile * S::kKeysPerRound + threadIdx.x % S::kTileKeys;
    page = -1;
    slot = key;
    if (key >= end_key) return;
    if (call.tables == nullptr) {
      page = 0;
    } else {
      const int column = key / call.page_size;
      slot = key - column * call.page_size;
      page = call.tables[size_t(sequence) * call.columns + column];
    }
  }

  // Starts copying a tile; returns one bit per key, set where the key exists.
  __device__ __forceinline__ uint32_t load_tile(int tile) {
    uint32_t valid_mask = 0;
    if (tile < tiles) {
      // A table entry that is not the index of a page is padding.
      const bool is_valid = page >= 0 && page < call.pages;
      valid_mask = __ballot_sync(~0u, is_valid) & ~0u >> (32 - S::kTileKeys);
      const uint32_t stage = smem_ring + tile % S::kStages * 2 * S::kTileBytes;
      const Strides &k = call.key_strides, &v = call.value_strides;
      const uint32_t key = is_valid ? page * k.page + slot * k.slot : kInvalidOffset;
      const uint32_t value = is_valid ? page * v.page + slot * v.slot : kInvalidOffset;
      copy_tile<HeadDim, CacheT>(stage, keys, key, call.size * sizeof(CacheT) / 16);
      copy_tile<HeadDim, CacheT>(stage + S::kTileBytes, values, value, call.value_size * sizeof(CacheT) / 16);
      // Looks up the next tile's pages now, so that its copies need not wait for the page table.
      look_up_page(tile + 1);
    }
    // Commits a group even where nothing is copied: waits count groups, one per tile.
    commit_copies();
    return valid_mask;
  }
};

// A segment's query heads, in registers; see `load_query`.
template <int HeadDim>
struct QueryFragments {
  uint32_t fragments[HeadDim / 16][4];
  float factors[2];
};

// Runs the main loop of a segment whose first copies are in flight.
template <int HeadDim, typename CacheT>
__device__ __forceinline__ void attend_tiles(
    OnlineSoftmax<HeadDim>& softmax, const DecodeParams& call, TileLoader<HeadDim, CacheT>& loader,
    const QueryFragments<HeadDim>& query, int heads) {
  using S = TileShape<HeadDim, CacheT>;
  for (int tile = 0; tile < loader.tiles; ++tile) {
    wait_for_copies<S::kStages - 2>();
    __syncwarp();  // hazard: all copies must have arrived, and all lanes have read the stage that is refilled next
    loader.valid_keys[S::kStages - 1] = loader.load_tile(tile + S::kStages - 1);
    const uint32_t key_tile = loader.smem_ring + tile % S::kStages * 2 * S::kTileBytes;
    float scores[S::kTileKeys / 8][4];
    multiply_keys<HeadDim, CacheT>(scores, query.fragments, key_tile);
    scale_scores(scores, query.factors, call.cap);
    // The whole block takes the same branch. With at most eight heads, the other eight rows of the MMA need no
    // exponentials.
    if (heads <= 8) {
      update_softmax<1>(softmax, scores, loader.valid_keys[0]);
    } else {
      update_softmax<2>(softmax, scores, loader.valid_keys[0]);
    }
    multiply_values<HeadDim, CacheT>(softmax, scores, key_tile + S::kTileBytes);
#pragma unroll
    for (int stage = 0; stage < S::kStages - 1; ++stage) loader.valid_keys[stage] = loader.valid_keys[stage + 1];
  }
  __syncwarp();  // hazard: lanes still read the stages that the merge and the next segment fill
}

// What the persistent kernel does with a segment, by the format of its cache: this one has numbers, not codes.
template <int HeadDim, typename CacheT>
struct CacheFormat {
  using Query = QueryFragments<HeadDim>;
  using Softmax = OnlineSoftmax<HeadDim>;
  static __device__ __forceinline__ void load(
      Query& query, const DecodeParams& call, const KeySegment& segment, const void*) {
    load_query<HeadDim, CacheT>(query.fragments, query.factors, call, segment);
  }
  static __device__ __forceinline__ void store(Softmax& softmax, int heads, unsigned char* shared) {
    store_warp_softmax<HeadDim, CacheT>(softmax, heads, shared);
  }
};

// Attends to a segment and stores its result. All threads of the block call it, with a barrier between two calls.
template <int HeadDim, typename CacheT>
__device__ __forceinline__ void attend_segment(
    const DecodeParams& call, const KeySegment& segment, unsigned char* shared) {
  TileLoader<HeadDim, CacheT> loader(call, shared);
  loader.start_segment(segment);
  loader.prefetch_tiles();
  QueryFragments<HeadDim> query;  // after the first copies, so that both latencies overlap
  load_query<HeadDim, CacheT>(query.fragments, query.factors, call, segment);
  OnlineSoftmax<HeadDim> softmax;
  attend_tiles(softmax, call, loader, query, segment.num_heads);
  store_warp_softmax<HeadDim, CacheT>(softmax, segment.num_heads, shared);
  __syncthreads();
  merge_warps<HeadDim, CacheT>(call, segment, shared);
}

}  // namespace ejkernel
