// The XLA FFI handler of the decode step of linear recurrences.
#include "common/dependent_launch.cuh"
#include "common/ffi_handler.cuh"
#include "recurrent_step/channel_step.cuh"
#include "recurrent_step/tree_step.cuh"

namespace ejkernel::recurrent_step {
namespace {

constexpr HandlerErrors kErrors{"recurrent step"};

// The template arguments that select a kernel, except for the dtype.
struct Kind {
  int keys;
  bool channels, transposed;
};

cudaError_t device_attribute(int* value, cudaDeviceAttr attribute) {
  int device = 0;
  const cudaError_t error = cudaGetDevice(&device);
  return error == cudaSuccess ? cudaDeviceGetAttribute(value, attribute, device) : error;
}

// Launches blocks of W values, each with its state in shared memory.
template <typename T, int K, int W, bool kDelta, bool kTransposed>
ffi::Error launch_blocks(cudaStream_t stream, const RecurrentStep& call) {
  const auto kernel = step_kernel<T, K, W, kDelta, kTransposed>;
  constexpr size_t kShared = StagedState<K, W, kTransposed>::kBytes;
  return kErrors.check("launch", launch_in_order(kernel, count_items(call) / (W / 32), W, kShared, stream, call));
}

template <typename T, int K, bool kDelta, bool kTransposed>
ffi::Error launch_for_heads(cudaStream_t stream, const RecurrentStep& call) {
  if (call.parents != nullptr) {
    const auto kernel = tree_kernel<T, K, kDelta, kTransposed>;
    return kErrors.check("launch", launch_in_order(kernel, count_items(call), 32, 0, stream, call));
  }
  if constexpr (kTransposed) {
    return launch_blocks<T, K, kStepValues, kDelta, kTransposed>(stream, call);
  } else {
    int shared = 0;
    const cudaError_t error = device_attribute(&shared, cudaDevAttrMaxSharedMemoryPerMultiprocessor);
    if (error != cudaSuccess) return kErrors.check("device attributes", error);
    // Chips with less shared memory would have too few states on their way.
    const bool is_large = shared >= 3 * int(StagedState<K, 128, kTransposed>::kBytes);
    if (is_large && call.values % 128 == 0) return launch_blocks<T, K, 128, kDelta, kTransposed>(stream, call);
    if (is_large && call.values % 64 == 0) return launch_blocks<T, K, 64, kDelta, kTransposed>(stream, call);
    return launch_blocks<T, K, kStepValues, kDelta, kTransposed>(stream, call);
  }
}

template <typename T, int K, bool kDelta>
ffi::Error launch_for_channels(cudaStream_t stream, const RecurrentStep& call) {
  const auto kernel = channel_kernel<T, K, kDelta>;
  constexpr size_t kShared = channel_shared_bytes<K>();
  const int64_t blocks = count_items(call) / kStepWarps;
  return kErrors.check("launch", launch_in_order(kernel, blocks, kStepThreads, kShared, stream, call));
}

template <typename T, int K>
ffi::Error launch_for_kind(cudaStream_t stream, const RecurrentStep& call, const Kind& kind) {
  const bool delta = call.beta.data != nullptr;
  if (kind.transposed && (delta || kind.channels)) {
    return kErrors.invalid("transposed states want one gate per head and no beta");
  }
  if (kind.channels && call.parents != nullptr) return kErrors.invalid("trees want one gate per head");
  if (kind.transposed) return launch_for_heads<T, K, false, true>(stream, call);
  if (kind.channels) {
    return delta ? launch_for_channels<T, K, true>(stream, call) : launch_for_channels<T, K, false>(stream, call);
  }
  return delta ? launch_for_heads<T, K, true, false>(stream, call) : launch_for_heads<T, K, false, false>(stream, call);
}

template <typename T>
ffi::Error launch_for_keys(cudaStream_t stream, const RecurrentStep& call, const Kind& kind) {
  switch (kind.keys) {
    case 64: return launch_for_kind<T, 64>(stream, call, kind);
    case 128: return launch_for_kind<T, 128>(stream, call, kind);
    default: return kErrors.invalid("key has a head dimension other than 64 and 128");
  }
}

// Describes scalars [rows or 1, tokens or 1, heads, ...], `each` per token; absent if the array has no elements.
Numbers numbers_of(const ffi::AnyBuffer& array, int64_t each) {
  Numbers numbers{};
  if (array.element_count() == 0) return numbers;
  const auto shape = array.dimensions();
  numbers.data = array.untyped_data();
  numbers.row = shape[0] > 1 ? shape[1] * each : 0;
  numbers.token = shape[1] > 1 ? each : 0;
  numbers.wide = array.element_type() == ffi::F32;
  return numbers;
}

// Whether scalars cover all rows and tokens, in one of the two dtypes.
bool fits(const ffi::AnyBuffer& array, const RecurrentStep& call, int64_t each, ffi::DataType type) {
  if (array.element_count() == 0) return true;
  const auto shape = array.dimensions();
  return shape.size() >= 3 && (shape[0] == 1 || shape[0] == call.rows) && (shape[1] == 1 || shape[1] == call.tokens) &&
         count(array) == shape[0] * shape[1] * each &&
         (array.element_type() == ffi::F32 || array.element_type() == type);
}

ffi::Error recurrent_step(
    cudaStream_t stream, ffi::AnyBuffer query, ffi::AnyBuffer key, ffi::AnyBuffer value, ffi::AnyBuffer decay,
    ffi::AnyBuffer beta, ffi::AnyBuffer dt, ffi::AnyBuffer skip, ffi::Buffer<ffi::S32> parents,
    ffi::Buffer<ffi::S32> bounds, ffi::Buffer<ffi::S32> slots, ffi::Buffer<ffi::F32> initial, ffi::Result<ffi::AnyBuffer> output,
    ffi::Result<ffi::Buffer<ffi::F32>> final, bool transposed, float scale) {
  if (output->element_count() == 0) return ffi::Error::Success();
  const auto q = query.dimensions(), k = key.dimensions(), v = value.dimensions(), o = output->dimensions();
  if (q.size() != 4 || k.size() != 4 || v.size() != 4 || o.size() != 4) {
    return kErrors.invalid("query, key, value and output want four axes");
  }
  RecurrentStep call{};
  call.query = query.untyped_data(), call.key = key.untyped_data(), call.value = value.untyped_data();
  call.rows = q[0], call.tokens = q[1], call.heads = o[2], call.values = v[3];
  call.query_heads = q[2], call.key_heads = k[2], call.value_heads = v[2];
  call.a_query = o[2] / q[2], call.a_key = o[2] / k[2], call.a_value = o[2] / v[2];
  const auto gates = decay.dimensions();
  const Kind kind{int(q[3]), gates.size() == 4 && gates[3] > 1, transposed};
  const int64_t each = kind.channels ? o[2] * q[3] : o[2];
  call.decay = numbers_of(decay, each), call.beta = numbers_of(beta, o[2]);
  call.dt = numbers_of(dt, o[2]), call.skip = numbers_of(skip, o[2]);
  call.bounds = data_or_null(bounds), call.slots = data_or_null(slots), call.parents = data_or_null(parents);
  call.initial = data_or_null(initial);
  call.output = output->untyped_data(), call.final = final->typed_data();
  call.scale = scale;
  const cudaError_t error = device_attribute(&call.multiprocessors, cudaDevAttrMultiProcessorCount);
  if (error != cudaSuccess) return kErrors.check("device attributes", error);
  // With trees states stay as they are, and `final` has nothing.
  const bool trees = call.parents != nullptr;
  call.sequences = call.bounds == nullptr ? 1 : bounds.element_count() - 1;
  const int64_t state_size = o[2] * q[3] * v[3], sequences = int64_t(call.rows) * call.sequences;
  const int64_t stored = trees ? count(initial) : count(*final);
  const int64_t states = trees && call.initial == nullptr ? sequences : stored / state_size;
  call.slot_count = states;
  const auto type = query.element_type();
  const bool shapes = k[0] == q[0] && k[1] == q[1] && k[3] == q[3] && v[0] == q[0] && v[1] == q[1] && o[0] == q[0] &&
                      o[1] == q[1] && o[3] == v[3] && o[2] % q[2] == 0 && o[2] % k[2] == 0 && o[2] % v[2] == 0;
  const bool held = (trees ? call.initial == nullptr || stored == states * state_size
                           : stored == states * state_size && (call.initial == nullptr || count(initial) == stored)) &&
                    (call.slots == nullptr ? states == sequences : count(slots) == call.sequences) &&
                    (call.bounds == nullptr || call.rows == 1) &&
                    (!trees || count(parents) == int64_t(call.rows) * call.tokens);
  if (!shapes || !held || !fits(decay, call, each, type) || !fits(beta, call, o[2], type) ||
      !fits(dt, call, o[2], type) || !fits(skip, call, o[2], type)) {
    return kErrors.invalid("the shapes or dtypes of the arrays do not match");
  }
  if (key.element_type() != type || value.element_type() != type || output->element_type() != type) {
    return kErrors.invalid("query, key, value and output differ in dtype");
  }
  if (kind.channels && decay.element_type() != ffi::F32) return kErrors.invalid("gates of channels are not of float32");
  if (v[3] % kStepValues != 0) return kErrors.invalid("value has a head dimension that is not a multiple of 32");
  if (kind.channels && v[3] % kStepThreads != 0) {
    return kErrors.invalid("gates per key channel want a multiple of 128 value channels");
  }
  const char* const unsupported = "queries are neither of bfloat16 nor of float16";
  return dispatch_dtype<__nv_bfloat16, __half>(
      type, kErrors, unsupported, [&](auto number) { return launch_for_keys<decltype(number)>(stream, call, kind); });
}

}  // namespace

EJKERNEL_FFI_HANDLER(ejkernel_recurrent_step, recurrent_step, "transposed", "scale");

}  // namespace ejkernel::recurrent_step
