// Stands in for csrc/quantized_matmul/ptx.cuh.
#pragma once

#include "common/tensor_core.cuh"

namespace ejkernel::quantized_matmul {

template <uint32_t Mask, uint32_t Base>
uint32_t mask_or(uint32_t x) { return (x & Mask) | Base; }

inline void copy_word_async(uint32_t to, const void* from, int bytes) {
  device::current->open.push_back({address_of(to), static_cast<const char*>(from), bytes, 4});
}
inline void copy_four_async(uint32_t to, const void* from) {
  device::current->open.push_back({address_of(to), static_cast<const char*>(from), 8, 8});
}
inline void synchronise_stores_of_cluster() { device::cluster.wait(); }
inline void synchronise_cluster() { device::cluster.wait(); }

}  // namespace ejkernel::quantized_matmul
