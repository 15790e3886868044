// Stands in for csrc/common/cache_types.cuh: on the host there are codes alone.
#pragma once

#include "common/tensor_core.cuh"

namespace ejkernel {

template <typename C>
struct Cache {
  using Compute = C;
};

}  // namespace ejkernel
