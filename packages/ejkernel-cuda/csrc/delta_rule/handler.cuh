// What the FFI handlers of the chunked delta rule share: tensor maps.
#pragma once

#include "common/ffi_handler.cuh"

#include <cuda.h>

#include <cstring>

namespace ejkernel::delta_rule {

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
template <typename Map>
const char* encode(Map* map, const void* data, const Size& size, const Tile& tile) {
  decltype(&cuTensorMapEncodeTiled) encode_tiled = nullptr;
  CUtensorMap encoded;
  cudaDriverEntryPointQueryResult status;
  const cudaError_t error = cudaGetDriverEntryPointByVersion(
      "cuTensorMapEncodeTiled", reinterpret_cast<void**>(&encode_tiled), 12000, cudaEnableDefault, &status);
  if (error != cudaSuccess) return cudaGetErrorString(error);
  const cuuint64_t sizes[3] = {cuuint64_t(size.columns), cuuint64_t(size.rows), cuuint64_t(size.batch)};
  const cuuint64_t strides[2] = {cuuint64_t(size.columns) * 2, cuuint64_t(size.columns * size.rows) * 2};
  const cuuint32_t box[3] = {cuuint32_t(tile.columns), cuuint32_t(tile.rows), 1}, steps[3] = {1, 1, 1};
  if (status != cudaDriverEntryPointSuccess ||
      encode_tiled(&encoded, CU_TENSOR_MAP_DATA_TYPE_BFLOAT16, 3, const_cast<void*>(data), sizes, strides, box, steps,
                   CU_TENSOR_MAP_INTERLEAVE_NONE, tile.swizzle, CU_TENSOR_MAP_L2_PROMOTION_L2_256B,
                   CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE) != CUDA_SUCCESS) {
    return "the driver cannot encode a tensor map";
  }
  static_assert(sizeof(encoded) == sizeof(*map), "a tensor map has 128 bytes");
  std::memcpy(map, &encoded, sizeof(encoded));
  return nullptr;
}

}  // namespace ejkernel::delta_rule
