// The XLA FFI handler of the quantised matmul of 17 to 64 rows.
#include "common/ffi_handler.cuh"
#include "common/tensor_map.cuh"
#include "quantized_matmul/warpgroups.cuh"

namespace ejkernel::quantized_matmul {
namespace {

constexpr HandlerErrors kErrors{"quantized matmul"};
constexpr int kMostRows = 64;

struct Operands {
  const void *x, *words, *scales, *zeros;
  char* arranged;
};

template <int Rows>
ffi::Error launch(cudaStream_t stream, const Operands& operands, const WarpgroupsCall& call) {
  using L = Warpgroups<Rows>;
  const int groups = call.k / kGroup;
  const Described words = {CU_TENSOR_MAP_DATA_TYPE_UINT32, 4, call.n, call.k / 8, L::kTile, 32,
                           CU_TENSOR_MAP_SWIZZLE_128B};
  const Described factors = {CU_TENSOR_MAP_DATA_TYPE_UINT16, 2, call.n / 2, 2 * groups, L::kTile / 2, 2 * kUnitGroups,
                             CU_TENSOR_MAP_SWIZZLE_NONE};
  Maps maps;
  for (const char* wrong :
       {describe(&maps.words, operands.words, words), describe(&maps.scales, operands.scales, factors),
        describe(&maps.zeros, operands.zeros, factors)}) {
    if (wrong) return kErrors.internal("tensor map", wrong);
  }
  const auto x = static_cast<const __nv_bfloat16*>(operands.x);
  const ArrangeCall arrange = {maps.words, x, operands.arranged, call.m, call.k, call.n, call.splits};
  const dim3 arranging(groups * Rows * 8 / kArrangeThreads);
  cudaError_t error = launch_early(arrange_kernel<Rows>, arranging, kArrangeThreads, 0, stream, arrange);
  if (error != cudaSuccess) return kErrors.check("launch that puts x in order", error);
  const int tiles = (call.n + L::kTile - 1) / L::kTile;
  error = launch_clusters(warpgroups_kernel<L>, tiles, call.splits, L::kThreads, L::kBytes, stream, call, maps);
  return kErrors.check("launch", error);
}

template <int Rows>
constexpr size_t arranged_bytes(int k) {
  return size_t(k / kUnit) * XUnit<Rows>::kBytes;
}

ffi::Error quantized_warpgroups(
    cudaStream_t stream, ffi::Buffer<ffi::BF16> x, ffi::Buffer<ffi::U32> words, ffi::Buffer<ffi::F16> scales,
    ffi::Buffer<ffi::F16> zeros, ffi::ResultBuffer<ffi::BF16> output, ffi::ResultBuffer<ffi::U8> arranged,
    int32_t splits) {
  if (output->element_count() == 0) return ffi::Error::Success();
  WarpgroupsCall call;
  call.x = static_cast<const char*>(arranged->untyped_data());
  call.output = static_cast<__nv_bfloat16*>(output->untyped_data());
  call.m = x.dimensions()[0];
  call.k = x.dimensions()[1];
  call.n = output->dimensions()[1];
  call.splits = splits;
  const size_t groups = size_t(call.n) * (call.k / kGroup);
  // The kernels rely on the shapes and check nothing.
  if (call.m > kMostRows || call.k % kUnit || call.n % 4 || words.element_count() != groups * (kGroup / 8) ||
      scales.element_count() != groups || zeros.element_count() != groups ||
      output->element_count() != size_t(call.m) * call.n ||
      arranged->element_count() != (call.m <= 32 ? arranged_bytes<32>(call.k) : arranged_bytes<64>(call.k)) ||
      splits < 1 || splits > kMostSplits) {
    return kErrors.invalid_shapes();
  }
  const Operands operands = {x.untyped_data(), words.untyped_data(), scales.untyped_data(), zeros.untyped_data(),
                             static_cast<char*>(arranged->untyped_data())};
  return call.m <= 32 ? launch<32>(stream, operands, call) : launch<64>(stream, operands, call);
}

}  // namespace

EJKERNEL_FFI_HANDLER(ejkernel_quantized_warpgroups, quantized_warpgroups, "splits");

}  // namespace ejkernel::quantized_matmul
