// Attention of 16 query heads a KV head to listed keys, on Hopper: groups of eight queries share what they read.
//
// Queries that read keys by themselves are limited by L2 and by shared memory: a key and a value, 512 bytes, take part in 16
// rows of products, a quarter of what the tensor cores would do while shared memory takes the bytes in and out
// (docs/lab/token_sparse_attention_gpu.md). Neighbouring queries list many of the same keys, so a first kernel makes a list
// of each group (lists.cuh), and a block reads each of its keys once:
//
//   producer       entries --> keys, values in a ring of 6 tiles of 64
//   warpgroup 0    rows: queries 0..3 x 16 heads    Q in registers | scores of tile n + 1, outputs of tile n | softmax n + 1
//   warpgroup 1    rows: queries 4..7 x 16 heads    the same, of the tiles that its queries list
//
// The rows of a warp are one query's, so 64 bits are the mask of a tile. A score that is masked has a weight of 0; the value
// of a key that only a neighbour lists may be infinite or NaN, which makes the product NaN. Groups with NaN among their
// outputs are therefore computed again by a third launch, query by query.
#pragma once

#include "grouped_sparse_attention/consumer.cuh"
#include "grouped_sparse_attention/lists.cuh"
#include "grouped_sparse_attention/producer.cuh"

namespace ejkernel::grouped_sparse_attention {

// Calls `group` with every item of the block, or, in the launch that computes groups again, `query` with the queries of those
// groups.
template <bool Again, typename Group, typename Query>
__device__ __forceinline__ void for_each_item(const Call& call, Group group, Query query) {
  for (int i = blockIdx.x; i < call.items; i += gridDim.x) {
    const Item item(call, i);
    if constexpr (!Again) {
      group(item, i);
    } else if (call.not_finite[i]) {
      const int end = min(call.tokens, (item.group + 1) * kQueries);
      for (int token = item.group * kQueries; token < end; ++token) query(item, token);
    }
  }
}

template <int Warpgroup, bool Again>
__device__ __forceinline__ void consume(const Call& call, Shared& shared) {
  Consumer<Warpgroup> consumer(call, shared);
  for_each_item<Again>(
      call, [&](const Item& item, int number) { consumer.run_group(item, number); },
      [&](const Item& item, int token) { consumer.run_query(item, token); });
}

template <bool Again>
__global__ void __launch_bounds__(kThreads, 1) attention_kernel(const Call call) {
#if __CUDA_ARCH__ == 900
  extern __shared__ __align__(1024) char memory[];
  if (Again && !*call.any_not_finite) return;
  Shared& shared = *reinterpret_cast<Shared*>(memory);
  if (threadIdx.x == 0) {
    start_barrier(shared_address(&shared.queries_full), kWarpgroup + 1);
    start_barrier(shared_address(&shared.queries_free), kConsumers / 32);
    for (int i = 0; i < kStages; ++i) {
      start_barrier(shared_address(&shared.keys_full[i]), kWarpgroup + kKeys / 32);
      start_barrier(shared_address(&shared.values_full[i]), kWarpgroup);
      start_barrier(shared_address(&shared.free[i]), kConsumers / 32);
    }
    publish_barriers();
  }
  __syncthreads();
  const int warpgroup = threadIdx.x / kWarpgroup;
  if (warpgroup == 2) {
    give_registers<72>();
    Producer producer(call, shared);
    for_each_item<Again>(
        call, [&](const Item& item, int) { producer.run_group(item); },
        [&](const Item& item, int token) { producer.run_query(item, token); });
  } else {
    take_registers<216>();
    warpgroup == 0 ? consume<0, Again>(call, shared) : consume<1, Again>(call, shared);
  }
#endif
}

}  // namespace ejkernel::grouped_sparse_attention
