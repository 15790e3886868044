// The XLA FFI handler of the gradients of tokens whose heads share queries and keys.
#include "delta_rule/group_gradients.cuh"
#include "delta_rule/handler.cuh"

namespace ejkernel::delta_rule {
namespace {

template <int V>
ffi::Error launch(cudaStream_t stream, const GroupGradientCall& call, const GroupGradientMaps& maps, int64_t batch) {
  constexpr int kBytes = GroupLayout<V>::kBytes;
  const cudaError_t error = cudaFuncSetAttribute(delta_group_gradients_kernel<V>,
                                                 cudaFuncAttributeMaxDynamicSharedMemorySize, kBytes);
  if (error != cudaSuccess) return kErrors.internal("shared memory", cudaGetErrorString(error));
  const int64_t blocks = batch * call.chunks * call.groups * call.slices;
  delta_group_gradients_kernel<V><<<int(blocks), kGroupThreads, kBytes, stream>>>(call, maps);
  return kErrors.check("launch", cudaGetLastError());
}

// Queries, keys, values and the output's gradient [B, T, heads, channels]; states and their gradients
// [B, H, chunks, V, K]. The heads of a group are split into slices: with one, gradients of queries and keys are
// [B, T, groups, K] in bfloat16, with several, [B, T, groups * slices, K] in float32. Without gates, factors or a skip
// these are empty arrays, and so are their gradients; that of a skip is per chunk, [B, chunks, H].
ffi::Error delta_rule_group_gradients(cudaStream_t stream, Bf16 query, Bf16 key, Bf16 value, Bf16 cotangent,
                                      Bf16 states, Bf16 dstates, F32 gates, F32 factors, S32 table,
                                      ffi::Result<ffi::AnyBuffer> dquery, ffi::Result<ffi::AnyBuffer> dkey,
                                      ffi::Result<F32> dgates, ffi::Result<F32> dfactors, ffi::Result<F32> dskip,
                                      float scale) {
  if (cotangent.element_count() == 0) return ffi::Error::Success();
  const auto q = query.dimensions(), k = key.dimensions(), v = value.dimensions(), c = cotangent.dimensions(),
             d = dquery->dimensions();
  if (q.size() != 4 || k.size() != 4 || v.size() != 4 || c.size() != 4 || d.size() != 4) {
    return kErrors.invalid_shapes();
  }
  const int64_t batch = c[0], tokens = c[1], heads = c[2], values = c[3], groups = q[2];
  GroupGradientCall call{};
  if (!set_chunks(&call, table, batch, tokens)) return kErrors.invalid_shapes();
  const int64_t chunks = call.chunks, head_tokens = batch * tokens * heads;
  const auto belongs = [=](const auto& x, int64_t channels) {
    return x[0] == batch && x[1] == tokens && x[2] > 0 && heads % x[2] == 0 && x[3] == channels;
  };
  const auto is_absent_or_has_size = [](const auto& x, int64_t size) {
    return x.element_count() == 0 || count(x) == size;
  };
  if (!belongs(q, kKeyDim) || !belongs(k, kKeyDim) || k[2] != groups || !belongs(v, values) || !belongs(d, kKeyDim) ||
      d[2] % groups != 0 || (values != 64 && values != 128) || count(*dkey) != count(*dquery) ||
      dkey->element_type() != dquery->element_type() ||
      dquery->element_type() != (d[2] == groups ? ffi::BF16 : ffi::F32) ||
      count(states) != batch * heads * chunks * values * kKeyDim || count(dstates) != count(states) ||
      !is_absent_or_has_size(gates, head_tokens) || !is_absent_or_has_size(factors, head_tokens) ||
      count(*dgates) != count(gates) || count(*dfactors) != count(factors) ||
      !is_absent_or_has_size(*dskip, batch * chunks * heads)) {
    return kErrors.invalid_shapes();
  }
  call.gates = data_or_null(gates), call.factors = data_or_null(factors);
  if (d[2] > groups) {
    call.dquery = static_cast<float*>(dquery->untyped_data()), call.dkey = static_cast<float*>(dkey->untyped_data());
  }
  call.dgates = data_or_null(*dgates), call.dfactors = data_or_null(*dfactors), call.dskip = data_or_null(*dskip);
  call.heads = int(heads), call.groups = int(groups);
  call.slices = int(d[2] / groups), call.value_heads = int(v[2]), call.scale = scale;
  GroupGradientMaps maps;
  const Tile loaded = {64, kChunkTokens, CU_TENSOR_MAP_SWIZZLE_128B}, stored = {64, 16, CU_TENSOR_MAP_SWIZZLE_128B, true};
  const Size keys = {groups * kKeyDim, tokens, batch}, all_states = {kKeyDim, values, batch * heads * chunks};
  const char* message = nullptr;
  const auto add = [&message](TensorMap* map, const void* data, const Size& size, const Tile& tile) {
    if (!message) message = encode(map, data, size, tile);
  };
  const auto add_tokens = [&message](TensorMap* map, const void* data, const Size& size, const Tile& tile) {
    if (!message) message = encode_tokens(map, data, size, tile);
  };
  add_tokens(&maps.query, query.untyped_data(), keys, loaded);
  add_tokens(&maps.key, key.untyped_data(), keys, loaded);
  add_tokens(&maps.value, value.untyped_data(), {v[2] * values, tokens, batch}, loaded);
  add_tokens(&maps.cotangent, cotangent.untyped_data(), {heads * values, tokens, batch}, loaded);
  add(&maps.states, states.untyped_data(), all_states, loaded);
  add(&maps.dstates, dstates.untyped_data(), all_states, loaded);
  if (call.dquery == nullptr) {
    add_tokens(&maps.dquery, dquery->untyped_data(), keys, stored);
    add_tokens(&maps.dkey, dkey->untyped_data(), keys, stored);
  }
  if (message) return kErrors.internal("tensor map", message);
  return values == 64 ? launch<64>(stream, call, maps, batch) : launch<128>(stream, call, maps, batch);
}

}  // namespace

EJKERNEL_FFI_HANDLER(ejkernel_delta_rule_group_gradients, delta_rule_group_gradients, "scale");

}  // namespace ejkernel::delta_rule
