// Stands in for csrc/common/code_ptx.cuh: what its instructions do.
#pragma once

#include "common/tensor_core.cuh"

namespace ejkernel {

template <int Words>
void load_words(uint32_t (&words)[Words], uint32_t from) {
  if (from % (Words % 3 ? Words * 4 : 4)) device::complain("a load is not aligned");
  std::memcpy(words, address_of(from), Words * 4);
}
template <int Words>
void load_entries(uint32_t (&words)[Words], uint32_t from) {
  load_words(words, from);
}
inline uint32_t load_word(uint32_t from) {
  uint32_t word[1];
  load_words(word, from);
  return word[0];
}
inline uint32_t load_half_word(uint32_t from) {
  uint16_t half;
  std::memcpy(&half, address_of(from), 2);
  return half;
}
inline float load_float(uint32_t from) { return __uint_as_float(load_word(from)); }
inline void store_word(uint32_t to, uint32_t word) { std::memcpy(address_of(to), &word, 4); }
inline uint32_t load_norm_pair(const uint32_t* from) {
  device::check_read(reinterpret_cast<const char*>(from), 4);
  return *from;
}
inline uint32_t load_norm(const uint16_t* from) {
  device::check_read(reinterpret_cast<const char*>(from), 2);
  return *from;
}

inline uint32_t transpose_matrix(uint32_t rows) {
  uint32_t columns = 0;
  exchange(&rows, 1, [&](const uint32_t(*values)[6]) {
    const int lane = device::current->index % 32;
    for (int i = 0; i < 2; ++i) {
      const int row = lane % 4 * 2 + i, column = lane / 4;
      columns |= (values[row * 4 + column / 2][0] >> column % 2 * 16 & 0xFFFF) << i * 16;
    }
  });
  return columns;
}

}  // namespace ejkernel
