// Builds tensor maps, the descriptors that TMA copies matrices by, on the host.
#pragma once

#include <cuda.h>
#include <cuda_runtime.h>

#include <cstring>

namespace ejkernel {

// A matrix, and the tiles that TMA copies.
struct Described {
  CUtensorMapDataType dtype;
  int bytes, rows, columns, tile_rows, tile_columns;
  CUtensorMapSwizzle swizzle;
};

// Encodes a tensor map. Returns an error message, or null on success.
template <typename Map>
const char* describe(Map* map, const void* matrix, const Described& form) {
  // The library is not linked to the driver, which XLA has already loaded.
  decltype(&cuTensorMapEncodeTiled) encode = nullptr;
  cudaDriverEntryPointQueryResult found;
  const cudaError_t error = cudaGetDriverEntryPointByVersion(
      "cuTensorMapEncodeTiled", reinterpret_cast<void**>(&encode), 12000, cudaEnableDefault, &found);
  if (error != cudaSuccess) return cudaGetErrorString(error);
  const cuuint64_t sizes[2] = {static_cast<cuuint64_t>(form.columns), static_cast<cuuint64_t>(form.rows)};
  const cuuint64_t strides[1] = {sizes[0] * form.bytes};
  const cuuint32_t tile[2] = {static_cast<cuuint32_t>(form.tile_columns), static_cast<cuuint32_t>(form.tile_rows)};
  const cuuint32_t steps[2] = {1, 1};
  CUtensorMap encoded;
  if (found != cudaDriverEntryPointSuccess ||
      encode(&encoded, form.dtype, 2, const_cast<void*>(matrix), sizes, strides, tile, steps,
             CU_TENSOR_MAP_INTERLEAVE_NONE, form.swizzle, CU_TENSOR_MAP_L2_PROMOTION_L2_128B,
             CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE) != CUDA_SUCCESS) {
    return "the driver cannot encode a tensor map";
  }
  static_assert(sizeof(encoded) == sizeof(*map), "a tensor map has 128 bytes");
  std::memcpy(map, &encoded, sizeof(encoded));
  return nullptr;
}

}  // namespace ejkernel
