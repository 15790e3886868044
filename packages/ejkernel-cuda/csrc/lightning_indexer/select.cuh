// Selects the K largest scores of each row and sorts them, on chips from Ampere on. A block has one row.
//
//   2048 scores of the row, or more of a long one, evenly spaced --a bit more than their share of K--> threshold
//   row of scores --one pass without barriers, those above the threshold--> candidates (shared memory)
//   candidates --4096 buckets of their range--> by bucket --rank within the bucket--> the K largest, sorted
//
// The threshold is only a guess: if fewer than K scores pass, or more than there is room for, the row is read again, tile
// by tile. Without room for another tile the K largest candidates are kept, whose lowest score is the next threshold; in a
// row that ascends, this happens every capacity - K scores.
#pragma once

#include "lightning_indexer/select_block.cuh"

namespace ejkernel::lightning_indexer {

// Buckets of scores as unsigned integers, the highest first. Positive ones are divided as they are, so that few very large
// ones leave the others apart; a range with both signs by the numbers, most of which have about the same exponents.
struct ScoreBuckets {
  uint32_t high;
  int shift;
  float half_top, scale;
  bool by_integer;

  static __device__ __forceinline__ float number(uint32_t score) {
    constexpr int kLargest = 0x7F7FFFFF;  // the largest number that is finite
    const int ordered = int(score ^ 0x80000000u);
    return float_of_ordered(ordered < -kLargest ? -kLargest : ordered > kLargest ? kLargest : ordered);
  }

  __device__ __forceinline__ ScoreBuckets(uint32_t lowest, uint32_t highest)
      : high(highest), half_top(0.5f * number(highest)), by_integer(lowest > 0x80000000u) {
    const int bits = 32 - __clz(int(highest - lowest | 1));
    shift = bits > kBucketBits ? bits - kBucketBits : 0;
    const float half_range = half_top - 0.5f * number(lowest);
    scale = half_range > 1e-30f ? quotient(kBuckets - 1, half_range) : 0;
  }

  __device__ __forceinline__ int of(uint32_t score) const {
    if (by_integer) return int((high - score) >> shift);
    const int bucket = int((half_top - 0.5f * number(score)) * scale);
    return bucket < kBuckets ? bucket : kBuckets - 1;
  }

  // About the highest score that is below those of a bucket.
  __device__ __forceinline__ uint32_t below(int bucket) const {
    if (by_integer) {
      const uint64_t distance = uint64_t(bucket + 1) << shift;
      return distance < high ? uint32_t(high - distance) : 0;
    }
    const float edge = 2 * (half_top - quotient(float(bucket + 1), scale));
    return uint32_t(ordered_integer(edge)) ^ 0x80000000u;
  }
};

constexpr int kSelectTile = 4 * kSelectThreads;                        // four scores per thread
constexpr int kStepTiles = 4, kSelectStep = kStepTiles * kSelectTile;  // scores that are read at a time
constexpr int kSampleBits = 11, kSample = 1 << kSampleBits;            // the least scores of a sample

// Candidates of a thread, for a selection of at most 2048 or 4096 keys.
constexpr int kFewSlots = 8, kManySlots = 16;

template <int Slots>
struct Selection : SelectBlock<Slots> {
  using Block = SelectBlock<Slots>;
  using Block::append, Block::call, Block::shared, Block::thread;

  __device__ __forceinline__ Selection(const SelectCall& c, SelectShared& s) : Block(c, s) {}

  // Four scores, those outside of the range replaced.
  __device__ __forceinline__ int4 load(const int* row, int index, int start, int end) const {
    int4 x = {kNoScore, kNoScore, kNoScore, kNoScore};
    if (index < end) {
      x = __ldg(reinterpret_cast<const int4*>(row + index));
      int* const each = &x.x;
#pragma unroll
      for (int i = 0; i < 4; ++i) each[i] = index + i >= start && index + i < end ? each[i] : kNoScore;
    }
    return x;
  }

  // All scores of a step. One that is inside of the range needs no comparisons.
  __device__ __forceinline__ void load_step(int4 (&x)[kStepTiles], const int* row, int first, int start, int end) const {
    if (first >= start && first + kSelectStep <= end) {
      const int4* const from = reinterpret_cast<const int4*>(row + first) + thread;
#pragma unroll
      for (int i = 0; i < kStepTiles; ++i) x[i] = __ldg(from + i * kSelectThreads);
    } else {
#pragma unroll
      for (int i = 0; i < kStepTiles; ++i) x[i] = load(row, first + 4 * thread + i * kSelectTile, start, end);
    }
  }

  // Returns a threshold that probably a few more than K scores of the row exceed; the row has at least 2048. Ends with
  // a barrier.
  __device__ __forceinline__ uint32_t guess_threshold(const int* row, int start, int end) {
    const int keys = end - start, bits = 31 - __clz(keys);
    const int shift = bits < 16 ? 0 : bits < 21 ? bits - 15 : 6;  // longer rows have samples of up to 2^17 scores
    const int samples = kSample << shift, rounds = samples / kSelectTile;
    // 32 bytes at a time, the least that memory is read by.
    const int first = start / 4 * 4;
    const uint64_t pairs = (end - first) / 8;
    const auto sample = [&](int round) {
      const unsigned vector = thread + round * kSelectThreads;
      const int pair = int(vector / 2 * pairs >> (kSampleBits - 3 + shift));
      return load(row, first + 8 * pair + 4 * (vector % 2), start, end);
    };
    int4 x;
    uint32_t highest = 0, low = ~0u;
    for (int round = 0; round < rounds; ++round) {
      x = sample(round);
      const int* const each = &x.x;
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const uint32_t score = uint32_t(each[i]) ^ 0x80000000u;
        highest = score > highest ? score : highest;
        low = score - 1 < low - 1 ? score : low;  // not of 0
      }
    }
    const float share = quotient(float(call.top_k) * float(samples), float(keys));
    const int needed = int(share + 4 * root(share)) + 2;
    // The lowest of the maxima of groups of scores is below the threshold, and not far: few are counted.
    const int group = int(quotient(1.4f * float(samples), float(needed)));
    if (group >= 4 * rounds) {
      low = highest;
      for (int lanes = 1; 8 * rounds * lanes <= group && lanes < 32; lanes *= 2) {
        const uint32_t other = __shfl_xor_sync(~0u, low, lanes);
        low = other > low ? other : low;
      }
    }
    const uint2 ends = this->range(low, highest);
    const ScoreBuckets buckets(ends.x, ends.y);
    for (int round = rounds - 1;;) {
      const int* const each = &x.x;
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const uint32_t score = uint32_t(each[i]) ^ 0x80000000u;
        if (score >= ends.x) this->count_in_bucket(buckets.of(score));
      }
      if (--round < 0) break;
      x = sample(round);
    }
    __syncthreads();
    return this->find_bucket(needed) ? buckets.below(shared.bucket) : ends.x - 1;
  }

  // Gathers the scores above a threshold while there is room; returns how many there are.
  __device__ __forceinline__ int gather(const int* row, int start, int end, uint32_t threshold) {
    const int above = int(threshold ^ 0x80000000u);
    for (int first = start / 4 * 4; first < end; first += kSelectStep) {
      int4 x[kStepTiles];
      load_step(x, row, first, start, end);
      int number = 0;
#pragma unroll
      for (int i = 0; i < kStepTiles; ++i) {
        count_if_above(number, x[i].x, above), count_if_above(number, x[i].y, above);
        count_if_above(number, x[i].z, above), count_if_above(number, x[i].w, above);
      }
      append(number, [&](uint64_t* to) {
        Slot slot = slot_of(to);
#pragma unroll
        for (int i = 0; i < kStepTiles; ++i) {
          const int index = first + 4 * thread + i * kSelectTile;
          store_if_above(slot, x[i].x, threshold, index), store_if_above(slot, x[i].y, threshold, index + 1);
          store_if_above(slot, x[i].z, threshold, index + 2), store_if_above(slot, x[i].w, threshold, index + 3);
        }
      });
    }
    __syncthreads();
    return shared.count;
  }

  // The same tile by tile, with at least K candidates if there are.
  __device__ __forceinline__ int gather_by_tiles(const int* row, int start, int end, uint32_t threshold) {
    __syncthreads();  // all have read the count
    if (thread == 0) shared.count = 0;
    __syncthreads();
    int most = 0;  // candidates that there are at most
    for (int first = start / 4 * 4; first < end; first += kSelectTile) {
      if (most + kSelectTile > call.capacity) {
        __syncthreads();
        most = shared.count;
        __syncthreads();  // all have read it
        if (most + kSelectTile > call.capacity) {
          threshold = this->keep_largest(most);
          most = call.top_k;
        }
      }
      const int index = first + 4 * thread, above = int(threshold ^ 0x80000000u);
      const int4 x = load(row, index, start, end);
      int number = 0;
      count_if_above(number, x.x, above), count_if_above(number, x.y, above);
      count_if_above(number, x.z, above), count_if_above(number, x.w, above);
      append(number, [&](uint64_t* to) {
        Slot slot = slot_of(to);
        store_if_above(slot, x.x, threshold, index), store_if_above(slot, x.y, threshold, index + 1);
        store_if_above(slot, x.z, threshold, index + 2), store_if_above(slot, x.w, threshold, index + 3);
      });
      most += kSelectTile;
    }
    __syncthreads();
    return shared.count;
  }

  // Sorts candidates by a network, the largest first. Begins after a barrier.
  __device__ __forceinline__ void sort_by_network(int count, int64_t to) {
    if (count > call.top_k) {
      this->clear_buckets();
      this->keep_largest(count);
      count = call.top_k;
    }
    int size = 2;
    while (size < count) size *= 2;
    for (int i = count + thread; i < size; i += kSelectThreads) shared.candidates[i] = 0;
    __syncthreads();
    for (int length = 2; length <= size; length *= 2) {
      for (int distance = length / 2; distance > 0; distance /= 2) {
        for (int i = thread; i < size / 2; i += kSelectThreads) {
          const int low = i / distance * 2 * distance + i % distance, high = low + distance;
          const uint64_t a = shared.candidates[low], b = shared.candidates[high];
          if ((a < b) == ((low & length) == 0)) {
            shared.candidates[low] = b;
            shared.candidates[high] = a;
          }
        }
        __syncthreads();
      }
    }
    for (int i = thread; i < count; i += kSelectThreads) store(shared.candidates[i], to + i);
  }

  __device__ __forceinline__ void store(uint64_t one, int64_t to) const {
    call.indices[to] = int(~uint32_t(one));
    call.scores[to] = float_of_ordered(int(score_of(one) ^ 0x80000000u));
  }

  // Stores the K largest candidates in order. Begins after a barrier, with buckets of zero.
  __device__ __forceinline__ void sort_and_store(int count, int64_t to) {
    const uint2 ends = this->range_of_candidates(count);
    const ScoreBuckets buckets(ends.x, ends.y);
    int within[Slots];  // places of this thread's candidates in their buckets
#pragma unroll
    for (int i = 0; i < Slots; ++i) {
      const int slot = thread + i * kSelectThreads;
      if (slot < count) {
        within[i] = add_one(&shared.buckets[bucket_entry(buckets.of(score_of(shared.candidates[slot])))]);
      }
    }
    __syncthreads();
    int own[kOwnBuckets], total;
    const int sum = this->take_counts(own);
    int first = this->exclusive_sum(sum, total);
    bool too_many = false;
#pragma unroll
    for (int i = 0; i < kOwnBuckets; ++i) {
      shared.buckets[thread * (kOwnBuckets + 1) + i] = first;
      too_many |= first < call.top_k && own[i] > kMostInBucket;
      first += own[i];
    }
    if (thread == 0) shared.buckets[kBucketEntries] = count;
    if (too_many) shared.too_many = true;
    __syncthreads();
    if (shared.too_many) {
      sort_by_network(count, to);
      return;
    }
    uint64_t one[Slots];
#pragma unroll
    for (int i = 0; i < Slots; ++i) {
      const int slot = thread + i * kSelectThreads;
      if (slot < count) {
        one[i] = shared.candidates[slot];
        within[i] += shared.buckets[bucket_entry(buckets.of(score_of(one[i])))];
      }
    }
    __syncthreads();  // all have read their candidates
#pragma unroll
    for (int i = 0; i < Slots; ++i) {
      if (thread + i * kSelectThreads < count) shared.candidates[within[i]] = one[i];
    }
    __syncthreads();
    for (int i = thread; i < count; i += kSelectThreads) {
      const uint64_t one = shared.candidates[i];
      const int bucket = buckets.of(score_of(one));
      int rank = shared.buckets[bucket_entry(bucket)];
      if (rank >= call.top_k) break;  // so are those of later buckets
      const int end = shared.buckets[bucket_entry(bucket + 1)];
      for (int j = rank; j < end; ++j) rank += shared.candidates[j] > one;
      if (rank < call.top_k) store(one, to + rank);
    }
  }

  __device__ __forceinline__ void run() {
    const int64_t row_index = blockIdx.x, to = row_index * call.top_k;
    const int start = __ldg(call.key_starts + row_index), end = __ldg(call.key_ends + row_index);
    const int keys = start < end ? end - start : 0;
    for (int i = keys + thread; i < call.top_k; i += kSelectThreads) {
      call.indices[to + i] = -1;
      call.scores[to + i] = __uint_as_float(0xFF800000);
    }
    if (keys == 0) return;
    const int* const row = call.ordered_scores + row_index * call.pitch;
    this->clear_buckets();
    if (thread == 0) {
      shared.count = 0;
      shared.too_many = false;
    }
    uint32_t threshold = 0;  // that of kNoScore
    if (keys > call.capacity) {
      threshold = guess_threshold(row, start, end);
    } else {
      __syncthreads();
    }
    int count = gather(row, start, end, threshold);
    const bool is_full = count > call.capacity;
    if (is_full || (count < call.top_k && count < keys)) {
      count = gather_by_tiles(row, start, end, is_full ? threshold : 0);
    }
    sort_and_store(count, to);
  }
};

template <int Slots>
__global__ void __launch_bounds__(kSelectThreads, Slots <= kFewSlots ? 3 : 2) select_kernel(const SelectCall call) {
  extern __shared__ __align__(1024) char memory[];
  Selection<Slots>(call, *reinterpret_cast<SelectShared*>(memory)).run();
}

}  // namespace ejkernel::lightning_indexer
