// Latent attention of queries to the keys that they list, on Hopper: two consumer warpgroups that share 64 query heads of
// a query, and a producer warpgroup that gathers keys.
//
// A step has two blocks of 64 listed keys. Each warpgroup multiplies the queries with one of them and exponentiates its
// scores; both multiply both blocks of weights with their half of the values. A latent vector is key and value, and is
// copied once.
//
//   warpgroup 0     Q K0 | softmax 0 | P0 V0 left             | P1 V1 left           acc 64 x 256, left
//   warpgroup 1          | Q K1      | P0 V0 right, softmax 1 | P1 V1 right          acc 64 x 256, right
//                              P0 and its maximum       P1 and its maximum           through shared memory
//
// The running maximum passes from block 0 to block 1, and from there to block 0 of the next step, so both accumulators
// are relative to the same one. Weights reuse the memory of their block's rotary columns, which only the product with the
// queries reads.
//
// Shared memory, chunks of 64 rows and 64 columns with the 128-byte swizzle:
//
//   Q      9 chunks       K0  9 chunks: left 0..3, right 4..7, rotary 8       K1  the same
//
//   part 0: K0 left          read last by warpgroup 0 (P0 V0)
//   part 1: K0 right, rotary                warpgroup 1 (P0 V0)
//   part 2: K1 right                        warpgroup 1 (P1 V1)
//   part 3: K1 left, rotary                 warpgroup 0 (P1 V1)
#pragma once

#include "common/dependent_launch.cuh"
#include "token_sparse_attention/consumer.cuh"
#include "token_sparse_attention/producer.cuh"

namespace ejkernel::token_sparse_attention {

template <bool Split>
__global__ void __launch_bounds__(kThreads, 1) latent_kernel(const LatentCall call) {
#if __CUDA_ARCH__ == 900
  extern __shared__ __align__(1024) char memory[];
  LatentShared& shared = *reinterpret_cast<LatentShared*>(memory);
  if (threadIdx.x == 0) {
    start_barrier(shared_address(&shared.queries_full), kWarpgroup + 1);
    start_barrier(shared_address(&shared.queries_free), kConsumers / 32);
    for (int i = 0; i < 2; ++i) start_barrier(shared_address(&shared.weights_full[i]), kWarpgroup / 32);
    for (int i = 0; i < kParts; ++i) {
      start_barrier(shared_address(&shared.full[i]), kWarpgroup + (i % 2 ? 0 : kKeys / 32));
      start_barrier(shared_address(&shared.free[i]), kWarpgroup / 32);
    }
    publish_barriers();
  }
  __syncthreads();
  if constexpr (Split) wait_for_previous_launch();
  const int warpgroup = threadIdx.x / kWarpgroup;
  if (warpgroup == 2) {
    give_registers<40>();
    LatentProducer<Split>(call, shared).run();
  } else {
    take_registers<232>();
    if (warpgroup == 0) {
      LatentConsumer<0, Split>(call, shared).run();
    } else {
      LatentConsumer<1, Split>(call, shared).run();
    }
  }
#endif
}

}  // namespace ejkernel::token_sparse_attention
