// The XLA FFI handler of the chunked delta rule.
#include "common/ffi_handler.cuh"
#include "delta_rule/chunked.cuh"

#include <cuda.h>

#include <cstring>

namespace ejkernel::delta_rule {
namespace {

constexpr HandlerErrors kErrors{"delta rule"};

// Encodes the tensor map of [batch, tokens, columns] in bfloat16, for tiles of 64 tokens.
const char* encode_tensor_map(TensorMap* map, const void* data, int64_t columns, int64_t tokens, int64_t batch,
                     int tile_columns, CUtensorMapSwizzle swizzle) {
  decltype(&cuTensorMapEncodeTiled) encode = nullptr;
  CUtensorMap encoded;
  cudaDriverEntryPointQueryResult status;
  const cudaError_t error = cudaGetDriverEntryPointByVersion(
      "cuTensorMapEncodeTiled", reinterpret_cast<void**>(&encode), 12000, cudaEnableDefault, &status);
  if (error != cudaSuccess) return cudaGetErrorString(error);
  const cuuint64_t sizes[3] = {cuuint64_t(columns), cuuint64_t(tokens), cuuint64_t(batch)};
  const cuuint64_t strides[2] = {cuuint64_t(columns) * 2, cuuint64_t(columns * tokens) * 2};
  const cuuint32_t tile[3] = {cuuint32_t(tile_columns), kChunkTokens, 1}, steps[3] = {1, 1, 1};
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

ffi::Error launch(cudaStream_t stream, const DeltaCall& call, const Maps& maps, int64_t batch) {
  const cudaError_t error =
      cudaFuncSetAttribute(delta_kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, kSharedMemoryBytes);
  if (error != cudaSuccess) return kErrors.internal("shared memory", cudaGetErrorString(error));
  const int64_t blocks = batch * call.heads * (call.value_dim / kBlockValues);
  delta_kernel<<<int(blocks), kThreads, kSharedMemoryBytes, stream>>>(call, maps);
  return kErrors.check("launch", cudaGetLastError());
}

using Bf16 = ffi::Buffer<ffi::BF16>;
using F32 = ffi::Buffer<ffi::F32>;

ffi::Error delta_rule(cudaStream_t stream, Bf16 query, Bf16 key, Bf16 value, F32 gates, F32 beta, F32 initial,
                      ffi::Result<Bf16> output, ffi::Result<F32> final, float scale) {
  if (output->element_count() == 0) return ffi::Error::Success();
  const auto q = query.dimensions(), k = key.dimensions(), v = value.dimensions(), b = beta.dimensions();
  if (q.size() != 4 || k.size() != 4 || v.size() != 4 || b.size() != 3) return kErrors.invalid_shapes();
  const int64_t batch = q[0], tokens = q[1], heads = b[2], values = v[3];
  const auto divides = [heads](int64_t field_heads) { return field_heads > 0 && heads % field_heads == 0; };
  const auto has_call_shape = [=](const auto& x) { return x[0] == batch && x[1] == tokens && divides(x[2]); };
  if (!has_call_shape(q) || !has_call_shape(k) || !has_call_shape(v) || !has_call_shape(b) || q[3] != kKeyDim ||
      k[3] != kKeyDim ||
      values % kBlockValues || (gates.element_count() != 0 && count(gates) != count(beta)) ||
      (initial.element_count() != 0 && count(initial) != count(*final)) ||
      count(*output) != count(beta) * values || count(*final) != batch * heads * kKeyDim * values) {
    return kErrors.invalid_shapes();
  }
  DeltaCall call{};
  call.tokens = int(tokens), call.heads = int(heads), call.value_dim = int(values);
  call.query_heads = int(q[2]), call.key_heads = int(k[2]), call.value_heads = int(v[2]);
  call.chunks = (call.tokens + kChunkTokens - 1) / kChunkTokens;
  call.gates = data_or_null(gates), call.beta = beta.typed_data(), call.initial_states = data_or_null(initial);
  call.final_states = final->typed_data(), call.scale = scale;
  Maps maps;
  const CUtensorMapSwizzle swizzle = CU_TENSOR_MAP_SWIZZLE_128B;
  const char* error_message = encode_tensor_map(&maps.query, query.untyped_data(), q[2] * q[3], tokens, batch, 64,
      swizzle);
  if (!error_message) error_message = encode_tensor_map(&maps.key, key.untyped_data(), k[2] * k[3], tokens, batch, 64,
      swizzle);
  if (!error_message) error_message = encode_tensor_map(&maps.value, value.untyped_data(), v[2] * values, tokens,
      batch, 64, swizzle);
  if (!error_message) {
    error_message = encode_tensor_map(&maps.output, output->untyped_data(), heads * values, tokens, batch, 16,
                       CU_TENSOR_MAP_SWIZZLE_NONE);
  }
  if (error_message) return kErrors.internal("tensor map", error_message);
  return launch(stream, call, maps, batch);
}

}  // namespace

EJKERNEL_FFI_HANDLER(ejkernel_delta_rule, delta_rule, "scale");

}  // namespace ejkernel::delta_rule
