// The XLA FFI handlers with gates per key channel, with the delta rule and without: what the scans read, and the scans.
// Without the delta rule beta, k E and T are empty arrays.
#include "delta_rule/channel_pairs.cuh"
#include "delta_rule/channel_reverse.cuh"
#include "delta_rule/channel_scan.cuh"
#include "delta_rule/channel_segments.cuh"
#include "delta_rule/handler.cuh"

namespace ejkernel::delta_rule {
namespace {

template <bool Delta>
ffi::Error launch_prepare(cudaStream_t stream, const PrepareCall& call, const PrepareMaps& maps, int64_t batch) {
  using L = PrepareLayout<Delta>;
  const cudaError_t error =
      cudaFuncSetAttribute(channel_prepare_kernel<Delta>, cudaFuncAttributeMaxDynamicSharedMemorySize, L::kBytes);
  if (error != cudaSuccess) return kErrors.internal("shared memory", cudaGetErrorString(error));
  const int64_t blocks = batch * call.heads * call.chunks;
  channel_prepare_kernel<Delta><<<int(blocks), L::kThreads, L::kBytes, stream>>>(call, maps);
  return kErrors.check("launch", cudaGetLastError());
}

// Results: q E, k F and k E [B, T, H, K], A and T [B, H, chunks, 64, 64], E of the chunks' last tokens [B, H, chunks, K].
ffi::Error channel_prepare(cudaStream_t stream, Bf16 query, Bf16 key, F32 gates, F32 beta, S32 table,
                           ffi::Result<Bf16> decayed_query, ffi::Result<Bf16> key_to_end, ffi::Result<Bf16> decayed_key,
                           ffi::Result<Bf16> scores, ffi::Result<Bf16> inverse, ffi::Result<F32> decay) {
  if (decayed_query->element_count() == 0) return ffi::Error::Success();
  const auto q = query.dimensions(), k = key.dimensions(), g = gates.dimensions();
  if (q.size() != 4 || k.size() != 4 || g.size() != 4) return kErrors.invalid_shapes();
  const int64_t batch = g[0], tokens = g[1], heads = g[2];
  PrepareCall call{};
  if (!set_chunks(&call, table, batch, tokens)) return kErrors.invalid_shapes();
  const int64_t chunks = call.chunks;
  const int64_t state_count = batch * heads * chunks, pairs = state_count * kChunkTokens * kChunkTokens;
  const bool has_delta = beta.element_count() != 0;
  const auto belongs = [=](const auto& x) {
    return x[0] == batch && x[1] == tokens && x[2] > 0 && heads % x[2] == 0 && x[3] == kKeyDim;
  };
  if (!belongs(q) || !belongs(k) || g[3] != kKeyDim || (has_delta && count(beta) != batch * tokens * heads) ||
      count(*decayed_query) != count(gates) || count(*key_to_end) != count(gates) ||
      count(*decayed_key) != (has_delta ? count(gates) : 0) || count(*scores) != pairs ||
      count(*inverse) != (has_delta ? pairs : 0) || count(*decay) != state_count * kKeyDim) {
    return kErrors.invalid_shapes();
  }
  call.beta = data_or_null(beta), call.decay = decay->typed_data();
  call.heads = int(heads), call.query_heads = int(q[2]), call.key_heads = int(k[2]);
  PrepareMaps maps;
  const Tile loaded = {64, kChunkTokens, CU_TENSOR_MAP_SWIZZLE_128B}, stored = {64, 16, CU_TENSOR_MAP_SWIZZLE_128B, true};
  const Size all_keys = {heads * kKeyDim, tokens, batch}, all_pairs = {kChunkTokens, kChunkTokens, state_count};
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
      {2 * kKeyDim, kChunkTokens, CU_TENSOR_MAP_SWIZZLE_NONE});
  add_tokens(&maps.decayed_query, decayed_query->untyped_data(), all_keys, stored);
  add_tokens(&maps.key_to_end, key_to_end->untyped_data(), all_keys, stored);
  add(&maps.scores, scores->untyped_data(), all_pairs, stored);
  if (has_delta) add_tokens(&maps.decayed_key, decayed_key->untyped_data(), all_keys, stored);
  if (has_delta) add(&maps.inverse, inverse->untyped_data(), all_pairs, stored);
  if (message) return kErrors.internal("tensor map", message);
  return has_delta ? launch_prepare<true>(stream, call, maps, batch) : launch_prepare<false>(stream, call, maps, batch);
}

// The arrays that both scans read: what was prepared, and the forward pass's values or the gradient of its output.
struct Inputs {
  const Bf16 &decayed_query, &key_to_end, &decayed_key, &scores, &inverse;
  const F32& decay;
  const Bf16& value;
  const F32 &beta, &initial;
  const S32& table;
};

// Describes a scan. Returns false if the shapes do not belong together.
bool describe_call(ChannelCall* call, const Inputs& in, F32& final, float scale, int segments) {
  const auto q = in.decayed_query.dimensions(), v = in.value.dimensions(), f = final.dimensions();
  if (q.size() != 4 || v.size() != 4 || f.size() != 4) return false;
  const int64_t batch = q[0], tokens = q[1], heads = q[2], values = v[3];
  if (!set_chunks(call, in.table, batch, tokens)) return false;
  const int64_t chunk_heads = batch * heads * call->chunks;
  const int64_t keys = batch * tokens * heads * kKeyDim, pairs = chunk_heads * kChunkTokens * kChunkTokens;
  const bool has_delta = in.beta.element_count() != 0;
  if (q[3] != kKeyDim || v[0] != batch || v[1] != tokens || v[2] <= 0 || heads % v[2] || values % kBlockValues ||
      f[1] != heads || (!call->table && f[0] != batch) || count(final) != f[0] * heads * kKeyDim * values || segments < 1 || count(in.key_to_end) != keys ||
      count(in.decayed_key) != (has_delta ? keys : 0) || count(in.scores) != pairs ||
      count(in.inverse) != (has_delta ? pairs : 0) || count(in.decay) != chunk_heads * kKeyDim ||
      (has_delta && count(in.beta) != batch * tokens * heads) ||
      (in.initial.element_count() != 0 && count(in.initial) != count(final))) {
    return false;
  }
  call->heads = int(heads), call->value_dim = int(values), call->sequences = int(f[0]);
  call->segments = segments;
  call->query_heads = call->key_heads = int(heads), call->value_heads = int(v[2]), call->scale = scale;
  call->decay = in.decay.typed_data(), call->beta = data_or_null(in.beta);
  call->initial_states = data_or_null(in.initial), call->final_states = final.typed_data();
  return true;
}

// Encodes the maps of a scan: without `output`, `writes` or `states` for a kernel that does not store them.
const char* encode_maps(ChannelMaps* maps, const ChannelCall& call, const Inputs& in, Bf16* output, Bf16* writes,
                        Bf16* states) {
  const int64_t batch = in.decayed_query.dimensions()[0], tokens = call.tokens, heads = call.heads;
  const Tile loaded = {64, kChunkTokens, CU_TENSOR_MAP_SWIZZLE_128B};
  const Tile rows = {16, kChunkTokens, CU_TENSOR_MAP_SWIZZLE_NONE, true};
  const Size keys = {heads * kKeyDim, tokens, batch}, values = {heads * call.value_dim, tokens, batch};
  const Size pairs = {kChunkTokens, kChunkTokens, batch * heads * call.chunks};
  const char* message = nullptr;
  const auto add = [&message](TensorMap* map, const auto& array, const Size& size, const Tile& tile) {
    if (!message) message = encode(map, array.untyped_data(), size, tile);
  };
  const auto add_tokens = [&message](TensorMap* map, const auto& array, const Size& size, const Tile& tile) {
    if (!message) message = encode_tokens(map, array.untyped_data(), size, tile);
  };
  add_tokens(&maps->query, in.decayed_query, keys, loaded), add_tokens(&maps->key, in.key_to_end, keys, loaded);
  add_tokens(&maps->value, in.value, {int64_t(call.value_heads) * call.value_dim, tokens, batch}, loaded);
  add(&maps->scores, in.scores, pairs, loaded);
  if (call.beta) add(&maps->inverse, in.inverse, pairs, loaded), add_tokens(&maps->decayed_key, in.decayed_key, keys, loaded);
  if (output) add_tokens(&maps->output, *output, values, rows);
  if (writes) add_tokens(&maps->writes, *writes, values, rows);
  if (states) {
    add(&maps->states, *states, {kKeyDim, call.value_dim, pairs.batch}, {64, 16, CU_TENSOR_MAP_SWIZZLE_128B});
  }
  return message;
}

// Whether states are those before all chunks.
bool has_states_shape(const ChannelCall& call, const Inputs& in, const Bf16& states) {
  return count(states) == in.decayed_query.dimensions()[0] * call.heads * call.chunks * kKeyDim * call.value_dim;
}

int64_t output_size(const ChannelCall& call, const Inputs& in) {
  return in.decayed_query.dimensions()[0] * call.tokens * call.heads * call.value_dim;
}

template <typename L, typename Kernel>
ffi::Error launch(cudaStream_t stream, Kernel kernel, const ChannelCall& call, const ChannelMaps& maps, int64_t batch) {
  const cudaError_t error =
      cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, L::kSharedMemoryBytes);
  if (error != cudaSuccess) return kErrors.internal("shared memory", cudaGetErrorString(error));
  const int64_t blocks = batch * call.heads * call.segments * (call.value_dim / kBlockValues);
  kernel<<<int(blocks), kChannelThreads, L::kSharedMemoryBytes, stream>>>(call, maps);
  return kErrors.check("launch", cudaGetLastError());
}

// Finds where the scans of segments begin, with the delta rule; `early_steps` is empty otherwise, or for one segment.
template <bool Reverse>
ffi::Error launch_transitions(cudaStream_t stream, ChannelCall* call, const ChannelMaps& maps, int64_t batch,
                              S32& early_steps) {
  const int64_t blocks = call->beta ? batch * call->heads * (call->segments - 1) * 2 : 0;
  if (count(early_steps) != blocks) return kErrors.invalid_shapes();
  if (blocks == 0) return ffi::Error::Success();
  TransitionCall transition_call;
  static_cast<ChannelCall&>(transition_call) = *call;
  transition_call.found = early_steps.typed_data(), call->early_steps = transition_call.found;
  constexpr int kBytes = TransitionLayout::kSharedMemoryBytes;
  const cudaError_t error =
      cudaFuncSetAttribute(channel_transitions_kernel<Reverse>, cudaFuncAttributeMaxDynamicSharedMemorySize, kBytes);
  if (error != cudaSuccess) return kErrors.internal("shared memory", cudaGetErrorString(error));
  channel_transitions_kernel<Reverse><<<int(blocks), kChannelThreads, kBytes, stream>>>(transition_call, maps);
  return kErrors.check("launch", cudaGetLastError());
}

template <bool StoresStates, bool Delta>
ffi::Error launch_forward(cudaStream_t stream, const ChannelCall& call, const ChannelMaps& maps, int64_t batch) {
  return launch<ChannelLayout<StoresStates, Delta>>(stream, channel_kernel<StoresStates, Delta>, call, maps, batch);
}

template <bool Delta>
ffi::Error launch_reverse(cudaStream_t stream, const ChannelCall& call, const ChannelMaps& maps, int64_t batch) {
  return launch<ChannelLayout<true, Delta>>(stream, channel_reverse_kernel<Delta>, call, maps, batch);
}

ffi::Error channel_scan(cudaStream_t stream, Bf16 decayed_query, Bf16 key_to_end, Bf16 decayed_key, Bf16 scores,
                        Bf16 inverse, F32 decay, Bf16 value, F32 beta, F32 initial, S32 table, ffi::Result<Bf16> output,
                        ffi::Result<F32> final, ffi::Result<Bf16> writes, ffi::Result<Bf16> states,
                        ffi::Result<S32> early_steps, float scale, int segments) {
  if (output->element_count() == 0) return ffi::Error::Success();
  const Inputs in{decayed_query, key_to_end, decayed_key, scores, inverse, decay, value, beta, initial, table};
  ChannelCall call{};
  if (!describe_call(&call, in, *final, scale, segments)) return kErrors.invalid_shapes();
  const int64_t batch = decayed_query.dimensions()[0];
  const bool stores = states->element_count() != 0;
  if (count(*output) != output_size(call, in) ||
      (stores && (count(*writes) != (call.beta ? count(*output) : 0) || !has_states_shape(call, in, *states)))) {
    return kErrors.invalid_shapes();
  }
  ChannelMaps maps;
  const char* message =
      encode_maps(&maps, call, in, &*output, stores && call.beta ? &*writes : nullptr, stores ? &*states : nullptr);
  if (message) return kErrors.internal("tensor map", message);
  const ffi::Error error = launch_transitions<false>(stream, &call, maps, batch, *early_steps);
  if (error.failure()) return error;
  const auto launch_one = stores ? (call.beta ? launch_forward<true, true> : launch_forward<true, false>)
                                 : (call.beta ? launch_forward<false, true> : launch_forward<false, false>);
  return launch_one(stream, call, maps, batch);
}

// The reverse scan: the output's gradient has the place of the values, and the final states' that of the first ones.
ffi::Error channel_scan_reverse(cudaStream_t stream, Bf16 decayed_query, Bf16 key_to_end, Bf16 decayed_key, Bf16 scores,
                                Bf16 inverse, F32 decay, Bf16 cotangent, F32 beta, F32 final_cotangent, S32 table,
                                ffi::Result<Bf16> dwrites, ffi::Result<Bf16> dstates, ffi::Result<F32> dinitial,
                                ffi::Result<S32> early_steps, float scale, int segments) {
  if (dwrites->element_count() == 0) return ffi::Error::Success();
  const Inputs in{decayed_query, key_to_end, decayed_key, scores, inverse, decay, cotangent, beta, final_cotangent, table};
  ChannelCall call{};
  if (!describe_call(&call, in, *dinitial, scale, segments) || count(*dwrites) != output_size(call, in) ||
      !has_states_shape(call, in, *dstates)) {
    return kErrors.invalid_shapes();
  }
  ChannelMaps maps;
  const char* message = encode_maps(&maps, call, in, nullptr, &*dwrites, &*dstates);
  if (message) return kErrors.internal("tensor map", message);
  const int64_t batch = decayed_query.dimensions()[0];
  const ffi::Error error = launch_transitions<true>(stream, &call, maps, batch, *early_steps);
  if (error.failure()) return error;
  return call.beta ? launch_reverse<true>(stream, call, maps, batch) : launch_reverse<false>(stream, call, maps, batch);
}

}  // namespace

EJKERNEL_FFI_HANDLER(ejkernel_channel_prepare, channel_prepare);
EJKERNEL_FFI_HANDLER(ejkernel_channel_scan, channel_scan, "scale", "segments");
EJKERNEL_FFI_HANDLER(ejkernel_channel_scan_reverse, channel_scan_reverse, "scale", "segments");
EJKERNEL_HANDLER_OUTSIDE_GRAPHS(ejkernel_channel_scan_in_segments, channel_scan, "scale", "segments");
EJKERNEL_HANDLER_OUTSIDE_GRAPHS(ejkernel_channel_scan_reverse_in_segments, channel_scan_reverse, "scale", "segments");

}  // namespace ejkernel::delta_rule
