// Builds the tensor maps of the chunked recurrences on the host.
#pragma once

#include <cuda.h>
#include <cuda_runtime.h>

#include <cstdint>
#include <cstring>

#include "delta_rule/segments.cuh"

namespace ejkernel::delta_rule {

// An array [batch, rows, columns] in bfloat16, and the tiles of it that TMA copies.
struct Size {
  int64_t columns, rows, batch;
};
struct Tile {
  int columns, rows;
  CUtensorMapSwizzle swizzle;
  bool is_stored = false;  // only of arrays of tokens: whether tiles are stored, or else loaded
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
  const cuuint32_t box[5] = {cuuint32_t(tile.columns), cuuint32_t(tile.rows), 1, 1, 1}, steps[5] = {1, 1, 1, 1, 1};
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
// coordinates less the end of the first one: a tile of n rows from row r on has its first row at (end - n, r + n), so
// that the rows after it are outside.
//
// Maps of loads begin with their arrays: a last coordinate, `kLoadedRowsEnd`, subtracts the rows of the first one's end, as
// addresses are modulo 2^64. Those of stores begin `kChunkTokens` rows before the array.
template <typename Map>
const char* encode_tokens(Map* map, const void* data, const Size& size, const Tile& tile) {
  const cuuint64_t row_bytes = size.columns * 2, columns = size.columns, rows = size.rows, batch = size.batch;
  if (tile.is_stored) {
    const char* const first = static_cast<const char*>(data) - row_bytes * kChunkTokens;
    return encode<4>(map, first, {columns, kChunkTokens, rows + 1, batch}, {row_bytes, row_bytes, row_bytes * rows}, tile);
  }
  static_assert(kLoadedRowsEnd == 1 << 30, "times 2^34 it is 2^64");
  return encode<5>(map, data, {columns, kLoadedRowsEnd, rows + 1, batch, kLoadedRowsEnd + 1},
                   {row_bytes, row_bytes, row_bytes * rows, (cuuint64_t(1) << 34) - row_bytes}, tile);
}

}  // namespace ejkernel::delta_rule
