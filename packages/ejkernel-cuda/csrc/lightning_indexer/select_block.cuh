// What a block of the selection has in shared memory, and the K largest candidates of more.
//
// A candidate is a score as an unsigned integer, and the complement of its key's index: no two are equal, and their order
// is that of the selection. Which candidates are kept or come first does not depend on the order of atomics.
//
// The K-th largest is found by counting candidates in 4096 buckets of their range. If the bucket that has it has few, they
// are ranked; otherwise they are counted in buckets of its range, and so on: six counts at most, as each divides a range
// of 2^64 by 2^12. Leading bits would not do: most scores have the same ones.
#pragma once

#include <cstdint>

#include "lightning_indexer/call.cuh"
#include "lightning_indexer/select_ptx.cuh"

namespace ejkernel::lightning_indexer {

constexpr int kSelectThreads = 512, kSelectWarps = kSelectThreads / 32;
constexpr int kBucketBits = 12, kBuckets = 1 << kBucketBits, kOwnBuckets = kBuckets / kSelectThreads;
constexpr int kMostInBucket = 64;  // more candidates of a bucket are sorted by a network

// Where the count of a bucket is. One more entry follows the buckets of each thread, so that threads read theirs from
// different banks.
__device__ __forceinline__ int bucket_entry(unsigned bucket) { return bucket + bucket / kOwnBuckets; }
constexpr int kBucketEntries = kBuckets + kSelectThreads;

struct SelectShared {
  alignas(16) int buckets[kBucketEntries + 4];  // zero between uses; the entry after all is the end of the last bucket
  int warp_sums[2][kSelectWarps];
  unsigned warp_lowest[kSelectWarps], warp_highest[kSelectWarps];
  int bucket, above, in_bucket;  // the bucket that has the K-th largest; candidates above it, and in it
  int count;                     // candidates
  int num_listed;                // those of the bucket, if there are few
  bool too_many;                 // whether a bucket has too many to be ranked
  uint64_t listed[kMostInBucket];
  uint64_t bound;  // the K-th largest
  alignas(16) uint64_t candidates[1];
};

__device__ __forceinline__ uint32_t score_of(uint64_t candidate) { return uint32_t(candidate >> 32); }

// `Slots` candidates per thread.
template <int Slots>
struct SelectBlock {
  const SelectCall& call;
  SelectShared& shared;
  const int thread, warp, lane;
  int parity = 0;

  __device__ __forceinline__ SelectBlock(const SelectCall& c, SelectShared& s)
      : call(c), shared(s), thread(threadIdx.x), warp(thread / 32), lane(thread % 32) {}

  // The sum of the values of earlier threads; `total` is that of all. One barrier, with what was stored before it.
  __device__ __forceinline__ int exclusive_sum(int value, int& total) {
    const int sum = inclusive_sum_of_warp(value);
    if (lane == 31) shared.warp_sums[parity][warp] = sum;
    __syncthreads();
    const int other = lane < kSelectWarps ? shared.warp_sums[parity][lane] : 0;
    const int before = sum_of_warp(lane < warp ? other : 0);
    total = sum_of_warp(other);
    parity ^= 1;  // read now, and stored again only after the next barrier
    return before + sum - value;
  }

  // The lowest and the highest score of all threads. One barrier, with what was stored before it.
  __device__ __forceinline__ uint2 range(uint32_t lowest, uint32_t highest) {
    lowest = lowest_of_warp(lowest);
    highest = ~lowest_of_warp(~highest);
    if (lane == 0) {
      shared.warp_lowest[warp] = lowest;
      shared.warp_highest[warp] = highest;
    }
    __syncthreads();
    lowest = lowest_of_warp(shared.warp_lowest[lane % kSelectWarps]);
    highest = ~lowest_of_warp(~shared.warp_highest[lane % kSelectWarps]);
    return {lowest, highest};
  }

  // The lowest and the highest score of the candidates. One barrier.
  __device__ __forceinline__ uint2 range_of_candidates(int count) {
    uint32_t lowest = ~0u, highest = 0;
    for (int i = thread; i < count; i += kSelectThreads) {
      const uint32_t score = score_of(shared.candidates[i]);
      lowest = score < lowest ? score : lowest;
      highest = score > highest ? score : highest;
    }
    return range(lowest, highest);
  }

  // Bits to drop from a distance so that it is a bucket's number.
  static __device__ __forceinline__ int shift_of(uint64_t distance) {
    const int bits = 64 - leading_zeros(distance);
    return bits > kBucketBits ? bits - kBucketBits : 0;
  }

  __device__ __forceinline__ void count_in_bucket(int bucket) { add_one(&shared.buckets[bucket_entry(bucket)]); }

  __device__ __forceinline__ void clear_buckets() {
    int4* const four = reinterpret_cast<int4*>(shared.buckets);
    for (int i = thread; i < kBucketEntries / 4; i += kSelectThreads) four[i] = {0, 0, 0, 0};
  }

  // The counts of this thread's buckets, which are zero then; returns their sum. Begins after a barrier.
  __device__ __forceinline__ int take_counts(int (&own)[kOwnBuckets]) {
    int* const from = shared.buckets + thread * (kOwnBuckets + 1);
    int sum = 0;
#pragma unroll
    for (int i = 0; i < kOwnBuckets; ++i) {
      sum += own[i] = from[i];
      from[i] = 0;
    }
    return sum;
  }

  // Finds the bucket that has the `needed`-th of all from the first bucket on; false if there are fewer.
  __device__ __forceinline__ bool find_bucket(int needed) {
    int own[kOwnBuckets], total;
    const int sum = take_counts(own);
    int above = exclusive_sum(sum, total);
    if (above < needed && needed <= above + sum) {
#pragma unroll
      for (int i = 0; i < kOwnBuckets; ++i) {
        if (above < needed && needed <= above + own[i]) {
          shared.bucket = thread * kOwnBuckets + i;
          shared.above = above;
          shared.in_bucket = own[i];
        }
        above += own[i];
      }
    }
    __syncthreads();
    return total >= needed;
  }

  // The K-th largest candidate, from the bucket that has the `needed`-th largest of its own, whose range is from `high`
  // down. The next range is that of the bucket.
  __device__ __forceinline__ uint64_t find_bound(int count, int needed, uint64_t high, int shift) {
    uint64_t rest = (uint64_t(1) << shift) - 1;
    while (shared.in_bucket != needed) {
      const int next = shift_of(rest);
      for (int i = thread; i < count; i += kSelectThreads) {
        const uint64_t own = shared.candidates[i];
        if (own <= high && high - own <= rest) count_in_bucket(int((high - own) >> next));
      }
      __syncthreads();
      find_bucket(needed);
      needed -= shared.above;
      high -= uint64_t(shared.bucket) << next;
      rest = (uint64_t(1) << next) - 1;
    }
    return high > rest ? high - rest : 0;
  }

  // The same if the bucket has few candidates.
  __device__ __forceinline__ uint64_t rank_listed(int count, int needed, uint64_t high, int shift) {
    for (int i = thread; i < count; i += kSelectThreads) {
      const uint64_t own = shared.candidates[i];
      if (own <= high && (high - own) >> shift == 0) shared.listed[add_one(&shared.num_listed)] = own;
    }
    __syncthreads();
    if (thread < shared.in_bucket) {
      const uint64_t one = shared.listed[thread];
      int rank = 1;
      for (int i = 0; i < shared.in_bucket; ++i) rank += shared.listed[i] > one;
      if (rank == needed) shared.bound = one;
    }
    __syncthreads();
    return shared.bound;
  }

  // Stores the candidates that pass, in any order: `number` of this thread, which `store(slot)` stores. Without room for
  // those of a warp, only their count is added. All lanes of a warp take part.
  template <typename Store>
  __device__ __forceinline__ void append(int number, Store store) {
    const int sum = inclusive_sum_of_warp(number);
    int first = -1;
    if (lane == 31) {
      first = add(&shared.count, sum);
      if (first > call.capacity - sum) first = -1;
    }
    first = __shfl_sync(~0u, first, 31);
    if (first >= 0) store(shared.candidates + (first + sum - number));
  }

  // Keeps the K largest of more candidates, in any order; returns a score that none of these is below. Begins after a
  // barrier, and ends with one.
  __device__ __forceinline__ uint32_t keep_largest(int count) {
    const uint2 scores = range_of_candidates(count);
    const int shift = shift_of(scores.y - scores.x);
    if (thread == 0) shared.count = shared.num_listed = 0;
    for (int i = thread; i < count; i += kSelectThreads) {
      count_in_bucket(int((scores.y - score_of(shared.candidates[i])) >> shift));
    }
    __syncthreads();
    find_bucket(call.top_k);
    const int needed = call.top_k - shared.above;
    // The highest candidate that the bucket could have.
    const uint64_t high = (uint64_t(scores.y) - (uint64_t(shared.bucket) << shift)) << 32 | ~0u;
    const bool is_few = shared.in_bucket <= kMostInBucket;
    const uint64_t bound =
        is_few ? rank_listed(count, needed, high, 32 + shift) : find_bound(count, needed, high, 32 + shift);
    uint64_t own[Slots];
    int number = 0;
#pragma unroll
    for (int i = 0; i < Slots; ++i) {
      const int slot = thread + i * kSelectThreads;
      own[i] = slot < count ? shared.candidates[slot] : 0;  // 0 is no candidate
      number += own[i] && own[i] >= bound;
    }
    __syncthreads();  // all have read the candidates
    append(number, [&](uint64_t* to) {
#pragma unroll
      for (int i = 0; i < Slots; ++i) {
        if (own[i] && own[i] >= bound) *to++ = own[i];
      }
    });
    __syncthreads();
    return score_of(bound);
  }
};

}  // namespace ejkernel::lightning_indexer
