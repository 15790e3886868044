// Stands in for csrc/delta_rule/ptx.cuh: what its instructions do.
#pragma once

#include <cuda.h>

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

// What each thread has seen of the cluster's barrier when it arrived.
inline std::map<device::Thread*, unsigned> cluster_generations;

inline void synchronise_loads(uint32_t) { __syncthreads(); }

inline void arrive_at_cluster() {
  cluster_generations[device::current] = device::cluster.generation;
  device::cluster.arrive();
}
inline void wait_for_cluster() {
  while (device::cluster.generation == cluster_generations[device::current]) device::yield();
}
inline uint32_t address_in_block(uint32_t address, int rank) { return (address & 0xFFFFFF) | rank << 24; }
inline void store_in_block(uint32_t to, float a, float b, float c, float d) {
  const float4 x{a, b, c, d};
  std::memcpy(device::blocks[to >> 24]->shared + (to & 0xFFFFFF), &x, 16);
}

// A tile of a tensor map: where its pieces of 16 bytes are, and which of them exist. The coordinate of a column, of a
// row and others.
template <int Rank>
struct TileOf {
  CUtensorMap map;
  int coordinates[Rank];

  TileOf(const void* m, const int (&c)[Rank]) : map(*static_cast<const CUtensorMap*>(m)) {
    std::memcpy(coordinates, c, sizeof(c));
    if (map.rank != Rank) device::complain("a tensor map of another rank");
  }
  int row_bytes() const { return map.columns * 2; }
  int offset(int row, int byte) const { return row * row_bytes() + (map.is_swizzled ? byte ^ row % 8 * 16 : byte); }
  bool is_inside(int row, int byte) const {
    for (int i = 0; i < Rank; ++i) {
      const int64_t at = coordinates[i] + (i == 0 ? byte / 2 : i == 1 ? row : 0);
      if (at < 0 || at >= int64_t(map.sizes[i])) return false;
    }
    return true;
  }
  // The address of a piece, modulo 2^64; relative to the tile, that of the map's first tile.
  char* address(int row, int byte, bool relative = false) const {
    uint64_t at = reinterpret_cast<uint64_t>(map.first) + byte + row * map.strides[0];
    if (!relative) at += coordinates[0] * 2;
    for (int i = 1; i < Rank && !relative; ++i) at += coordinates[i] * map.strides[i - 1];
    return reinterpret_cast<char*>(at);
  }
};

template <int Rank>
void copy_box(uint32_t to, const TileOf<Rank>& tile, uint32_t barrier) {
  if (to % (tile.map.is_swizzled ? 1024 : 128) || tile.map.strides[0] % 16) device::complain("a tile is not aligned");
  device::current->block->bulk_copies.push_back([=] {
    for (int i = 0; i < int(tile.map.rows) * tile.row_bytes(); i += 16) {
      const int r = i / tile.row_bytes(), at = i % tile.row_bytes();
      const bool inside = tile.is_inside(r, at);
      // What is not inside is read too, of the map's first tile, and then replaced by zeros.
      if (!inside) device::check_read(tile.address(r, at, true), 16);
      device::perform({address_of(to + tile.offset(r, at)), tile.address(r, at), inside ? 16 : 0, 16});
    }
    arrive_bytes(barrier, tile.map.rows * tile.row_bytes());
  });
}

inline void copy_tile(uint32_t to, const void* map, int column, int row, int batch, uint32_t barrier) {
  copy_box<3>(to, {map, {column, row, batch}}, barrier);
}
inline void copy_tile(uint32_t to, const void* map, int column, int row, int later_row, int batch, int last,
                      uint32_t barrier) {
  copy_box<5>(to, {map, {column, row, later_row, batch, last}}, barrier);
}

// Stores that this thread has still to wait for.
inline std::map<device::Thread*, std::vector<std::function<void()>>> stores;

template <int Rank>
void store_box(const TileOf<Rank>& tile, uint32_t from) {
  if (tile.map.is_swizzled && from % 1024) device::complain("a tile is not aligned");
  for (int coordinate : tile.coordinates) {
    if (coordinate < 0) device::complain("a negative coordinate of a store");
  }
  stores[device::current].push_back([=] {
    for (int r = 0; r < int(tile.map.rows); ++r) {
      for (int at = 0; at < tile.row_bytes(); at += 16) {
        if (!tile.is_inside(r, at)) continue;
        device::check_read(tile.address(r, at), 16);
        std::memcpy(tile.address(r, at), address_of(from + tile.offset(r, at)), 16);
      }
    }
  });
}

inline void store_tile(const void* map, int column, int row, int batch, uint32_t from) {
  store_box<3>({map, {column, row, batch}}, from);
}
inline void store_tile(const void* map, int column, int row, int later_row, int batch, uint32_t from) {
  store_box<4>({map, {column, row, later_row, batch}}, from);
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
