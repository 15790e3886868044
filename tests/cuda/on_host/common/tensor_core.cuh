// Stands in for csrc/common/tensor_core.cuh: what its instructions do.
#pragma once

#include "cuda_bf16.h"
#include "cuda_fp16.h"

namespace ejkernel {

// The upper bits are the block's rank in its cluster.
inline uint32_t shared_address(const void* pointer) {
  const device::Block& block = *device::current->block;
  return static_cast<const char*>(pointer) - block.shared + (block.rank << 24);
}
inline char* address_of(uint32_t shared) { return device::current->block->shared + (shared & 0xFFFFFF); }

inline void copy_async(uint32_t to, const void* from, int bytes) {
  device::current->open.push_back({address_of(to), static_cast<const char*>(from), bytes, 16});
}
inline void commit_copies() {
  device::current->groups.push_back(std::move(device::current->open));
  device::current->open.clear();
}
template <int Pending>
void wait_for_copies() {
  auto& groups = device::current->groups;
  while (groups.size() > size_t(Pending)) {
    for (const device::Copy& copy : groups.front()) device::perform(copy);
    groups.erase(groups.begin());
  }
}

// Shows the values of all lanes to each: `use` reads them.
template <typename Use>
void exchange(const uint32_t* values, int count, Use use) {
  device::Warp& warp = device::warp();
  std::memcpy(warp.values[device::current->index % 32], values, count * 4);
  warp.barrier.wait();
  use(warp.values);
  warp.barrier.wait();
}

// c += a b as m16n8k16 lays its operands over the lanes.
template <typename Value>
void multiply_tiles(float (&c)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1, Value value) {
  const uint32_t own[6] = {a[0], a[1], a[2], a[3], b0, b1};
  exchange(own, 6, [&](const uint32_t(*values)[6]) {
    const int lane = device::current->index % 32;
    for (int i = 0; i < 4; ++i) {
      const int row = lane / 4 + i / 2 * 8, column = lane % 4 * 2 + i % 2;
      for (int k = 0; k < 16; ++k) {
        const uint32_t left = values[row % 8 * 4 + k % 8 / 2][row / 8 + k / 8 * 2];
        const uint32_t right = values[column * 4 + k % 8 / 2][4 + k / 8];
        c[i] += value(left >> (k % 2 * 16)) * value(right >> (k % 2 * 16));
      }
    }
  });
}

template <typename T>
struct Half;

template <>
struct Half<__nv_bfloat16> {
  static void multiply(float (&c)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {
    multiply_tiles(c, a, b0, b1, [](uint32_t x) { return __bfloat162float({uint16_t(x)}); });
  }
  static uint32_t pack(float low, float high) {
    return __float2bfloat16_rn(low).bits | uint32_t(__float2bfloat16_rn(high).bits) << 16;
  }
  static __nv_bfloat16 round(float x) { return __float2bfloat16_rn(x); }
};

inline float exp2_fast(float x) { return exp2f(x); }

}  // namespace ejkernel
