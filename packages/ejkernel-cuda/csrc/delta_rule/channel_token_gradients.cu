// The XLA FFI handler of the gradients of tokens with gates per key channel.
#include "delta_rule/channel_token_gradients.cuh"
#include "delta_rule/handler.cuh"

namespace ejkernel::delta_rule {
namespace {

template <int V, bool Delta>
ffi::Error launch(cudaStream_t stream, const ChannelGradientCall& call, const ChannelGradientMaps& maps) {
  constexpr int kBytes = ChannelGradientLayout<V, Delta>::kBytes;
  const cudaError_t error = cudaFuncSetAttribute(channel_token_gradients_kernel<V, Delta>,
                                                 cudaFuncAttributeMaxDynamicSharedMemorySize, kBytes);
  if (error != cudaSuccess) return kErrors.internal("shared memory", cudaGetErrorString(error));
  const int64_t blocks = int64_t(call.batch) * call.heads * call.chunks * (kKeyDim / kBlockChannels);
  channel_token_gradients_kernel<V, Delta><<<int(blocks), kGradientThreads, kBytes, stream>>>(call, maps);
  return kErrors.check("launch", cudaGetLastError());
}

// Operands and results as those of `delta_rule_token_gradients`, but for gates and their gradients, [B, T, H, K], and
// dbeta, [2, B, T, H]: its sums over both halves of the key channels.
ffi::Error channel_token_gradients(cudaStream_t stream, Bf16 query, Bf16 key, Bf16 value, Bf16 writes, Bf16 cotangent,
                                   Bf16 dwrites, Bf16 states, Bf16 dstates, F32 gates, F32 beta, S32 table,
                                   ffi::Result<ffi::AnyBuffer> dquery, ffi::Result<ffi::AnyBuffer> dkey,
                                   ffi::Result<Bf16> dvalue, ffi::Result<F32> dgates, ffi::Result<F32> dbeta,
                                   float scale) {
  if (cotangent.element_count() == 0) return ffi::Error::Success();
  const auto q = query.dimensions(), k = key.dimensions(), v = value.dimensions(), c = cotangent.dimensions();
  if (q.size() != 4 || k.size() != 4 || v.size() != 4 || c.size() != 4) return kErrors.invalid_shapes();
  const int64_t batch = c[0], tokens = c[1], heads = c[2], values = c[3];
  ChannelGradientCall call{};
  if (!set_chunks(&call, table, batch, tokens)) return kErrors.invalid_shapes();
  const int64_t chunks = call.chunks, state_size = kKeyDim * values;
  const auto belongs = [=](const auto& x, int64_t channels) {
    return x[0] == batch && x[1] == tokens && x[2] > 0 && heads % x[2] == 0 && x[3] == channels;
  };
  const auto has_size = [](const auto& x, int64_t size) { return count(x) == size; };
  const bool has_delta = beta.element_count() != 0;
  const int64_t head_tokens = batch * tokens * heads;
  if (!belongs(q, kKeyDim) || !belongs(k, kKeyDim) || !belongs(v, values) || (values != 64 && values != 128) ||
      !has_size(writes, has_delta ? count(cotangent) : count(value)) || !has_size(dwrites, count(cotangent)) ||
      !has_size(*dvalue, has_delta ? count(cotangent) : 0) ||
      !has_size(states, batch * heads * chunks * state_size) || !has_size(dstates, count(states)) ||
      !has_size(beta, has_delta ? head_tokens : 0) || !has_size(*dbeta, 2 * count(beta)) ||
      !has_size(gates, head_tokens * kKeyDim) || !has_size(*dgates, count(gates)) ||
      !has_size(*dquery, head_tokens * kKeyDim) || !has_size(*dkey, head_tokens * kKeyDim)) {
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
  call.batch = int(batch), call.heads = int(heads);
  call.query_heads = int(q[2]), call.key_heads = int(k[2]), call.value_heads = int(v[2]), call.scale = scale;
  ChannelGradientMaps maps;
  const Tile loaded = {64, kChunkTokens, CU_TENSOR_MAP_SWIZZLE_128B}, stored = {64, 16, CU_TENSOR_MAP_SWIZZLE_128B, true};
  const Size all_values = {heads * values, tokens, batch}, all_states = {kKeyDim, values, batch * heads * chunks};
  const Size all_keys = {heads * kKeyDim, tokens, batch};
  const char* message = nullptr;
  const auto add = [&message](TensorMap* map, const void* data, const Size& size, const Tile& tile) {
    if (!message) message = encode(map, data, size, tile);
  };
  const auto add_tokens = [&message](TensorMap* map, const void* data, const Size& size, const Tile& tile) {
    if (!message) message = encode_tokens(map, data, size, tile);
  };
  add_tokens(&maps.query, query.untyped_data(), {q[2] * kKeyDim, tokens, batch}, loaded);
  add_tokens(&maps.key, key.untyped_data(), {k[2] * kKeyDim, tokens, batch}, loaded);
  add_tokens(&maps.gates, gates.untyped_data(), {2 * all_keys.columns, tokens, batch},
      {2 * kBlockChannels, kChunkTokens, CU_TENSOR_MAP_SWIZZLE_NONE});
  add_tokens(&maps.writes, writes.untyped_data(), {(has_delta ? heads : v[2]) * values, tokens, batch}, loaded);
  add_tokens(&maps.cotangent, cotangent.untyped_data(), all_values, loaded);
  if (has_delta) add_tokens(&maps.dwrites, dwrites.untyped_data(), all_values, loaded);
  add(&maps.states, states.untyped_data(), all_states, loaded);
  add(&maps.dstates, dstates.untyped_data(), all_states, loaded);
  if (!call.dquery) add_tokens(&maps.dquery, dquery->untyped_data(), all_keys, stored);
  if (!call.dkey) add_tokens(&maps.dkey, dkey->untyped_data(), all_keys, stored);
  if (message) return kErrors.internal("tensor map", message);
  if (values == 64) return has_delta ? launch<64, true>(stream, call, maps) : launch<64, false>(stream, call, maps);
  return has_delta ? launch<128, true>(stream, call, maps) : launch<128, false>(stream, call, maps);
}

}  // namespace

EJKERNEL_FFI_HANDLER(ejkernel_channel_token_gradients, channel_token_gradients, "scale");

}  // namespace ejkernel::delta_rule
