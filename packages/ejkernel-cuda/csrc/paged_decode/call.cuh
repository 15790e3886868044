// What the handlers of paged decode attention share: the arrays of a call, its record, and whether both fit.
#pragma once

#include <algorithm>
#include <atomic>
#include <chrono>

#include "common/ffi_handler.cuh"
#include "paged_decode/paged_decode.cuh"

namespace ejkernel::paged_decode {

struct Arguments {
  ffi::AnyBuffer query, keys, values;  // `values` is empty if the array of keys also has the values
  ffi::Buffer<ffi::S32> tables, lengths, starts, query_start, num_valid_seqs;
  ffi::Buffer<ffi::F32> sinks;
  ffi::AnyBuffer output;
  ffi::Buffer<ffi::F32> lse, partial, statistics;
  ffi::Buffer<ffi::S32> flags;
  ffi::Span<const int64_t> strides;
  int32_t kv_heads, pages, page_size, num_queues, left, right;
  float scale, cap, value_scale;
};

inline const ffi::AnyBuffer& values_of(const Arguments& a) { return a.values.element_count() == 0 ? a.keys : a.values; }

// A ticket that no other launch of this process has, and that uninitialised memory holds with negligible probability.
inline uint64_t next_ticket() {
  static std::atomic<uint64_t> next{
      uint64_t(std::chrono::steady_clock::now().time_since_epoch().count()) * 0x9e3779b97f4a7c15};
  return next.fetch_add(1, std::memory_order_relaxed) | 1ull << 63;
}

// Builds the record of a call. Absent arrays have no elements.
inline PagedDecodeParams make_params(const Arguments& a) {
  const auto query = a.query.dimensions(), output = a.output.dimensions();
  PagedDecodeParams call{};
  call.query = a.query.untyped_data();
  call.keys = static_cast<const unsigned char*>(a.keys.untyped_data());
  // An offset in elements from the array's start: keys and values may be in one array.
  call.values = static_cast<const unsigned char*>(values_of(a).untyped_data()) +
                a.strides[6] * ffi::ByteWidth(a.keys.element_type());
  call.tables = data_or_null(a.tables);
  call.lengths = a.lengths.typed_data();
  call.starts = data_or_null(a.starts);
  call.query_start = data_or_null(a.query_start);
  // The last entry, since one operation passes an array of counts whose last entry is the total.
  call.num_valid_seqs = a.num_valid_seqs.element_count() == 0 ? nullptr
      : a.num_valid_seqs.typed_data() + a.num_valid_seqs.element_count() - 1;
  call.sinks = data_or_null(a.sinks);
  call.output = a.output.untyped_data();
  call.lse = a.lse.typed_data();
  call.partial = a.partial.typed_data();
  call.statistics = a.statistics.typed_data();
  call.flags = reinterpret_cast<uint64_t*>(a.flags.typed_data());
  call.ticket = next_ticket();
  const auto chunk_strides = [&](int first) {
    const int64_t bytes = ffi::ByteWidth(a.keys.element_type());
    return Strides{
        uint32_t(a.strides[first] * bytes / 16), uint32_t(a.strides[first + 1] * bytes / 16),
        uint32_t(a.strides[first + 2] * bytes / 16)};
  };
  call.key_strides = chunk_strides(0);
  call.value_strides = chunk_strides(3);
  call.rows = query[0];
  call.rows_per_sink = std::max(call.rows, 1);
  call.heads = query[1];
  call.size = query[2];
  call.value_size = output[2];
  call.kv_heads = a.kv_heads;
  call.sequences = a.lengths.element_count();
  call.columns = call.tables == nullptr ? 1 : a.tables.element_count() / std::max(call.sequences, 1);
  call.pages = a.pages;
  call.page_size = a.page_size;
  call.num_queues = a.num_queues;
  call.left = a.left;
  call.right = a.right;
  call.scale = a.scale;
  call.cap = a.cap;
  call.value_scale = a.value_scale;
  call.bfloat16 = a.query.element_type() == ffi::BF16;
  return call;
}

// Whether a cache array contains all elements that its strides address, and 16-byte copies are aligned.
inline bool array_covers_strides(const PagedDecodeParams& call, const ffi::AnyBuffer& array,
    ffi::Span<const int64_t> strides, int first, int size) {
  const int64_t bytes = ffi::ByteWidth(array.element_type()), offset = first == 3 ? strides[6] : 0;
  bool aligned = size * bytes % 16 == 0 && offset * bytes % 16 == 0;
  for (int n = 0; n < 3; ++n) aligned &= strides[first + n] >= 0 && strides[first + n] * bytes % 16 == 0;
  const int64_t last = offset + (call.pages - 1) * strides[first] + (call.page_size - 1) * strides[first + 1] +
                       (call.kv_heads - 1) * strides[first + 2] + size;
  // Offsets count 16-byte chunks in 32 bits, and one value is reserved for missing keys.
  return aligned && last <= int64_t(array.element_count()) && last * bytes / 16 < int64_t(kInvalidOffset);
}

// Whether the arrays' sizes belong to one call: the kernels rely on the shapes and check nothing. A row of the cache has
// `key_row` and `value_row` elements, and a block takes up to `heads_per_block` query heads.
inline bool shapes_match(
    const Arguments& a, const PagedDecodeParams& call, int64_t blocks, int heads_per_block, int key_row, int value_row) {
  const int64_t heads = int64_t(call.rows) * call.heads;
  const auto absent_or = [](const auto& buffer, int64_t size) { return count(buffer) == 0 || count(buffer) == size; };
  if (call.kv_heads < 1 || call.heads % call.kv_heads != 0 || call.num_queues < 1 || blocks < 1) return false;
  const int items_per_queue = call.kv_heads * ((call.heads / call.kv_heads + heads_per_block - 1) / heads_per_block);
  return call.size % 8 == 0 && std::max(call.size, call.value_size) <= kMaxHeadDim &&
      items_per_queue % call.num_queues == 0 &&
         blocks % call.num_queues == 0 && blocks / call.num_queues <= kMaxBlocksPerQueue && call.pages >= 1 &&
             call.page_size >= 1 &&
         call.columns >= 1 && (call.query_start != nullptr || call.rows == call.sequences) &&
         (call.tables != nullptr || call.pages >= call.sequences) && count(a.query) == heads * call.size &&
         absent_or(a.starts, call.sequences) && absent_or(a.query_start, call.sequences + 1) &&
         absent_or(a.sinks, call.heads) &&
         array_covers_strides(call, a.keys, a.strides, 0, key_row) &&
         array_covers_strides(call, values_of(a), a.strides, 3, value_row) &&
         count(a.lse) == heads && count(a.partial) == blocks * 2 * kHeadsPerBlock * call.value_size &&
         count(a.statistics) == blocks * 2 * kHeadsPerBlock * 2 && count(a.flags) == blocks * 4;
}

}  // namespace ejkernel::paged_decode
