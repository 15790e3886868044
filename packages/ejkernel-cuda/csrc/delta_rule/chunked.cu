// The XLA FFI handler of the chunked delta rule.
#include "common/ffi_handler.cuh"
#include "delta_rule/chunked.cuh"

#include <cuda.h>

#include <cstring>

namespace ejkernel::delta_rule {
namespace {

constexpr HandlerErrors kErrors{"delta rule"};

// Encodes the tensor map of [batch, tokens, columns] in bfloat16, for tiles of 64 tokens.
const char* describe(TensorMap* map, const void* data, int64_t columns, int64_t tokens, int64_t batch,
                     int tile_columns, CUtensorMapSwizzle swizzle) {
  decltype(&cuTensorMapEncodeTiled) encode = nullptr;
  CUtensorMap encoded;
  cudaDriverEntryPointQueryResult status;
  const cudaError_t error = cudaGetDriverEntryPointByVersion(
      "cuTensorMapEncodeTiled", reinterpret_cast<void**>(&encode), 12000, cudaEnableDefault, &status);
  if (error != cudaSuccess) return cudaGetErrorString(error);
  const cuuint64_t sizes[3] = {cuuint64_t(columns), cuuint64_t(tokens), cuuint64_t(batch)};
  const cuuint64_t strides[2] = {cuuint64_t(columns) * 2, cuuint64_t(columns * tokens) * 2};
  const cuuint32_t tile[3] = {cuuint32_t(tile_columns), kChunk, 1}, steps[3] = {1, 1, 1};
  if (status != cudaDriverEntryPointSuccess ||
      encode(&encoded, CU_TENSOR_MAP_DATA_TYPE_BFLOAT16, 3, const_cast<void*>(data), sizes, strides, tile, steps,
             CU_TENSOR_MAP_INTERLEAVE_NONE, swizzle, CU_TENSOR_MAP_L2_PROMOTION_L2_256B,
             CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE) != CUDA_SUCCESS) {
    return "the driver cannot encode a tensor map";
  }
  static_assert(sizeof(encoded) == sizeof(*map), "a tensor map has 128 bytes");
  std::memcpy(map, &encoded, sizeof(encoded));
  return nullptr;
}

template <int M>
ffi::Error launch(cudaStream_t stream, const DeltaCall& call, const Maps& maps, int64_t batch) {
  const cudaError_t error =
      cudaFuncSetAttribute(delta_kernel<M>, cudaFuncAttributeMaxDynamicSharedMemorySize, kSharedBytes);
  if (error != cudaSuccess) return kErrors.internal("shared memory", cudaGetErrorString(error));
  delta_kernel<M><<<int(batch * call.heads * (call.values / kValues)), kThreads, kSharedBytes, stream>>>(call, maps);
  return kErrors.check("launch", cudaGetLastError());
}

using Bf16 = ffi::Buffer<ffi::BF16>;
using F32 = ffi::Buffer<ffi::F32>;

ffi::Error delta_rule(cudaStream_t stream, Bf16 query, Bf16 key, Bf16 value, F32 gates, F32 beta, F32 initial,
                      ffi::Result<Bf16> output, ffi::Result<F32> final, ffi::Result<Bf16> inverses,
                      ffi::Result<Bf16> scores, ffi::Result<Bf16> writes, float scale, int32_t mode) {
  const auto q = query.dimensions(), k = key.dimensions(), v = value.dimensions(), b = beta.dimensions();
  if (q.size() != 4 || q[3] != kKeys || k[3] != kKeys || v[3] % kValues) return kErrors.invalid_shapes();
  DeltaCall call{};
  const int64_t batch = q[0];
  call.tokens = q[1], call.heads = b[2];
  call.query_heads = q[2], call.key_heads = k[2], call.value_heads = v[2], call.values = v[3];
  call.chunks = (call.tokens + kChunk - 1) / kChunk;
  call.gates = data_or_null(gates), call.beta = beta.typed_data(), call.initial = data_or_null(initial);
  call.final = final->typed_data(), call.scale = scale;
  const auto bf16 = [](auto& x) {
    return x->element_count() == 0 ? nullptr : reinterpret_cast<__nv_bfloat16*>(x->untyped_data());
  };
  call.inverses = bf16(inverses), call.scores = bf16(scores), call.writes = bf16(writes);
  Maps maps;
  const CUtensorMapSwizzle swizzle = CU_TENSOR_MAP_SWIZZLE_128B;
  const char* problem = describe(&maps.query, query.untyped_data(), q[2] * q[3], q[1], batch, 64, swizzle);
  if (!problem) problem = describe(&maps.key, key.untyped_data(), k[2] * k[3], q[1], batch, 64, swizzle);
  if (!problem) problem = describe(&maps.value, value.untyped_data(), v[2] * v[3], q[1], batch, 64, swizzle);
  if (!problem) {
    problem = describe(&maps.output, output->untyped_data(), call.heads * v[3], q[1], batch, 16,
                       CU_TENSOR_MAP_SWIZZLE_NONE);
  }
  if (problem) return kErrors.internal("tensor map", problem);
  switch (mode) {
    case kAll: return launch<kAll>(stream, call, maps, batch);
#ifdef DELTA_VARIANTS
    case kNoPairs: return launch<kNoPairs>(stream, call, maps, batch);
    case kNoState: return launch<kNoState>(stream, call, maps, batch);
    case kLoadsOnly: return launch<kLoadsOnly>(stream, call, maps, batch);
    case kNoInverse: return launch<kNoInverse>(stream, call, maps, batch);
#endif
    default: return kErrors.invalid("no such mode");
  }
}

}  // namespace

EJKERNEL_FFI_HANDLER(ejkernel_delta_rule, delta_rule, "scale", "mode");

}  // namespace ejkernel::delta_rule
