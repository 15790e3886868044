// Packed sequences as arguments of both passes of the selective scan.
#pragma once

#include "selective_scan/selective_scan.cuh"
#include "xla/ffi/api/ffi.h"

namespace ejkernel::selective_scan {

// The packing of a call; empty arrays mean that sequences are not packed.
inline Packing packing_of(
    const xla::ffi::Buffer<xla::ffi::S32>& bounds, const xla::ffi::Buffer<xla::ffi::S32>& intervals) {
  Packing packing{};
  if (bounds.element_count() == 0) return packing;
  const auto shape = bounds.dimensions();
  packing.bounds = bounds.typed_data();
  packing.intervals = intervals.typed_data();
  packing.sequences = int(shape[shape.size() - 1]) - 1;
  return packing;
}

// Whether the bounds and first intervals have the sizes that the rows of tokens need.
inline bool belongs(
    const Packing& packing, const xla::ffi::Buffer<xla::ffi::S32>& bounds,
    const xla::ffi::Buffer<xla::ffi::S32>& intervals, int64_t rows) {
  if (packing.bounds == nullptr) return true;
  const int64_t count = rows * (packing.sequences + 1);
  return packing.sequences > 0 && int64_t(bounds.element_count()) == count &&
         int64_t(intervals.element_count()) == count;
}

// Stored states of all rows; with packing `interval_count` of ejkernel.families.selective_scan.packed_scan per row.
inline int64_t stored_intervals(const Packing& packing, int64_t rows, int64_t tokens) {
  if (packing.bounds == nullptr) return rows * ((tokens + kInterval - 1) / kInterval);
  return rows * (tokens / kInterval + packing.sequences);
}

}  // namespace ejkernel::selective_scan
