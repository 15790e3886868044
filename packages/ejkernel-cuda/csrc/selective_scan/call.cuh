// The operands that both passes of the selective scan have, and the sizes that follow from their shapes.
#pragma once

#include "common/ffi_handler.cuh"
#include "selective_scan/selective_scan.cuh"

namespace ejkernel::selective_scan {

constexpr char kMissingAxis[] = "an axis is missing";
constexpr char kUnsupported[] = "x is not of bfloat16, float16 or float32";

struct ScanOperands {
  ffi::AnyBuffer x, step;
  ffi::Buffer<ffi::F32> decay, columns, skip;
  ffi::Buffer<ffi::S32> bounds, first_intervals;  // empty unless sequences are packed

  bool has_axes() const {
    return x.dimensions().size() >= 3 && decay.dimensions().size() >= 2 && columns.dimensions().size() >= 4;
  }
};

// Sizes of a call. Extra leading axes, which jax.vmap adds to all arrays alike, count as more rows, and more A and D.
struct ScanSizes {
  int64_t packs;      // rows of tokens
  int64_t row;        // elements of x per row of tokens
  int64_t rows;       // rows of states: packed sequences, or rows of tokens
  int64_t elements;   // of a state
  int64_t maps;       // A and D
  int64_t padded;     // state dimension of B and C
  int64_t intervals;  // stored states of all rows
};

// The packing of a call; empty arrays mean that sequences are not packed.
inline Packing packing_of(const ScanOperands& a) {
  Packing packing{};
  if (a.bounds.element_count() == 0) return packing;
  packing.bounds = a.bounds.typed_data();
  packing.intervals = a.first_intervals.typed_data();
  packing.sequences = int(last_dimension(a.bounds)) - 1;
  return packing;
}

// Stored states of all rows; with packing `max_num_intervals` of ejkernel.families.selective_scan.packed_scan per row.
inline int64_t stored_intervals(const Packing& packing, int64_t rows, int64_t tokens) {
  if (packing.bounds == nullptr) return rows * ((tokens + kInterval - 1) / kInterval);
  return rows * (tokens / kInterval + packing.sequences);
}

// Fills the fields that the records of both passes have.
template <typename Call>
ScanSizes set_operands(Call& call, const ScanOperands& a) {
  call.x = a.x.untyped_data();
  call.step = a.step.untyped_data();
  call.decay = a.decay.typed_data();
  call.columns = a.columns.typed_data();
  call.skip = a.skip.typed_data();
  call.packing = packing_of(a);
  call.channels = last_dimension(a.x);
  call.tokens = last_dimension(a.x, 1);
  call.size = last_dimension(a.decay);
  ScanSizes sizes{};
  sizes.row = int64_t(call.tokens) * call.channels;
  sizes.packs = a.x.element_count() / sizes.row;
  sizes.elements = int64_t(call.channels) * call.size;
  sizes.maps = a.decay.element_count() / sizes.elements;
  sizes.padded = last_dimension(a.columns);
  sizes.rows = call.packing.bounds == nullptr ? sizes.packs : sizes.packs * call.packing.sequences;
  sizes.intervals = stored_intervals(call.packing, sizes.packs, call.tokens);
  call.rows = sizes.rows;
  call.rows_a_map = sizes.rows / sizes.maps;
  return sizes;
}

// Whether the operands' sizes belong to one call: the kernels rely on the shapes and check nothing.
template <typename Call>
bool consistent(const Call& call, const ScanOperands& a, const ScanSizes& sizes) {
  const int64_t bounds = sizes.packs * (call.packing.sequences + 1);
  const bool packed = call.packing.bounds == nullptr || (call.packing.sequences > 0 && count(a.bounds) == bounds &&
                                                         count(a.first_intervals) == bounds);
  return packed && sizes.packs % sizes.maps == 0 && call.size <= sizes.padded &&
         count(a.step) == sizes.packs * sizes.row && count(a.skip) == sizes.maps * call.channels &&
         count(a.columns) == sizes.packs * call.tokens * 2 * sizes.padded;
}

}  // namespace ejkernel::selective_scan
