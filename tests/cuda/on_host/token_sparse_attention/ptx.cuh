// Stands in for csrc/token_sparse_attention/ptx.cuh: what its instructions do.
#pragma once

#include "common/tensor_core.cuh"
#include "common/warpgroup_mma.cuh"

namespace ejkernel::token_sparse_attention {

// The number at a row and a column of rows of 64 columns with the 128-byte swizzle, from an offset in units of 16 bytes.
inline float number_at(uint32_t units, int row, int column) {
  uint32_t at = units * 16 + row * 128 + column * 2;
  at ^= (at >> 7 & 7) << 4;
  return __bfloat162float(*reinterpret_cast<const __nv_bfloat16*>(address_of(at)));
}

// d += a b where `left` and `right` give the operands' numbers, and those of the left one are known now or when the
// product happens.
template <int Tiles, typename Left, typename Right>
void issue(float (&d)[Tiles][4], bool add, Left left, Right right) {
  const int lane = device::current->index % 32;
  device::current->products.push_back([=, &d] {
    for (int i = 0; i < Tiles * 4; ++i) {
      const int m = lane / 4 + i % 4 / 2 * 8, n = i / 4 * 8 + lane % 4 * 2 + i % 2;
      float sum = add ? d[i / 4][i % 4] : 0;
      for (int k = 0; k < 16; ++k) sum += left(m, k) * right(n, k);
      d[i / 4][i % 4] = sum;
    }
  });
}

// The rows of a warp as a left operand in shared memory.
inline auto shared_rows(uint32_t units) {
  const int first = device::current->index / 32 % 4 * 16;
  return [=](int m, int k) { return number_at(units, first + m, k); };
}

// The rows that a thread has sums of, as a left operand in the registers of a warp.
inline auto register_rows(const uint32_t (&a)[4]) {
  std::vector<float> rows(32);
  exchange(a, 4, [&](const uint32_t(*values)[6]) {
    const int lane = device::current->index % 32;
    for (int i = 0; i < 32; ++i) {
      const int k = i % 16;
      const uint32_t pair = values[lane / 4 * 4 + k % 8 / 2][i / 16 + k / 8 * 2];
      rows[i] = __bfloat162float({uint16_t(pair >> (k % 2 * 16))});
    }
  });
  return [=](int m, int k) { return rows[m / 8 * 16 + k]; };
}

inline auto right_rows(uint32_t units) {
  return [=](int n, int k) { return number_at(units, n, k); };
}
inline auto right_chunks(uint32_t units) {
  return [=](int n, int k) { return number_at(units + n / 64 * (8192 / 16), k, n % 64); };
}

template <uint32_t A, uint32_t B, bool Add>
void multiply_rows(float (&d)[8][4], uint32_t shared) {
  device::warp().barrier.wait();
  issue(d, Add, shared_rows(shared + A), right_rows(shared + B));
}
template <uint32_t B>
void add_product_of_rows(float (&d)[8][4], const uint32_t (&a)[4], uint32_t shared) {
  issue(d, true, register_rows(a), right_rows(shared + B));
}
template <uint32_t A, uint32_t B>
void add_product(float (&d)[32][4], uint32_t shared) {
  device::warp().barrier.wait();
  issue(d, true, shared_rows(shared + A), right_chunks(shared + B));
}
template <uint32_t B>
void add_product(float (&d)[32][4], const uint32_t (&a)[4], uint32_t shared) {
  issue(d, true, register_rows(a), right_chunks(shared + B));
}

// The copies happen, and then the arrival, when a thread waits.
inline void arrive_after_copies(uint32_t barrier) {
  device::current->block->bulk_copies.push_back([=, copies = std::move(device::current->open)] {
    for (const device::Copy& copy : copies) device::perform(copy);
    arrive(barrier);
  });
  device::current->open.clear();
}

inline void load_matrices(uint32_t (&matrices)[4], uint32_t row) {
  exchange(&row, 1, [&](const uint32_t(*values)[6]) {
    const int lane = device::current->index % 32;
    for (int m = 0; m < 4; ++m) std::memcpy(&matrices[m], address_of(values[m * 8 + lane / 4][0]) + lane % 4 * 4, 4);
  });
}
inline void store_matrices(uint32_t row, const uint32_t (&matrices)[4]) {
  exchange(&row, 1, [&](const uint32_t(*values)[6]) {
    const int lane = device::current->index % 32;
    for (int m = 0; m < 4; ++m) std::memcpy(address_of(values[m * 8 + lane / 4][0]) + lane % 4 * 4, &matrices[m], 4);
  });
}

template <int Id, int Threads>
void synchronise_at() {
  device::Barrier& barrier = device::current->block->named[Id];
  barrier.size = Threads;
  barrier.wait();
}
template <int Id, int Threads>
void arrive_at() {
  device::Barrier& barrier = device::current->block->named[Id];
  barrier.size = Threads;
  barrier.arrive();
}

inline void synchronise_cluster() { device::cluster.wait(); }
template <typename T>
T of_block(const float* from, int rank) {
  const char* const own = reinterpret_cast<const char*>(from);
  return *reinterpret_cast<const T*>(own - device::current->block->shared + device::blocks[rank]->shared);
}
inline float load_of_block(const float* from, int rank) { return of_block<float>(from, rank); }
inline float4 load_four_of_block(const float* from, int rank) { return of_block<float4>(from, rank); }

inline float exp2_approximate(float x) { return exp2f(x); }

}  // namespace ejkernel::token_sparse_attention
