// The XLA FFI handler of the quantised matmul of 17 to 64 rows.
#include <cuda.h>

#include <cstring>
#include <string>

#include "quantized_warpgroups.cuh"
#include "xla/ffi/api/ffi.h"

namespace ffi = xla::ffi;

namespace ejkernel {
namespace {

constexpr char kName[] = "ejkernel quantized matmul: ";
constexpr int kMostRows = 64;

ffi::Error failed(const char* what, cudaError_t error) {
  return ffi::Error::Internal(std::string(kName) + what + ": " + cudaGetErrorString(error));
}

// Describes a matrix to the copy engine, whose tiles have `tile_rows` rows of 128 bytes.
ffi::Error describe(
    TensorMap* map, const void* matrix, CUtensorMapDataType dtype, int bytes, int rows, int columns, int tile_rows) {
  // The library does not link to the driver: whoever starts XLA has loaded it.
  decltype(&cuTensorMapEncodeTiled) encode = nullptr;
  cudaDriverEntryPointQueryResult found;
  const cudaError_t error = cudaGetDriverEntryPointByVersion(
      "cuTensorMapEncodeTiled", reinterpret_cast<void**>(&encode), 12000, cudaEnableDefault, &found);
  if (error != cudaSuccess) return failed("tensor map", error);
  const cuuint64_t sizes[2] = {static_cast<cuuint64_t>(columns), static_cast<cuuint64_t>(rows)};
  const cuuint64_t strides[1] = {sizes[0] * bytes};
  const cuuint32_t tile[2] = {static_cast<cuuint32_t>(128 / bytes), static_cast<cuuint32_t>(tile_rows)};
  const cuuint32_t steps[2] = {1, 1};
  CUtensorMap encoded;
  if (found != cudaDriverEntryPointSuccess ||
      encode(&encoded, dtype, 2, const_cast<void*>(matrix), sizes, strides, tile, steps, CU_TENSOR_MAP_INTERLEAVE_NONE,
             CU_TENSOR_MAP_SWIZZLE_128B, CU_TENSOR_MAP_L2_PROMOTION_L2_128B, CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE) !=
          CUDA_SUCCESS) {
    return ffi::Error::Internal(std::string(kName) + "the driver makes no tensor map");
  }
  static_assert(sizeof(encoded) == sizeof(*map), "a tensor map has 128 bytes");
  std::memcpy(map, &encoded, sizeof(encoded));
  return ffi::Error::Success();
}

template <int Rows>
ffi::Error launch(cudaStream_t stream, const WarpgroupsCall& call, const void* x, const uint32_t* words) {
  using L = Warpgroups<Rows>;
  Maps maps;
  const ffi::Error of_x = describe(&maps.x, x, CU_TENSOR_MAP_DATA_TYPE_BFLOAT16, 2, call.m, call.k, Rows);
  if (of_x.failure()) return of_x;
  const ffi::Error of_words =
      describe(&maps.words, words, CU_TENSOR_MAP_DATA_TYPE_UINT32, 4, call.n, call.k / 8, L::kTile);
  if (of_words.failure()) return of_words;
  const auto kernel = warpgroups_kernel<L>;
  cudaError_t error = cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, L::kBytes);
  if (error != cudaSuccess) return failed("shared memory", error);
  cudaLaunchAttribute attributes[2] = {};
  attributes[0].id = cudaLaunchAttributeClusterDimension;
  attributes[0].val.clusterDim = {static_cast<unsigned>(call.splits), 1, 1};
  // The kernel waits by itself for the launch before.
  attributes[1].id = cudaLaunchAttributeProgrammaticStreamSerialization;
  attributes[1].val.programmaticStreamSerializationAllowed = 1;
  cudaLaunchConfig_t config = {};
  config.gridDim = dim3(static_cast<unsigned>((call.n + L::kTile - 1) / L::kTile * call.splits));
  config.blockDim = dim3(L::kThreads);
  config.dynamicSmemBytes = L::kBytes;
  config.stream = stream;
  config.attrs = attributes;
  config.numAttrs = 2;
  error = cudaLaunchKernelEx(&config, kernel, call, maps);
  return error == cudaSuccess ? ffi::Error::Success() : failed("launch", error);
}

ffi::Error quantized_warpgroups(
    cudaStream_t stream, ffi::Buffer<ffi::BF16> x, ffi::Buffer<ffi::U32> words, ffi::Buffer<ffi::F16> scales,
    ffi::Buffer<ffi::F16> zeros, ffi::ResultBuffer<ffi::BF16> output, int32_t splits) {
  if (output->element_count() == 0) return ffi::Error::Success();
  WarpgroupsCall call;
  call.scales = static_cast<const uint16_t*>(scales.untyped_data());
  call.zeros = static_cast<const uint16_t*>(zeros.untyped_data());
  call.output = static_cast<__nv_bfloat16*>(output->untyped_data());
  call.m = x.dimensions()[0];
  call.k = x.dimensions()[1];
  call.n = output->dimensions()[1];
  call.splits = splits;
  const size_t groups = size_t(call.n) * (call.k / kGroup);
  // The kernels read what the shapes promise.
  if (call.m > kMostRows || call.k % kUnit || call.n % 4 || words.element_count() != groups * (kGroup / 8) ||
      scales.element_count() != groups || zeros.element_count() != groups ||
      output->element_count() != size_t(call.m) * call.n || splits < 1 ||
      splits > kMostSplits) {
    return ffi::Error::InvalidArgument(std::string(kName) + "the shapes of the arrays do not belong together");
  }
  return call.m <= 32 ? launch<32>(stream, call, x.untyped_data(), words.typed_data())
                      : launch<64>(stream, call, x.untyped_data(), words.typed_data());
}

}  // namespace
}  // namespace ejkernel

extern "C" __attribute__((visibility("default"))) XLA_FFI_Error* ejkernel_quantized_warpgroups(
    XLA_FFI_CallFrame* frame);

XLA_FFI_DEFINE_HANDLER_SYMBOL(
    ejkernel_quantized_warpgroups, ejkernel::quantized_warpgroups,
    ffi::Ffi::Bind()
        .Ctx<ffi::PlatformStream<cudaStream_t>>()
        .Arg<ffi::Buffer<ffi::BF16>>()
        .Arg<ffi::Buffer<ffi::U32>>()
        .Arg<ffi::Buffer<ffi::F16>>()
        .Arg<ffi::Buffer<ffi::F16>>()
        .Ret<ffi::Buffer<ffi::BF16>>()
        .Attr<int32_t>("splits"),
    // Launches alone, and no host synchronisation: XLA may record the call in a CUDA graph.
    {ffi::Traits::kCmdBufferCompatible});
