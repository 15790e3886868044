// The XLA FFI handler of the quantised matmul with `transpose=False` by warpgroup products (WGMMA).
#include "common/ffi_handler.cuh"
#include "common/tensor_map.cuh"
#include "quantized_matmul/rows_warpgroups.cuh"

namespace ejkernel::quantized_matmul {
namespace {

constexpr HandlerErrors kErrors{"quantized matmul"};

template <int Rows>
ffi::Error launch(cudaStream_t stream, const RowsCall& call, const void* x, const uint32_t* words) {
  using L = RowsWarpgroups<Rows>;
  RowsMaps maps;
  const Described rows = {
      CU_TENSOR_MAP_DATA_TYPE_BFLOAT16, 2, call.m, call.k, Rows, 64, CU_TENSOR_MAP_SWIZZLE_128B};
  const Described codes = {
      CU_TENSOR_MAP_DATA_TYPE_UINT32, 4, call.k, call.n / 8, L::kDepth, 32, CU_TENSOR_MAP_SWIZZLE_128B};
  const char* wrong = describe(&maps.x, x, rows);
  if (!wrong) wrong = describe(&maps.words, words, codes);
  if (wrong) return kErrors.internal("tensor map", wrong);
  const int tiles = (call.n + L::kTile - 1) / L::kTile;
  const cudaError_t error =
      launch_clusters(rows_warpgroups_kernel<L>, tiles, call.splits, L::kThreads, L::kBytes, stream, call, maps);
  return kErrors.check("launch", error);
}

ffi::Error quantized_rows(
    cudaStream_t stream, ffi::Buffer<ffi::BF16> x, ffi::Buffer<ffi::U32> words, ffi::Buffer<ffi::F16> scales,
    ffi::Buffer<ffi::F16> zeros, ffi::ResultBuffer<ffi::BF16> output, int32_t splits) {
  if (output->element_count() == 0) return ffi::Error::Success();
  RowsCall call;
  call.scales = static_cast<const uint16_t*>(scales.untyped_data());
  call.zeros = static_cast<const uint16_t*>(zeros.untyped_data());
  call.output = static_cast<__nv_bfloat16*>(output->untyped_data());
  call.m = x.dimensions()[0];
  call.k = x.dimensions()[1];
  call.n = output->dimensions()[1];
  call.splits = splits;
  const size_t groups = size_t(call.k) * (call.n / kGroup);
  // The kernels rely on the shapes and check nothing.
  if (call.m > 64 || call.k % 8 || call.n % (2 * kGroup) || words.element_count() != groups * (kGroup / 8) ||
      scales.element_count() != groups || zeros.element_count() != groups ||
      output->element_count() != size_t(call.m) * call.n || splits < 1 || splits > kMostSplits) {
    return kErrors.invalid_shapes();
  }
  const void* from = x.untyped_data();
  if (call.m <= 8) return launch<8>(stream, call, from, words.typed_data());
  if (call.m <= 16) return launch<16>(stream, call, from, words.typed_data());
  if (call.m <= 32) return launch<32>(stream, call, from, words.typed_data());
  return call.m <= 48 ? launch<48>(stream, call, from, words.typed_data())
                      : launch<64>(stream, call, from, words.typed_data());
}

}  // namespace

EJKERNEL_FFI_HANDLER(ejkernel_quantized_rows, quantized_rows, "splits");

}  // namespace ejkernel::quantized_matmul
