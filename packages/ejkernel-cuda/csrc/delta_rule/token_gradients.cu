// The XLA FFI handler of the gradients of tokens.
#include "delta_rule/handler.cuh"
#include "delta_rule/token_gradients.cuh"

namespace ejkernel::delta_rule {
namespace {

template <int V, typename Kernel>
ffi::Error launch(cudaStream_t stream, Kernel kernel, const TokenGradientCall& call, const TokenGradientMaps& maps,
                  int64_t batch) {
  constexpr int kBytes = GradientLayout<V>::kBytes;
  const cudaError_t error = cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, kBytes);
  if (error != cudaSuccess) return kErrors.internal("shared memory", cudaGetErrorString(error));
  const int64_t blocks = batch * call.heads * call.chunks;
  kernel<<<int(blocks), kGradientThreads, kBytes, stream>>>(call, maps);
  return kErrors.check("launch", cudaGetLastError());
}

template <int V>
ffi::Error launch(cudaStream_t stream, const TokenGradientCall& call, const TokenGradientMaps& maps, int64_t batch,
                  bool in_pairs) {
  const auto kernel = call.beta == nullptr ? delta_token_gradients_kernel<V, false>
                      : in_pairs           ? delta_pair_gradients_kernel<V>
                                           : delta_token_gradients_kernel<V, true>;
  return launch<V>(stream, kernel, call, maps, batch);
}

// Queries, keys, values, the tokens' writes, the gradients of output and writes [B, T, heads, channels]; states and
// their gradients [B, H, chunks, V, K]. Gradients of queries or keys that heads share are stored per head, in float32, or
// with the delta rule per pair of heads, in bfloat16 if only these share them. Without the delta rule the writes are the
// values, and beta, dV and dbeta are empty arrays.
ffi::Error delta_rule_token_gradients(cudaStream_t stream, Bf16 query, Bf16 key, Bf16 value, Bf16 writes,
                                      Bf16 cotangent, Bf16 dwrites, Bf16 states, Bf16 dstates, F32 gates, F32 beta, S32 table,
                                      ffi::Result<ffi::AnyBuffer> dquery, ffi::Result<ffi::AnyBuffer> dkey,
                                      ffi::Result<Bf16> dvalue, ffi::Result<F32> dgates, ffi::Result<F32> dbeta,
                                      float scale) {
  if (cotangent.element_count() == 0) return ffi::Error::Success();
  const auto q = query.dimensions(), k = key.dimensions(), v = value.dimensions(), c = cotangent.dimensions(),
             d = dquery->dimensions();
  if (q.size() != 4 || k.size() != 4 || v.size() != 4 || c.size() != 4 || d.size() != 4) {
    return kErrors.invalid_shapes();
  }
  const int64_t batch = c[0], tokens = c[1], heads = c[2], values = c[3];
  TokenGradientCall call{};
  if (!set_chunks(&call, table, batch, tokens)) return kErrors.invalid_shapes();
  const int64_t chunks = call.chunks, state_size = kKeyDim * values;
  const auto belongs = [=](const auto& x, int64_t channels) {
    return x[0] == batch && x[1] == tokens && x[2] > 0 && heads % x[2] == 0 && x[3] == channels;
  };
  const auto has_size = [](const auto& x, int64_t size) { return count(x) == size; };
  const bool has_delta = beta.element_count() != 0;
  const int64_t head_tokens = batch * tokens * heads, gradient_size = batch * tokens * d[2] * kKeyDim;
  const bool in_pairs = 2 * d[2] == heads;
  const auto has_pairs = [=](int64_t field_heads) { return d[2] % field_heads == 0; };
  if (!belongs(q, kKeyDim) || !belongs(k, kKeyDim) || !belongs(v, values) || (values != 64 && values != 128) ||
      !has_size(writes, has_delta ? count(cotangent) : count(value)) ||
      !has_size(dwrites, count(cotangent)) || !has_size(*dvalue, has_delta ? count(cotangent) : 0) ||
      !has_size(states, batch * heads * chunks * state_size) || !has_size(dstates, count(states)) ||
      !has_size(beta, has_delta ? head_tokens : 0) || !has_size(*dbeta, count(beta)) ||
      (gates.element_count() != 0 && (!has_size(gates, head_tokens) || !has_size(*dgates, head_tokens))) ||
      !(in_pairs ? has_delta && has_pairs(q[2]) && has_pairs(k[2]) : d[2] == heads) ||
      !has_size(*dquery, gradient_size) || !has_size(*dkey, gradient_size)) {
    return kErrors.invalid_shapes();
  }
  const auto float_or_null = [](auto& x) {
    return x->element_type() == ffi::F32 ? static_cast<float*>(x->untyped_data()) : nullptr;
  };
  call.gates = data_or_null(gates), call.beta = data_or_null(beta);
  call.value = static_cast<const __nv_bfloat16*>(value.untyped_data());
  call.dvalue = static_cast<__nv_bfloat16*>(dvalue->untyped_data());
  call.dquery = float_or_null(dquery), call.dkey = float_or_null(dkey);
  call.dgates = dgates->typed_data(), call.dbeta = dbeta->typed_data();
  call.heads = int(heads);
  call.query_heads = int(q[2]), call.key_heads = int(k[2]), call.value_heads = int(v[2]), call.scale = scale;
  TokenGradientMaps maps;
  const Tile loaded = {64, kChunkTokens, CU_TENSOR_MAP_SWIZZLE_128B}, stored = {64, 16, CU_TENSOR_MAP_SWIZZLE_128B, true};
  const Size all_values = {heads * values, tokens, batch}, all_states = {kKeyDim, values, batch * heads * chunks};
  const Size all_keys = {d[2] * kKeyDim, tokens, batch};
  const char* message = nullptr;
  const auto add = [&message](TensorMap* map, const void* data, const Size& size, const Tile& tile) {
    if (!message) message = encode(map, data, size, tile);
  };
  const auto add_tokens = [&message](TensorMap* map, const void* data, const Size& size, const Tile& tile) {
    if (!message) message = encode_tokens(map, data, size, tile);
  };
  add_tokens(&maps.query, query.untyped_data(), {q[2] * kKeyDim, tokens, batch}, loaded);
  add_tokens(&maps.key, key.untyped_data(), {k[2] * kKeyDim, tokens, batch}, loaded);
  add_tokens(&maps.writes, writes.untyped_data(), {(has_delta ? heads : v[2]) * values, tokens, batch}, loaded);
  add_tokens(&maps.cotangent, cotangent.untyped_data(), all_values, loaded);
  add_tokens(&maps.dwrites, dwrites.untyped_data(), all_values, loaded);
  add(&maps.states, states.untyped_data(), all_states, loaded);
  add(&maps.dstates, dstates.untyped_data(), all_states, loaded);
  if (!call.dquery) add_tokens(&maps.dquery, dquery->untyped_data(), all_keys, stored);
  if (!call.dkey) add_tokens(&maps.dkey, dkey->untyped_data(), all_keys, stored);
  if (message) return kErrors.internal("tensor map", message);
  return values == 64 ? launch<64>(stream, call, maps, batch, in_pairs)
                      : launch<128>(stream, call, maps, batch, in_pairs);
}

}  // namespace

EJKERNEL_FFI_HANDLER(ejkernel_delta_rule_token_gradients, delta_rule_token_gradients, "scale");

}  // namespace ejkernel::delta_rule
