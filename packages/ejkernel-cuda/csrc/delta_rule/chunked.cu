// The XLA FFI handlers of the scans, with the delta rule and without: then beta is an empty array, and tokens may have
// factors on what they write.
#include "delta_rule/chunked.cuh"
#include "delta_rule/handler.cuh"
#include "delta_rule/reverse.cuh"
#include "delta_rule/row_states.cuh"
#include "delta_rule/segment_states.cuh"

namespace ejkernel::delta_rule {
namespace {

template <typename L, typename Kernel>
ffi::Error launch(cudaStream_t stream, Kernel kernel, const DeltaCall& call, const Maps& maps, int64_t batch) {
  const cudaError_t error =
      cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, L::kSharedMemoryBytes);
  if (error != cudaSuccess) return kErrors.internal("shared memory", cudaGetErrorString(error));
  const int64_t blocks = batch * call.heads * call.segments * (call.value_dim / kBlockValues);
  kernel<<<int(blocks), kThreads, L::kSharedMemoryBytes, stream>>>(call, maps);
  return kErrors.check("launch", cudaGetLastError());
}

// The arrays that both scans read: the forward pass's values, or the gradient of its output in their place.
struct Inputs {
  const Bf16 &query, &key, &value;
  const F32 &gates, &beta, &initial;
  const S32& table;
};

// Describes a scan. Returns false if the shapes do not belong together.
bool describe_call(DeltaCall* call, const Inputs& in, F32& final, float scale, int segments) {
  const auto q = in.query.dimensions(), k = in.key.dimensions(), v = in.value.dimensions(), f = final.dimensions();
  if (q.size() != 4 || k.size() != 4 || v.size() != 4 || f.size() != 4) return false;
  const int64_t batch = q[0], tokens = q[1], heads = f[1], values = v[3], head_tokens = batch * tokens * heads;
  const bool is_packed = in.table.element_count() != 0;
  const auto divides = [heads](int64_t field_heads) { return field_heads > 0 && heads % field_heads == 0; };
  const auto has_call_shape = [=](const auto& x) { return x[0] == batch && x[1] == tokens && divides(x[2]); };
  if (!has_call_shape(q) || !has_call_shape(k) || !has_call_shape(v) || q[3] != kKeyDim ||
      k[3] != kKeyDim || values % kBlockValues ||
      (in.gates.element_count() != 0 && count(in.gates) != head_tokens) ||
      (in.beta.element_count() != 0 && count(in.beta) != head_tokens) ||
      (in.initial.element_count() != 0 && count(in.initial) != count(final)) ||
      (!is_packed && f[0] != batch) || count(final) != f[0] * heads * kKeyDim * values || segments < 1 ||
      !set_chunks(call, in.table, batch, tokens)) {
    return false;
  }
  call->heads = int(heads), call->value_dim = int(values), call->sequences = int(f[0]), call->segments = segments;
  call->query_heads = int(q[2]), call->key_heads = int(k[2]), call->value_heads = int(v[2]);
  call->keys = static_cast<const __nv_bfloat16*>(in.key.untyped_data());
  call->gates = data_or_null(in.gates), call->beta = data_or_null(in.beta);
  call->initial_states = data_or_null(in.initial);
  call->final_states = final.typed_data(), call->scale = scale;
  return true;
}

// Encodes the maps of a scan: without `states` and `writes` for a kernel that stores neither.
const char* encode_maps(Maps* maps, const DeltaCall& call, const Inputs& in, Bf16* output, Bf16* writes, Bf16* states) {
  const int64_t batch = in.query.dimensions()[0], tokens = call.tokens, values = int64_t(call.heads) * call.value_dim;
  const Tile loaded = {64, kChunkTokens, CU_TENSOR_MAP_SWIZZLE_128B};
  const Tile rows = {16, kChunkTokens, CU_TENSOR_MAP_SWIZZLE_NONE, true};
  const char* message = nullptr;
  const auto add = [&](TensorMap* map, const auto& array, int64_t columns, const Tile& tile) {
    if (!message) message = encode_tokens(map, array.untyped_data(), {columns, tokens, batch}, tile);
  };
  add(&maps->query, in.query, call.query_heads * kKeyDim, loaded);
  add(&maps->key, in.key, call.key_heads * kKeyDim, loaded);
  add(&maps->value, in.value, int64_t(call.value_heads) * call.value_dim, loaded);
  if (output) add(&maps->output, *output, values, rows);
  if (writes) add(&maps->writes, *writes, values, rows);
  if (!message && states) {
    message = encode(&maps->states, states->untyped_data(), {kKeyDim, call.value_dim, batch * call.heads * call.chunks},
                     {64, 16, CU_TENSOR_MAP_SWIZZLE_128B});
  }
  return message;
}

// Whether states are those before all chunks.
bool has_states_shape(const DeltaCall& call, const Inputs& in, const Bf16& states) {
  return count(states) == in.query.dimensions()[0] * call.heads * call.chunks * kKeyDim * call.value_dim;
}

int64_t output_size(const DeltaCall& call, const Inputs& in) {
  return in.query.dimensions()[0] * call.tokens * call.heads * call.value_dim;
}

// Whether factors are [B, T, H] and a skip [H], or absent, as they are with the delta rule; `values` is [B, T, H, V].
bool has_factors_and_skip_shapes(const DeltaCall& call, const F32& factors, const F32& skip, const Bf16& values) {
  const bool has_delta = call.beta != nullptr;
  return (factors.element_count() == 0 || (!has_delta && count(factors) * call.value_dim == count(values))) &&
         (skip.element_count() == 0 || (!has_delta && count(skip) == call.heads));
}

// The results from which the states before segments are computed: empty with the delta rule, or for one segment.
struct SegmentResults {
  F32 &part_states, &part_decays, &states;
};

// Launches the kernels that compute the states before segments, if there are any.
template <bool Reverse>
ffi::Error launch_segments(cudaStream_t stream, DeltaCall* call, const Maps& maps, int64_t batch,
                           const SegmentResults& results, bool has_delta) {
  const int64_t segments = has_delta ? 0 : batch * call->heads * (call->segments - 1);
  const int64_t state_size = int64_t(kKeyDim) * call->value_dim;
  if (count(results.states) != segments * state_size ||
      count(results.part_states) != segments * kSegmentParts * state_size ||
      count(results.part_decays) != segments * (kSegmentParts + 1)) {
    return kErrors.invalid_shapes();
  }
  if (segments == 0) return ffi::Error::Success();
  SegmentCall segment_call;
  static_cast<DeltaCall&>(segment_call) = *call;
  segment_call.part_states = results.part_states.typed_data(), segment_call.folded = results.states.typed_data();
  segment_call.part_decays = results.part_decays.typed_data();
  constexpr int kBytes = SegmentLayout::kSharedMemoryBytes;
  const cudaError_t error =
      cudaFuncSetAttribute(segment_states_kernel<Reverse>, cudaFuncAttributeMaxDynamicSharedMemorySize, kBytes);
  if (error != cudaSuccess) return kErrors.internal("shared memory", cudaGetErrorString(error));
  const int64_t blocks = segments * kSegmentParts * (call->value_dim / kBlockValues);
  segment_states_kernel<Reverse><<<int(blocks), kSegmentThreads, kBytes, stream>>>(segment_call, maps);
  const int64_t threads = batch * call->heads * state_size / 4;
  fold_segments_kernel<<<int(threads / kFoldThreads), kFoldThreads, 0, stream>>>(segment_call);
  call->segment_states = segment_call.folded;
  return kErrors.check("launch", cudaGetLastError());
}

template <bool StoresStates>
ffi::Error launch_forward(cudaStream_t stream, const DeltaCall& call, const Maps& maps, int64_t batch, bool has_delta) {
  return has_delta ? launch<ForwardLayout<StoresStates, true>>(stream, delta_kernel<StoresStates, true>, call, maps, batch)
                   : launch<ForwardLayout<StoresStates, false>>(stream, delta_kernel<StoresStates, false>, call, maps,
                                                                batch);
}

ffi::Error delta_rule(cudaStream_t stream, Bf16 query, Bf16 key, Bf16 value, F32 gates, F32 beta, F32 initial,
                      F32 factors, F32 skip, S32 table, ffi::Result<Bf16> output, ffi::Result<F32> final, ffi::Result<Bf16> writes,
                      ffi::Result<Bf16> states, ffi::Result<F32> part_states, ffi::Result<F32> part_decays,
                      ffi::Result<F32> segment_states, float scale, int segments) {
  if (output->element_count() == 0) return ffi::Error::Success();
  const Inputs in{query, key, value, gates, beta, initial, table};
  DeltaCall call{};
  if (!describe_call(&call, in, *final, scale, segments)) return kErrors.invalid_shapes();
  const int64_t batch = query.dimensions()[0];
  const bool stores = states->element_count() != 0, has_delta = call.beta != nullptr;
  if (count(*output) != output_size(call, in) ||
      (stores && (count(*writes) != (has_delta ? count(*output) : 0) || !has_states_shape(call, in, *states))) ||
      !has_factors_and_skip_shapes(call, factors, skip, *output)) {
    return kErrors.invalid_shapes();
  }
  if (!has_delta) call.beta = data_or_null(factors), call.skip = data_or_null(skip);
  Maps maps{};
  const char* message = encode_maps(&maps, call, in, &*output, stores && has_delta ? &*writes : nullptr,
                                    stores ? &*states : nullptr);
  if (message) return kErrors.internal("tensor map", message);
  const ffi::Error error = launch_segments<false>(stream, &call, maps, batch,
                                                  {*part_states, *part_decays, *segment_states}, has_delta);
  if (error.failure()) return error;
  return stores ? launch_forward<true>(stream, call, maps, batch, has_delta)
                : launch_forward<false>(stream, call, maps, batch, has_delta);
}

// The reverse scan: the output's gradient has the place of the values, and the final states' that of the first ones.
ffi::Error delta_rule_reverse(cudaStream_t stream, Bf16 query, Bf16 key, Bf16 cotangent, F32 gates, F32 beta,
                              F32 final_cotangent, F32 factors, F32 skip, S32 table, ffi::Result<Bf16> dwrites,
                              ffi::Result<Bf16> dstates, ffi::Result<F32> dinitial, ffi::Result<F32> part_states,
                              ffi::Result<F32> part_decays, ffi::Result<F32> segment_states, float scale,
                              int segments) {
  if (dwrites->element_count() == 0) return ffi::Error::Success();
  const Inputs in{query, key, cotangent, gates, beta, final_cotangent, table};
  DeltaCall call{};
  if (!describe_call(&call, in, *dinitial, scale, segments) || count(*dwrites) != output_size(call, in) ||
      !has_states_shape(call, in, *dstates) ||
      !has_factors_and_skip_shapes(call, factors, skip, *dwrites)) {
    return kErrors.invalid_shapes();
  }
  const bool has_delta = call.beta != nullptr;
  if (!has_delta) call.beta = data_or_null(factors), call.skip = data_or_null(skip);
  Maps maps{};
  const char* message = encode_maps(&maps, call, in, nullptr, &*dwrites, &*dstates);
  if (message) return kErrors.internal("tensor map", message);
  const int64_t batch = query.dimensions()[0];
  const ffi::Error error = launch_segments<true>(stream, &call, maps, batch,
                                                 {*part_states, *part_decays, *segment_states}, has_delta);
  if (error.failure()) return error;
  return has_delta ? launch<ReverseLayout<true>>(stream, delta_reverse_kernel<true>, call, maps, batch)
                   : launch<ReverseLayout<false>>(stream, delta_reverse_kernel<false>, call, maps, batch);
}

}  // namespace

EJKERNEL_FFI_HANDLER(ejkernel_delta_rule, delta_rule, "scale", "segments");
EJKERNEL_FFI_HANDLER(ejkernel_delta_rule_reverse, delta_rule_reverse, "scale", "segments");
EJKERNEL_HANDLER_OUTSIDE_GRAPHS(ejkernel_row_states, row_states<false>, "scale");
EJKERNEL_HANDLER_OUTSIDE_GRAPHS(ejkernel_row_states_reverse, row_states<true>, "scale");
EJKERNEL_HANDLER_OUTSIDE_GRAPHS(ejkernel_delta_rule_in_segments, delta_rule, "scale", "segments");
EJKERNEL_HANDLER_OUTSIDE_GRAPHS(ejkernel_delta_rule_reverse_in_segments, delta_rule_reverse, "scale", "segments");

}  // namespace ejkernel::delta_rule
