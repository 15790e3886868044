// Stands in for csrc/grouped_sparse_attention/ptx.cuh: what its instructions do.
#pragma once

#include "token_sparse_attention/ptx.cuh"

namespace ejkernel::grouped_sparse_attention {

using token_sparse_attention::arrive_after_copies;
using token_sparse_attention::load_matrices;

template <uint32_t B, bool Add>
void multiply_keys(float (&d)[8][4], const uint32_t (&a)[4], uint32_t shared) {
  token_sparse_attention::issue(
      d, Add, token_sparse_attention::register_rows(a), token_sparse_attention::right_rows(shared + B));
}
template <uint32_t B>
void add_values(float (&d)[16][4], const uint32_t (&a)[4], uint32_t shared) {
  token_sparse_attention::issue(
      d, true, token_sparse_attention::register_rows(a), token_sparse_attention::right_chunks(shared + B));
}

}  // namespace ejkernel::grouped_sparse_attention
