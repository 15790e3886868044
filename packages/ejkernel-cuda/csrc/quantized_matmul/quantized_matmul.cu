// The XLA FFI handler of the quantised matmul.
#include "common/ffi_handler.cuh"
#include "quantized_matmul/columns.cuh"
#include "quantized_matmul/quantized_matmul.cuh"

namespace ejkernel::quantized_matmul {
namespace {

constexpr HandlerErrors kErrors{"quantized matmul"};

template <typename L>
ffi::Error launch(cudaStream_t stream, const QuantizedCall& call) {
  const int tiles = (call.n + L::kTile - 1) / L::kTile * ((call.m + L::kRows - 1) / L::kRows);
  const cudaError_t error =
      launch_clusters(quantized_kernel<L>, tiles, call.splits, kThreads, shared_bytes<L>(), stream, call);
  return kErrors.check("launch", error);
}

// The layout of `transpose=True`. Rows of x beyond a block's tile go to further blocks.
ffi::Error launch_transposed(cudaStream_t stream, const QuantizedCall& call) {
  if (call.m <= 8) return launch<Transposed<1>>(stream, call);
  if (call.m <= 16) return launch<Transposed<2>>(stream, call);
  return call.m <= 32 ? launch<Transposed<4>>(stream, call) : launch<Transposed<8>>(stream, call);
}

// Each block contracts all of K.
template <typename L>
ffi::Error launch_whole_columns(cudaStream_t stream, const QuantizedCall& call) {
  constexpr int kBytes = L::kWarps * L::kWarpBytes;
  const auto kernel = whole_columns_kernel<L>;
  cudaError_t error = request_shared_memory(kernel, kBytes);
  if (error != cudaSuccess) return kErrors.check("shared memory", error);
  const unsigned blocks = (call.n + L::kTile - 1) / L::kTile;
  error = launch_early(kernel, dim3(blocks), L::kThreads, kBytes, stream, call);
  return kErrors.check("launch", error);
}

// Whether the arrays' sizes belong to one call: the kernels rely on the shapes and check nothing.
bool consistent(
    const QuantizedCall& call, bool transpose, bool whole, size_t words, size_t scales, size_t zeros, size_t output) {
  const int64_t codes = transpose ? call.k : call.n, rows = transpose ? call.n : call.k;
  return call.log_group >= 6 && call.log_group <= 10 && codes == int64_t(call.row_groups) << call.log_group &&
         call.row_words * int64_t(8) == codes && words == size_t(rows) * call.row_words &&
         scales == size_t(rows) * call.row_groups && zeros == scales && output == size_t(call.m) * call.n &&
         (transpose || (call.log_group == 6 && call.row_groups % 2 == 0)) && call.k % 8 == 0 && call.n % 4 == 0 &&
         (whole ? transpose && call.m <= 16 && call.log_group == 6 && call.row_groups % 4 == 0
                : call.splits >= 1 && call.splits <= kMostSplits);
}

ffi::Error quantized_matmul(
    cudaStream_t stream, ffi::Buffer<ffi::BF16> x, ffi::Buffer<ffi::U32> words, ffi::Buffer<ffi::F16> scales,
    ffi::Buffer<ffi::F16> zeros, ffi::ResultBuffer<ffi::BF16> output, int32_t log_group, int32_t splits,
    bool transpose) {
  if (output->element_count() == 0) return ffi::Error::Success();
  QuantizedCall call;
  call.x = static_cast<const __nv_bfloat16*>(x.untyped_data());
  call.words = words.typed_data();
  call.scales = static_cast<const uint16_t*>(scales.untyped_data());
  call.zeros = static_cast<const uint16_t*>(zeros.untyped_data());
  call.output = static_cast<__nv_bfloat16*>(output->untyped_data());
  call.m = x.dimensions()[0];
  call.k = x.dimensions()[1];
  call.n = output->dimensions()[1];
  call.row_words = words.dimensions()[1];
  call.row_groups = scales.dimensions()[1];
  call.log_group = log_group;
  call.splits = splits;
  const bool whole = splits == 0;
  if (!consistent(call, transpose, whole, words.element_count(), scales.element_count(), zeros.element_count(),
                  output->element_count())) {
    return kErrors.invalid_shapes();
  }
  if (whole) {
    return call.m <= 8 ? launch_whole_columns<WholeColumns<1>>(stream, call)
                       : launch_whole_columns<WholeColumns<2>>(stream, call);
  }
  return transpose ? launch_transposed(stream, call) : launch<RowsFirst<1>>(stream, call);
}

}  // namespace

EJKERNEL_FFI_HANDLER(ejkernel_quantized_matmul, quantized_matmul, "log_group", "splits", "transpose");

}  // namespace ejkernel::quantized_matmul
