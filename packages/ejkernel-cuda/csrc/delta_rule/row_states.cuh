// The XLA FFI handlers of the states that rows add to zeros, without outputs and without the delta rule: what a device
// tells others about its tokens. They are the states before a segment after all tokens (segment_states.cuh): the table of
// chunks has chunks without tokens in the place of that segment's.
#pragma once

#include "delta_rule/handler.cuh"
#include "delta_rule/segment_states.cuh"

namespace ejkernel::delta_rule {
namespace {

// The arrays of a call: keys and values [B, T, heads, ...], or in reverse queries and the gradient of the output.
struct RowInputs {
  const Bf16 &rows, &value;
  const F32 &gates, &factors;
  const S32& table;
};

// Results: states and decays of the parts of segments, and the states after segments [B, segments, H, K, V].
struct RowResults {
  F32 &part_states, &part_decays, &states;
};

// Describes a call. Returns false if the shapes do not belong together.
bool describe_row_states(SegmentCall* call, const RowInputs& in, const RowResults& out, float scale) {
  const auto k = in.rows.dimensions(), v = in.value.dimensions(), s = out.states.dimensions();
  if (k.size() != 4 || v.size() != 4 || s.size() != 5) return false;
  const int64_t batch = k[0], tokens = k[1], segments = s[1], heads = s[2], values = v[3];
  const auto divides = [heads](int64_t field_heads) { return field_heads > 0 && heads % field_heads == 0; };
  if (!divides(k[2]) || !divides(v[2]) || k[3] != kKeyDim || v[0] != batch || v[1] != tokens || values % kBlockValues ||
      s[0] != batch || s[3] != kKeyDim || s[4] != values || segments < 1 || in.table.element_count() < 4 ||
      count(in.table) % 4 || (in.gates.element_count() != 0 && count(in.gates) != batch * tokens * heads) ||
      (in.factors.element_count() != 0 && count(in.factors) != batch * tokens * heads) ||
      count(out.part_states) != count(out.states) * kSegmentParts ||
      count(out.part_decays) != batch * heads * segments * (kSegmentParts + 1)) {
    return false;
  }
  call->table = reinterpret_cast<const Chunk*>(in.table.typed_data());
  call->tokens = int(tokens), call->chunks = int(count(in.table) / 4 - 1), call->segments = int(segments + 1);
  call->heads = int(heads), call->value_dim = int(values), call->value_heads = int(v[2]);
  call->query_heads = call->key_heads = int(k[2]);
  call->gates = data_or_null(in.gates), call->beta = data_or_null(in.factors), call->scale = scale;
  call->part_states = out.part_states.typed_data(), call->part_decays = out.part_decays.typed_data();
  call->folded = out.states.typed_data();
  return true;
}

template <bool Reverse>
ffi::Error row_states(cudaStream_t stream, Bf16 rows, Bf16 value, F32 gates, F32 factors, S32 table,
                      ffi::Result<F32> part_states, ffi::Result<F32> part_decays, ffi::Result<F32> states, float scale) {
  if (states->element_count() == 0) return ffi::Error::Success();
  const RowInputs in{rows, value, gates, factors, table};
  SegmentCall call{};
  if (!describe_row_states(&call, in, {*part_states, *part_decays, *states}, scale)) return kErrors.invalid_shapes();
  const int64_t batch = rows.dimensions()[0], tokens = call.tokens;
  const Tile loaded = {64, kChunkTokens, CU_TENSOR_MAP_SWIZZLE_128B};
  Maps maps{};
  const Size keys = {int64_t(call.key_heads) * kKeyDim, tokens, batch};
  const char* message = encode_tokens(Reverse ? &maps.query : &maps.key, rows.untyped_data(), keys, loaded);
  if (!message) {
    const Size values = {int64_t(call.value_heads) * call.value_dim, tokens, batch};
    message = encode_tokens(&maps.value, value.untyped_data(), values, loaded);
  }
  if (message) return kErrors.internal("tensor map", message);
  constexpr int kBytes = SegmentLayout::kSharedMemoryBytes;
  const cudaError_t error =
      cudaFuncSetAttribute(segment_states_kernel<Reverse>, cudaFuncAttributeMaxDynamicSharedMemorySize, kBytes);
  if (error != cudaSuccess) return kErrors.internal("shared memory", cudaGetErrorString(error));
  const int64_t heads = batch * call.heads, value_blocks = call.value_dim / kBlockValues;
  const int64_t blocks = heads * (call.segments - 1) * kSegmentParts * value_blocks;
  segment_states_kernel<Reverse><<<int(blocks), kSegmentThreads, kBytes, stream>>>(call, maps);
  const int64_t threads = heads * kKeyDim * call.value_dim / 4;
  fold_segments_kernel<<<int(threads / kFoldThreads), kFoldThreads, 0, stream>>>(call);
  return kErrors.check("launch", cudaGetLastError());
}

}  // namespace
}  // namespace ejkernel::delta_rule
