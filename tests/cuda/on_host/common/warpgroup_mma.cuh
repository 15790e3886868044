// Stands in for csrc/common/warpgroup_mma.cuh. Products happen when a thread waits for them, and read shared memory then; bulk
// copies happen when a thread waits for a barrier.
#pragma once

#include "common/tensor_core.cuh"

namespace ejkernel {

inline void fence_products() {}
inline void commit_products() {
  device::current->product_groups.push_back(std::move(device::current->products));
  device::current->products.clear();
}

template <int Pending, int Tiles>
void wait_for_products(float (&)[Tiles][4]) {
  auto& groups = device::current->product_groups;
  while (groups.size() > size_t(Pending)) {
    for (const auto& product : groups.front()) product();
    groups.erase(groups.begin());
  }
}
template <int Pending>
void wait_for_products() {
  float none[1][4];
  wait_for_products<Pending>(none);
}
inline void fence_shared_stores() {}
template <int Count>
void take_registers() {}
template <int Count>
void give_registers() {}
template <int Threads>
void synchronise_first() {
  device::Barrier& barrier = device::current->block->first;
  barrier.size = Threads;
  barrier.wait();
}

// The number in column n and row k of the right operand: without a swizzle, or with that of 128 bytes.
inline float right_operand(uint64_t b, int n, int k) {
  const auto bytes = [b](int first) { return uint32_t(b >> first & 0x3FFF) * 16; };
  uint32_t at = bytes(0) + n / 8 * bytes(32) + k % 8 * 2;
  if (b >> 62) {
    at += n % 8 * 128 + k / 8 * 16;
    at ^= (at >> 7 & 7) << 4;
  } else {
    at += n % 8 * 16 + k / 8 * bytes(16);
  }
  return __bfloat162float(*reinterpret_cast<const __nv_bfloat16*>(address_of(at)));
}

template <int Tiles>
struct WarpgroupProduct {
  static void multiply(float (&d)[Tiles][4], const uint32_t (&a)[4], uint64_t b, int add) {
    if (b & 0x8000C000C000C000) device::complain("a descriptor has bits where none belong");
    exchange(a, 4, [&](const uint32_t(*values)[6]) {
      const int lane = device::current->index % 32;
      std::vector<float> left(32);  // rows lane / 4 and lane / 4 + 8
      for (int i = 0; i < 32; ++i) {
        const int k = i % 16;
        const uint32_t pair = values[lane / 4 * 4 + k % 8 / 2][i / 16 + k / 8 * 2];
        left[i] = __bfloat162float({uint16_t(pair >> (k % 2 * 16))});
      }
      device::current->products.push_back([=, &d] {
        for (int i = 0; i < Tiles * 4; ++i) {
          const int n = i / 4 * 8 + lane % 4 * 2 + i % 2;
          float sum = add ? d[i / 4][i % 4] : 0;
          for (int k = 0; k < 16; ++k) sum += left[i % 4 / 2 * 16 + k] * right_operand(b, n, k);
          d[i / 4][i % 4] = sum;
        }
      });
    });
  }
};

// An mbarrier: 8 bytes.
struct PhaseBarrier {
  uint8_t arrivals, pending, phase;
  int bytes;
  void check() {
    if (pending || bytes) return;
    pending = arrivals;
    phase ^= 1;
  }
};
inline PhaseBarrier& barrier_at(uint32_t barrier) { return *reinterpret_cast<PhaseBarrier*>(address_of(barrier)); }

inline void start_barrier(uint32_t barrier, int arrivals) {
  barrier_at(barrier) = {uint8_t(arrivals), uint8_t(arrivals), 0, 0};
}
inline void publish_barriers() {}
inline void arrive(uint32_t barrier) {
  --barrier_at(barrier).pending;
  barrier_at(barrier).check();
}
inline void arrive_and_expect(uint32_t barrier, uint32_t bytes) {
  barrier_at(barrier).bytes += bytes;
  arrive(barrier);
}
inline void arrive_bytes(uint32_t barrier, uint32_t bytes) {
  barrier_at(barrier).bytes -= bytes;
  barrier_at(barrier).check();
}
inline void wait_for_phase(uint32_t barrier, uint32_t phase) {
  while (barrier_at(barrier).phase == phase) {
    auto& copies = device::current->block->bulk_copies;
    if (!copies.empty()) {
      copies.front()();
      copies.pop_front();
    }
    device::yield();
  }
}

inline void copy_bulk(uint32_t to, const void* from, uint32_t bytes, uint32_t barrier) {
  device::current->block->bulk_copies.push_back([=] {
    device::perform({address_of(to), static_cast<const char*>(from), int(bytes), 16});
    arrive_bytes(barrier, bytes);
  });
}

// Stands in for a tensor map: a matrix, and its tiles, whose rows have 16 bytes, or 128 with their swizzle.
struct Matrix {
  const char* numbers;
  int rows, row_bytes, tile_rows, tile_bytes, number_bytes;
};
inline void copy_tile(uint32_t to, const void* map, int column, int row, uint32_t barrier) {
  const Matrix matrix = *static_cast<const Matrix*>(map);
  const bool wide = matrix.tile_bytes == 128;
  if (to % (wide ? 1024 : 128) || matrix.row_bytes % 16) device::complain("a tile is not aligned");
  const int first = column * matrix.number_bytes;
  device::current->block->bulk_copies.push_back([=] {
    for (int i = 0; i < matrix.tile_rows * matrix.tile_bytes; i += 16) {
      const int r = i / matrix.tile_bytes, at = i % matrix.tile_bytes;
      const bool inside = row + r < matrix.rows && first + at < matrix.row_bytes;
      const char* from = matrix.numbers + (inside ? int64_t(row + r) * matrix.row_bytes + first + at : 0);
      char* const own = address_of(to + r * matrix.tile_bytes + (wide ? at ^ r % 8 * 16 : at));
      device::perform({own, from, inside ? 16 : 0, 16});
    }
    arrive_bytes(barrier, matrix.tile_rows * matrix.tile_bytes);
  });
}
inline void prefetch_tile(const void*, int, int) {}
inline void prefetch_map(const void*) {}

}  // namespace ejkernel
