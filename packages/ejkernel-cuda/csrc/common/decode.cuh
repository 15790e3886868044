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
template <typename C>
__device__ __forceinline__ int column_of(int index, int n) {
  const int lane = threadIdx.x % 32;
  return sizeof(C) == 2 ? index * 8 + lane % 4 * 2 + n : index / 2 * 16 + (lane % 4 * 2 + n) * 2 + index % 2;
}

// Output and lse of one head, from its unnormalised sum, maximum and denominator; the sink is added to the denominator.
struct Finish {
  float factor, lse;
  __device__ Finish(const Decode& call, int row, int head, float row_max, float row_sum, bool in_sequence = true) {
    // The sink may exceed every score, so it joins the maximum too. `whole` is 0 for a row with neither key nor sink,
    // which gets output 0 and lse -INFINITY. exp2f is called only once per head, so it need not be exp2_fast.
    const float sink = call.sinks == nullptr || !in_sequence
                           ? -INFINITY
                           : kLog2e * call.sinks[size_t(row / call.rows_a_sink) * call.heads + head];
    const float shift = fmaxf(row_max, sink);
    const float whole = shift == -INFINITY ? 0.f : row_sum * exp2f(row_max - shift) + exp2f(sink - shift);
    factor = whole > 0.f ? call.value_scale * exp2f(row_max - shift) / whole : 0.f;
    lse = whole > 0.f ? kLn2 * (shift + log2f(whole)) : -INFINITY;
  }
};

// A warp stores its accumulators for the merge in the last stage of its ring: the next segment starts with the other
// stages.
template <int Size, typename C>
__device__ __forceinline__ float* accs_of(unsigned char* shared, int warp) {
  using S = Shape<Size, C>;
  static_assert(kHeads * Size * 4 <= 2 * S::kTileBytes, "accumulators fit into a stage");
  return reinterpret_cast<float*>(shared + warp * S::kWarpBytes + (S::kStages - 1) * 2 * S::kTileBytes);
}

// The index of a column in a head's row of accumulators. Rows of neighbouring heads are a multiple of 128 bytes apart;
// without the XOR, which permutes groups of eight columns, lanes that store eight heads would conflict in a few banks.
__device__ __forceinline__ int acc_place(int size, int head, int column) { return head * size + (column ^ head % 4 * 8); }

template <int Size, typename C>
__device__ __forceinline__ float* statistics_of() {
  __shared__ float statistics[kHeads * Shape<Size, C>::kWarps * 2];  // [heads][warps][2]
  return statistics;
}

// Stores a warp's softmax of `heads` heads for the merge. The warp has read its last stage, and no copy into it is in
// flight.
template <int Size, typename C>
__device__ __forceinline__ void leave_softmax(Softmax<Size>& softmax, int heads, unsigned char* shared) {
  constexpr int kWarps = Shape<Size, C>::kWarps;
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  float* accs = accs_of<Size, C>(shared, warp);
  float* statistics = statistics_of<Size, C>();
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
      for (int index = 0; index < Size / 8; ++index) {
#pragma unroll
        for (int n = 0; n < 2; ++n) {
          accs[acc_place(Size, head, column_of<C>(index, n))] = softmax.acc[index][part * 2 + n];
        }
      }
    }
  }
}

// Merges the softmaxes that a block's warps stored, and stores the segment's result. The caller puts a barrier before
// it, and another one before a warp's last stage is filled again.
template <int Size, typename C>
__device__ __forceinline__ void merge_warps(const Decode& call, const Segment& segment, unsigned char* shared) {
  constexpr int kWarps = Shape<Size, C>::kWarps;
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  const float* statistics = statistics_of<Size, C>();
  // Warps are added in a fixed order, so that results are reproducible bit for bit.
  for (int head = warp; head < segment.count; head += kWarps) {
    float row_max = -INFINITY, row_sum = 0.f, alphas[kWarps];
#pragma unroll
    for (int w = 0; w < kWarps; ++w) row_max = fmaxf(row_max, statistics[(head * kWarps + w) * 2]);
#pragma unroll
    for (int w = 0; w < kWarps; ++w) {
      // A warp without tiles has the maximum -INFINITY, and so its alpha is 0.
      alphas[w] = row_max == -INFINITY ? 0.f : exp2f(statistics[(head * kWarps + w) * 2] - row_max);
      row_sum += alphas[w] * statistics[(head * kWarps + w) * 2 + 1];
    }
    const size_t place = size_t(segment.row) * call.heads + segment.first_head + head;
    const bool whole = segment.partial == nullptr;
    const Finish finish(call, segment.row, segment.first_head + head, row_max, row_sum, segment.sequence >= 0);
    for (int column = lane; column < call.value_size; column += 32) {
      float sum = 0.f;
#pragma unroll
      for (int w = 0; w < kWarps; ++w) {
        sum += alphas[w] * accs_of<Size, C>(shared, w)[acc_place(Size, head, column)];
      }
      if (whole) {
        store_output(call, place * call.value_size + column, sum * finish.factor);
      } else {
        // Not normalised: the combine kernel divides by the denominator of all segments, which the sink joins once.
        segment.partial[size_t(head) * call.value_size + column] = sum;
      }
    }
    if (lane == 0 && whole) call.lse[place] = finish.lse;
    if (lane == 0 && !whole) {
      segment.statistics[head * 2] = row_max;
      segment.statistics[head * 2 + 1] = row_sum;
    }
  }
}

// One warp's copies of a segment's tiles, and which of the tiles' keys exist.
template <int Size, typename C>
struct Copies {
  using S = Shape<Size, C>;
  const Decode& call;
  const unsigned char *keys, *values;
  uint32_t ring;
  int first, limit, sequence, tiles, page, slot;
  uint32_t present[S::kStages];  // of the tiles whose copies are in flight: one bit per key

  __device__ __forceinline__ Copies(const Decode& call, const void* shared)
      : call(call), ring(shared_address(shared) + threadIdx.x / 32 * S::kWarpBytes) {}

  // Starts a segment and looks up its first pages. The warp has read all stages of its ring but the last one, which the
  // first copies do not write.
  __device__ __forceinline__ void begin(const Segment& segment) {
    first = segment.first + threadIdx.x / 32 * S::kKeys;
    limit = segment.limit;
    sequence = segment.sequence;
    tiles = max(limit - first + S::kRound - 1, 0) / S::kRound;
    // Offsets within a head count 16-byte pieces in 32 bits; without pages, a sequence's start is added to the pointer.
    const size_t row = call.tables == nullptr ? max(sequence, 0) : 0;
    keys = call.keys + (row * call.key_strides.page + size_t(segment.kv_head) * call.key_strides.head) * 16;
    values = call.values + (row * call.value_strides.page + size_t(segment.kv_head) * call.value_strides.head) * 16;
    look_up(0);
  }

  __device__ __forceinline__ void fetch_first() {
#pragma unroll
    for (int tile = 0; tile < S::kStages - 1; ++tile) present[tile] = fetch(tile);
  }

  // Looks up the page and slot of this lane's key of a tile.
  __device__ __forceinline__ void look_up(int tile) {
    const int key = first + tile * S::kRound + threadIdx.x % S::kKeys;
    page = -1;
    slot = key;
    if (key >= limit) return;
    if (call.tables == nullptr) {
      page = 0;
    } else {
      const int column = key / call.page_size;
      slot = key - column * call.page_size;
      page = call.tables[size_t(sequence) * call.columns + column];
    }
  }

  // Starts copying a tile; returns one bit per key, set where the key exists.
  __device__ __forceinline__ uint32_t fetch(int tile) {
    uint32_t found = 0;
    if (tile < tiles) {
      // A table entry that is not the index of a page is padding.
      const bool there = page >= 0 && page < call.pages;
      found = __ballot_sync(~0u, there) & ~0u >> (32 - S::kKeys);
      const uint32_t to = ring + tile % S::kStages * 2 * S::kTileBytes;
      const Strides &k = call.key_strides, &v = call.value_strides;
      const uint32_t key = there ? page * k.page + slot * k.slot : kAbsent;
      const uint32_t value = there ? page * v.page + slot * v.slot : kAbsent;
      copy_tile<Size, C>(to, keys, key, call.size * sizeof(C) / 16);
      copy_tile<Size, C>(to + S::kTileBytes, values, value, call.value_size * sizeof(C) / 16);
      // Looks up the next tile's pages now, so that its copies need not wait for the page table.
      look_up(tile + 1);
    }
    // Commits a group even where nothing is copied: waits count groups, one per tile.
    commit_copies();
    return found;
  }
};

// A segment's query heads, in registers; see `load_query`.
template <int Size>
struct Query {
  uint32_t parts[Size / 16][4];
  float factors[2];
};

// Runs the main loop of a segment whose first copies are in flight.
template <int Size, typename C>
__device__ __forceinline__ void attend(
    Softmax<Size>& softmax, const Decode& call, Copies<Size, C>& copies, const Query<Size>& query, int heads) {
  using S = Shape<Size, C>;
  for (int tile = 0; tile < copies.tiles; ++tile) {
    wait_for_copies<S::kStages - 2>();
    __syncwarp();  // hazard: all copies must have arrived, and all lanes have read the stage that is refilled next
    copies.present[S::kStages - 1] = copies.fetch(tile + S::kStages - 1);
    const uint32_t at = copies.ring + tile % S::kStages * 2 * S::kTileBytes;
    float scores[S::kKeys / 8][4];
    multiply_keys<Size, C>(scores, query.parts, at);
    scale_scores(scores, query.factors, call.cap);
    // The whole block takes the same branch. With at most eight heads, the other eight rows of the MMA need no
    // exponentials.
    if (heads <= 8) {
      weigh_tile<1>(softmax, scores, copies.present[0]);
    } else {
      weigh_tile<2>(softmax, scores, copies.present[0]);
    }
    sum_tile<Size, C>(softmax, scores, at + S::kTileBytes);
#pragma unroll
    for (int stage = 0; stage < S::kStages - 1; ++stage) copies.present[stage] = copies.present[stage + 1];
  }
  __syncwarp();  // hazard: lanes still read the stages that the merge and the next segment fill
}

// Attends to a segment and stores its result. All threads of the block call it, with a barrier between two calls.
template <int Size, typename C>
__device__ __forceinline__ void attend_alone(const Decode& call, const Segment& segment, unsigned char* shared) {
  Copies<Size, C> copies(call, shared);
  copies.begin(segment);
  copies.fetch_first();
  Query<Size> query;  // after the first copies, so that both latencies overlap
  load_query<Size, C>(query.parts, query.factors, call, segment);
  Softmax<Size> softmax;
  attend(softmax, call, copies, query, segment.count);
  leave_softmax<Size, C>(softmax, segment.count, shared);
  __syncthreads();
  merge_warps<Size, C>(call, segment, shared);
}

}  // namespace ejkernel
