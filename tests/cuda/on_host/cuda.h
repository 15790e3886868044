// Stands in for CUDA's: tensor maps, which keep what they were made from.
#pragma once

#include <cstdint>
#include <cstring>

using cuuint32_t = uint32_t;
using cuuint64_t = uint64_t;
enum CUresult { CUDA_SUCCESS };
enum CUtensorMapDataType { CU_TENSOR_MAP_DATA_TYPE_BFLOAT16 };
enum CUtensorMapInterleave { CU_TENSOR_MAP_INTERLEAVE_NONE };
enum CUtensorMapSwizzle { CU_TENSOR_MAP_SWIZZLE_NONE, CU_TENSOR_MAP_SWIZZLE_128B };
enum CUtensorMapL2promotion { CU_TENSOR_MAP_L2_PROMOTION_L2_256B };
enum CUtensorMapFloatOOBfill { CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE };

struct alignas(64) CUtensorMap {
  char* first;
  uint64_t strides[4];  // in bytes, of all dimensions but the first
  uint64_t sizes[5];
  uint32_t rank, columns, rows;  // of a tile
  bool is_swizzled;
};
static_assert(sizeof(CUtensorMap) == 128);

inline CUresult cuTensorMapEncodeTiled(CUtensorMap* map, CUtensorMapDataType, cuuint32_t rank, void* first,
                                       const cuuint64_t* sizes, const cuuint64_t* strides, const cuuint32_t* box,
                                       const cuuint32_t*, CUtensorMapInterleave, CUtensorMapSwizzle swizzle,
                                       CUtensorMapL2promotion, CUtensorMapFloatOOBfill) {
  *map = {static_cast<char*>(first), {}, {}, rank, box[0], box[1], swizzle == CU_TENSOR_MAP_SWIZZLE_128B};
  std::memcpy(map->sizes, sizes, rank * 8);
  std::memcpy(map->strides, strides, (rank - 1) * 8);
  return CUDA_SUCCESS;
}
