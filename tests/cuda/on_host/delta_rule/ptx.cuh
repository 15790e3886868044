// Stands in for csrc/delta_rule/ptx.cuh: what its instructions do.
#pragma once

#include <map>

#include "common/tensor_core.cuh"
#include "common/warpgroup_mma.cuh"

namespace ejkernel::delta_rule {

inline uint64_t swizzled_operand(uint32_t address, uint32_t next_columns = 16) {
  return uint64_t((address & 0x3FFFF) >> 4) | uint64_t(next_columns >> 4) << 16 | uint64_t(1024 >> 4) << 32 |
         uint64_t(1) << 62;
}

inline void multiply_shared(float (&d)[8][4], uint64_t a, uint64_t b, int add) {
  device::warp().barrier.wait();
  const int lane = device::current->index % 32, warp = device::current->index / 32 % 4;
  device::current->products.push_back([=, &d] {
    for (int i = 0; i < 32; ++i) {
      const int m = warp * 16 + lane / 4 + i % 4 / 2 * 8, n = i / 4 * 8 + lane % 4 * 2 + i % 2;
      float sum = add ? d[i / 4][i % 4] : 0;
      for (int k = 0; k < 16; ++k) sum += right_operand(a, m, k) * right_operand(b, n, k);
      d[i / 4][i % 4] = sum;
    }
  });
}

// The number in row k and column n of a right operand whose rows are contracted.
inline float row_operand(uint64_t b, int n, int k) {
  const auto bytes = [b](int first) { return uint32_t(b >> first & 0x3FFF) * 16; };
  uint32_t at = bytes(0) + n / 64 * bytes(16) + k / 8 * bytes(32) + k % 8 * 128 + n % 64 * 2;
  at ^= (at >> 7 & 7) << 4;
  return __bfloat162float(*reinterpret_cast<const __nv_bfloat16*>(address_of(at)));
}

// d = a b or d += a b: a in registers, the rows of b are contracted.
template <int Tiles>
void multiply_rows(float (&d)[Tiles][4], const uint32_t (&a)[4], uint64_t b, int add = 1) {
  exchange(a, 4, [&](const uint32_t(*values)[6]) {
    const int lane = device::current->index % 32;
    std::vector<float> left(32);
    for (int i = 0; i < 32; ++i) {
      const int k = i % 16;
      const uint32_t pair = values[lane / 4 * 4 + k % 8 / 2][i / 16 + k / 8 * 2];
      left[i] = __bfloat162float({uint16_t(pair >> (k % 2 * 16))});
    }
    device::current->products.push_back([=, &d] {
      for (int i = 0; i < Tiles * 4; ++i) {
        const int n = i / 4 * 8 + lane % 4 * 2 + i % 2;
        float sum = add ? d[i / 4][i % 4] : 0;
        for (int k = 0; k < 16; ++k) sum += left[i % 4 / 2 * 16 + k] * row_operand(b, n, k);
        d[i / 4][i % 4] = sum;
      }
    });
  });
}

template <int Tiles>
void multiply_shared_rows(float (&d)[Tiles][4], uint64_t a, uint64_t b, int add) {
  device::warp().barrier.wait();
  const int lane = device::current->index % 32, warp = device::current->index / 32 % 4;
  device::current->products.push_back([=, &d] {
    for (int i = 0; i < Tiles * 4; ++i) {
      const int m = warp * 16 + lane / 4 + i % 4 / 2 * 8, n = i / 4 * 8 + lane % 4 * 2 + i % 2;
      float sum = add ? d[i / 4][i % 4] : 0;
      for (int k = 0; k < 16; ++k) sum += right_operand(a, m, k) * row_operand(b, n, k);
      d[i / 4][i % 4] = sum;
    }
  });
}

// Lane l gets the numbers in row l / 4 and columns l % 4 * 2 of a matrix of which `row` says where its rows are.
inline uint32_t transpose(uint32_t pair) {
  uint32_t result = 0;
  exchange(&pair, 1, [&](const uint32_t(*values)[6]) {
    const int lane = device::current->index % 32, row = lane / 4, column = lane % 4 * 2;
    for (int i = 0; i < 2; ++i) {
      result |= (values[(column + i) * 4 + row / 2][0] >> (row % 2 * 16) & 0xffffu) << (16 * i);
    }
  });
  return result;
}

inline void load_matrices(uint32_t (&matrices)[4], uint32_t row) {
  exchange(&row, 1, [&](const uint32_t(*values)[6]) {
    const int lane = device::current->index % 32;
    for (int m = 0; m < 4; ++m) std::memcpy(&matrices[m], address_of(values[m * 8 + lane / 4][0]) + lane % 4 * 4, 4);
  });
}

inline void load_matrices_transposed(uint32_t (&matrices)[4], uint32_t row) {
  exchange(&row, 1, [&](const uint32_t(*values)[6]) {
    const int lane = device::current->index % 32;
    for (int m = 0; m < 4; ++m) {
      uint16_t pair[2];
      for (int i = 0; i < 2; ++i) {
        const uint32_t at = values[m * 8 + lane % 4 * 2 + i][0];
        if (at % 16) device::complain("a row of a matrix is not aligned");
        std::memcpy(&pair[i], address_of(at) + lane / 4 * 2, 2);
      }
      matrices[m] = pair[0] | uint32_t(pair[1]) << 16;
    }
  });
}

inline void store_matrices(uint32_t row, uint32_t a, uint32_t b, uint32_t c, uint32_t d) {
  exchange(&row, 1, [&](const uint32_t(*values)[6]) {
    const int lane = device::current->index % 32;
    const uint32_t own[4] = {a, b, c, d};
    for (int m = 0; m < 4; ++m) std::memcpy(address_of(values[m * 8 + lane / 4][0]) + lane % 4 * 4, &own[m], 4);
  });
}

inline void store_matrices_transposed(uint32_t row, uint32_t a, uint32_t b, uint32_t c, uint32_t d) {
  store_matrices(row, transpose(a), transpose(b), transpose(c), transpose(d));
}

template <int Threads>
void synchronise(int id) {
  device::Barrier& barrier = device::current->block->named[id];
  barrier.size = Threads;
  barrier.wait();
}

// Stands in for a tensor map: [batch, rows, columns] in bfloat16, and tiles, whose rows are swizzled if they have 128
// bytes.
struct Array {
  char* numbers;
  int batch, rows, row_bytes, tile_bytes, tile_rows;

  int offset(int row, int byte) const { return row * tile_bytes + (tile_bytes == 128 ? byte ^ row % 8 * 16 : byte); }
};

inline void copy_tile(uint32_t to, const void* map, int column, int row, int batch, uint32_t barrier) {
  const Array array = *static_cast<const Array*>(map);
  if (to % 1024 || array.row_bytes % 16) device::complain("a tile is not aligned");
  device::current->block->bulk_copies.push_back([=] {
    for (int i = 0; i < array.tile_rows * array.tile_bytes; i += 16) {
      const int r = i / array.tile_bytes, at = i % array.tile_bytes;
      const bool inside = row + r < array.rows && column * 2 + at < array.row_bytes && batch < array.batch;
      const int64_t from = inside ? (int64_t(batch) * array.rows + row + r) * array.row_bytes + column * 2 + at : 0;
      device::perform({address_of(to + array.offset(r, at)), array.numbers + from, inside ? 16 : 0, 16});
    }
    arrive_bytes(barrier, array.tile_rows * array.tile_bytes);
  });
}

// Of an array whose rows are the sum of two coordinates, less 64, and of which the first one ends at 64.
inline void copy_tile(uint32_t to, const void* map, int column, int first, int later_row, int batch, uint32_t barrier) {
  const Array array = *static_cast<const Array*>(map);
  if (to % 1024 || array.row_bytes % 16) device::complain("a tile is not aligned");
  device::current->block->bulk_copies.push_back([=] {
    for (int i = 0; i < array.tile_rows * array.tile_bytes; i += 16) {
      const int r = i / array.tile_bytes, at = i % array.tile_bytes, row = first + later_row - 64 + r;
      const bool inside = first + r < 64 && column * 2 + at < array.row_bytes && batch < array.batch;
      if (inside && (row < 0 || row >= array.rows)) device::complain("a row outside of its array");
      const int64_t from = inside ? (int64_t(batch) * array.rows + row) * array.row_bytes + column * 2 + at : 0;
      device::perform({address_of(to + array.offset(r, at)), array.numbers + from, inside ? 16 : 0, 16});
    }
    arrive_bytes(barrier, array.tile_rows * array.tile_bytes);
  });
}

// Stores that this thread has still to wait for.
inline std::map<device::Thread*, std::vector<std::function<void()>>> stores;

inline void store_tile(const void* map, int column, int row, int batch, uint32_t from) {
  const Array array = *static_cast<const Array*>(map);
  if (array.tile_bytes == 128 && from % 1024) device::complain("a tile is not aligned");
  stores[device::current].push_back([=] {
    for (int r = 0; r < array.tile_rows; ++r) {
      if (row + r >= array.rows) continue;
      char* const to = array.numbers + (int64_t(batch) * array.rows + row + r) * array.row_bytes + column * 2;
      for (int at = 0; at < array.tile_bytes; at += 16) {
        std::memcpy(to + at, address_of(from + array.offset(r, at)), 16);
      }
    }
  });
}
inline void store_tile(const void* map, int column, int first, int later_row, int batch, uint32_t from) {
  const Array array = *static_cast<const Array*>(map);
  if (array.tile_bytes == 128 && from % 1024) device::complain("a tile is not aligned");
  stores[device::current].push_back([=] {
    for (int r = 0; r < array.tile_rows && first + r < 64; ++r) {
      const int row = first + later_row - 64 + r;
      if (row < 0 || row >= array.rows) device::complain("a row outside of its array");
      char* const to = array.numbers + (int64_t(batch) * array.rows + row) * array.row_bytes + column * 2;
      for (int at = 0; at < array.tile_bytes; at += 16) {
        std::memcpy(to + at, address_of(from + array.offset(r, at)), 16);
      }
    }
  });
}
inline void wait_for_stores() {
  for (const auto& store : stores[device::current]) store();
  stores[device::current].clear();
}
inline void wait_for_store_reads() { wait_for_stores(); }

template <int Pending>
void wait_for_state(float (&d)[16][4]) {
  wait_for_products<Pending, 16>(d);
}

}  // namespace ejkernel::delta_rule
