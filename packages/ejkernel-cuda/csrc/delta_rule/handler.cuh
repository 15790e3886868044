// What the FFI handlers of the chunked delta rule share: tensor maps.
#pragma once

#include "common/ffi_handler.cuh"
#include "delta_rule/segments.cuh"

#include <cuda.h>

#include <cstring>

namespace ejkernel::delta_rule {

// Defines the symbol of a handler some of whose results are memory that its kernels pass on to each other. XLA may put no
// such call into a CUDA graph: nothing reads these results, so calls of one graph would have them in the same memory, and
// at the same time.
#define EJKERNEL_HANDLER_OUTSIDE_GRAPHS(symbol, function, ...)                                       \
  extern "C" __attribute__((visibility("default"))) XLA_FFI_Error* symbol(XLA_FFI_CallFrame* frame); \
  XLA_FFI_DEFINE_HANDLER_SYMBOL(symbol, function, ejkernel::bind(function, {__VA_ARGS__}))

constexpr HandlerErrors kErrors{"delta rule"};

using Bf16 = ffi::Buffer<ffi::BF16>;
using F32 = ffi::Buffer<ffi::F32>;
using S32 = ffi::Buffer<ffi::S32>;

// An array [batch, rows, columns] in bfloat16, and the tiles of it that TMA copies.
struct Size {
  int64_t columns, rows, batch;
};
struct Tile {
  int columns, rows;
  CUtensorMapSwizzle swizzle;
};

// Encodes a tensor map. Returns an error message, or null on success.
template <int Rank, typename Map>
const char* encode(Map* map, const void* data, const cuuint64_t (&sizes)[Rank], const cuuint64_t (&strides)[Rank - 1],
                   const Tile& tile) {
  decltype(&cuTensorMapEncodeTiled) encode_tiled = nullptr;
  CUtensorMap encoded;
  cudaDriverEntryPointQueryResult status;
  const cudaError_t error = cudaGetDriverEntryPointByVersion(
      "cuTensorMapEncodeTiled", reinterpret_cast<void**>(&encode_tiled), 12000, cudaEnableDefault, &status);
  if (error != cudaSuccess) return cudaGetErrorString(error);
  const cuuint32_t box[4] = {cuuint32_t(tile.columns), cuuint32_t(tile.rows), 1, 1}, steps[4] = {1, 1, 1, 1};
  if (status != cudaDriverEntryPointSuccess ||
      encode_tiled(&encoded, CU_TENSOR_MAP_DATA_TYPE_BFLOAT16, Rank, const_cast<void*>(data), sizes, strides, box, steps,
                   CU_TENSOR_MAP_INTERLEAVE_NONE, tile.swizzle, CU_TENSOR_MAP_L2_PROMOTION_L2_256B,
                   CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE) != CUDA_SUCCESS) {
    return "the driver cannot encode a tensor map";
  }
  static_assert(sizeof(encoded) == sizeof(*map), "a tensor map has 128 bytes");
  std::memcpy(map, &encoded, sizeof(encoded));
  return nullptr;
}

template <typename Map>
const char* encode(Map* map, const void* data, const Size& size, const Tile& tile) {
  const cuuint64_t row_bytes = size.columns * 2;
  return encode<3>(map, data, {cuuint64_t(size.columns), cuuint64_t(size.rows), cuuint64_t(size.batch)},
                   {row_bytes, row_bytes * size.rows}, tile);
}

// Encodes a map of an array whose rows are tokens, of which tiles have those of a chunk alone. A row is the sum of two
// coordinates, and the first one ends at 64: a tile of n rows from row r on has its first row at (64 - n, r + n), so that
// the rows after it are outside. The array therefore begins 64 rows before its data, which nothing reads.
template <typename Map>
const char* encode_tokens(Map* map, const void* data, const Size& size, const Tile& tile) {
  const cuuint64_t row_bytes = size.columns * 2;
  const char* const first = static_cast<const char*>(data) - row_bytes * kChunkTokens;
  return encode<4>(map, first, {cuuint64_t(size.columns), kChunkTokens, cuuint64_t(size.rows) + 1, cuuint64_t(size.batch)},
                   {row_bytes, row_bytes, row_bytes * size.rows}, tile);
}

// The table of a packed row's chunks, [chunks + 1, 4], of which there are `chunks`; those of rows follow from the tokens.
// Returns false if its shape does not belong to the call's.
template <typename Call>
bool set_chunks(Call* call, const S32& table, int64_t batch, int64_t tokens) {
  call->tokens = int(tokens), call->chunks = int((tokens + kChunkTokens - 1) / kChunkTokens);
  if (table.element_count() == 0) return true;
  if (count(table) % 4 || batch != 1) return false;
  call->table = reinterpret_cast<const Chunk*>(table.typed_data());
  call->chunks = int(count(table) / 4 - 1);
  return true;
}

}  // namespace ejkernel::delta_rule
