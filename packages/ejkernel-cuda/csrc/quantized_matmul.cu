// The XLA FFI handler of the quantised matmul.
#include <string>

#include "quantized_matmul.cuh"
#include "xla/ffi/api/ffi.h"

namespace ffi = xla::ffi;

namespace ejkernel {
namespace {

constexpr char kName[] = "ejkernel quantized matmul: ";

// How the matrix is quantised and how the kernel runs: the attributes of a call.
struct Options {
  int32_t code, scale, log_group, splits, stages;
  bool transpose, wide, cluster;
};

ffi::Error failed(const char* what, cudaError_t error) {
  return ffi::Error::Internal(std::string(kName) + what + ": " + cudaGetErrorString(error));
}

ffi::Error wrong(const char* what) { return ffi::Error::InvalidArgument(std::string(kName) + what); }

template <typename L, typename T>
ffi::Error launch(cudaStream_t stream, const QuantizedCall<T>& call) {
  const int ring = ring_bytes<L>(call.stages, call.log_group, log_scale_bytes(call.scale));
  const int bytes = ring + L::extra_bytes(call.log_group);
  const auto kernel = quantized_kernel<L, T>;
  // More than 48 KiB have to be asked for, on every device that a process launches on; so it is done each time.
  cudaError_t error = cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, bytes);
  if (error != cudaSuccess) return failed("shared memory", error);
  cudaLaunchConfig_t config = {};
  config.gridDim = dim3(static_cast<unsigned>((call.n + L::kTile - 1) / L::kTile * call.splits));
  config.blockDim = dim3(kThreads);
  config.dynamicSmemBytes = bytes;
  config.stream = stream;
  cudaLaunchAttribute cluster = {};
  cluster.id = cudaLaunchAttributeClusterDimension;
  cluster.val.clusterDim = {static_cast<unsigned>(call.splits), 1, 1};
  config.attrs = &cluster;
  config.numAttrs = call.cluster ? 1 : 0;
  error = cudaLaunchKernelEx(&config, kernel, call);
  return error == cudaSuccess ? ffi::Error::Success() : failed("launch", error);
}

template <template <Code, int, int, typename> class L, Code C, int WarpsN, typename T>
ffi::Error launch_for_rows(cudaStream_t stream, const QuantizedCall<T>& call) {
  if (call.m <= 8) return launch<L<C, 1, WarpsN, T>, T>(stream, call);
  if (call.m <= 16) return launch<L<C, 2, WarpsN, T>, T>(stream, call);
  return launch<L<C, 8, WarpsN, T>, T>(stream, call);
}

// Tiles of 128 columns are there for integers of 4 bits alone: each kernel is in the library for every chip.
template <template <Code, int, int, typename> class L, int Wide, int Narrow, typename T>
ffi::Error launch_for_code(cudaStream_t stream, const Options& o, const QuantizedCall<T>& call) {
  switch (static_cast<Code>(o.code)) {
    case Code::kAffine4:
      return o.wide ? launch_for_rows<L, Code::kAffine4, Wide, T>(stream, call)
                    : launch_for_rows<L, Code::kAffine4, Narrow, T>(stream, call);
    case Code::kAffine8: return launch_for_rows<L, Code::kAffine8, Wide, T>(stream, call);
    case Code::kTable4: return launch_for_rows<L, Code::kTable4, Wide, T>(stream, call);
    default: return launch_for_rows<L, Code::kFloat8, Wide, T>(stream, call);
  }
}

struct Arguments {
  ffi::AnyBuffer x;
  ffi::Buffer<ffi::U32> words;
  ffi::AnyBuffer scales, zeros, output;
  ffi::Buffer<ffi::F32> parts;
};

// Whether the arrays are those of one call: the kernels read what the shapes promise.
template <typename T>
bool consistent(const Arguments& a, const Options& o, const QuantizedCall<T>& call) {
  const int64_t codes = o.transpose ? call.k : call.n, rows = o.transpose ? call.n : call.k;
  const int per_word = o.code == int(Code::kAffine4) || o.code == int(Code::kTable4) ? 8 : 4;
  const int64_t groups = rows * call.row_groups;
  const bool arrays =
      codes % per_word == 0 && call.row_words == codes / per_word && call.row_words % 4 == 0 && call.k % 8 == 0 && call.n % 4 == 0 &&
      codes == int64_t(call.row_groups) << call.log_group && a.words.element_count() == size_t(rows * call.row_words) &&
      a.scales.size_bytes() == size_t(groups) << log_scale_bytes(call.scale) &&
      (call.row_groups << log_scale_bytes(call.scale)) % 4 == 0 &&
      (call.scale != Scale::kAffine || a.zeros.size_bytes() == size_t(groups * 2)) &&
      a.output.element_count() == size_t(call.m) * call.n;
  const bool parts = call.splits == 1 || call.cluster ||
                     a.parts.element_count() >= size_t(call.splits) * call.m * call.n;
  return arrays && parts && call.m <= 64 && call.log_group >= 5 && call.log_group <= 10 && call.splits >= 1 &&
         (!call.cluster || call.splits <= kMostBlocks) && call.stages >= 3 && call.stages <= 6;
}

template <typename T>
ffi::Error run(cudaStream_t stream, const Arguments& a, const Options& o) {
  const auto x = a.x.dimensions(), output = a.output.dimensions(), words = a.words.dimensions();
  QuantizedCall<T> call;
  call.x = a.x.reinterpret_data<T>();
  call.words = a.words.typed_data();
  call.scales = a.scales.untyped_data();
  call.zeros = a.zeros.untyped_data();
  call.output = a.output.reinterpret_data<T>();
  call.parts = a.parts.typed_data();
  call.scale = static_cast<Scale>(o.scale);
  call.m = x[0];
  call.k = x[1];
  call.n = output[1];
  call.row_words = words[1];
  call.row_groups = a.scales.dimensions()[1];
  call.log_group = o.log_group;
  call.splits = o.splits;
  call.stages = o.stages;
  call.cluster = o.cluster && o.splits > 1;
  if (!consistent(a, o, call)) return wrong("the shapes of the arrays do not belong together");
  return o.transpose ? launch_for_code<Transposed, 8, 4, T>(stream, o, call)
                     : launch_for_code<RowsFirst, 4, 2, T>(stream, o, call);
}

ffi::Error quantized_matmul(
    cudaStream_t stream, ffi::AnyBuffer x, ffi::Buffer<ffi::U32> words, ffi::AnyBuffer scales, ffi::AnyBuffer zeros,
    ffi::Result<ffi::AnyBuffer> output, ffi::Result<ffi::Buffer<ffi::F32>> parts, int32_t code, int32_t scale,
    int32_t log_group, bool transpose, bool wide, int32_t splits, int32_t stages, bool cluster) {
  const Arguments arguments{x, words, scales, zeros, *output, *parts};
  const Options options{code, scale, log_group, splits, stages, transpose, wide, cluster};
  if (output->element_count() == 0) return ffi::Error::Success();
  switch (x.element_type()) {
    case ffi::BF16: return run<__nv_bfloat16>(stream, arguments, options);
    case ffi::F16: return run<__half>(stream, arguments, options);
    default: return wrong("dtype is neither bfloat16 nor float16");
  }
}

}  // namespace
}  // namespace ejkernel

extern "C" __attribute__((visibility("default"))) XLA_FFI_Error* ejkernel_quantized_matmul(XLA_FFI_CallFrame* frame);

XLA_FFI_DEFINE_HANDLER_SYMBOL(
    ejkernel_quantized_matmul, ejkernel::quantized_matmul,
    ffi::Ffi::Bind()
        .Ctx<ffi::PlatformStream<cudaStream_t>>()
        .Arg<ffi::AnyBuffer>()
        .Arg<ffi::Buffer<ffi::U32>>()
        .Arg<ffi::AnyBuffer>()
        .Arg<ffi::AnyBuffer>()
        .Ret<ffi::AnyBuffer>()
        .Ret<ffi::Buffer<ffi::F32>>()
        .Attr<int32_t>("code")
        .Attr<int32_t>("scale")
        .Attr<int32_t>("log_group")
        .Attr<bool>("transpose")
        .Attr<bool>("wide")
        .Attr<int32_t>("splits")
        .Attr<int32_t>("stages")
        .Attr<bool>("cluster"),
    // Launches alone, and no host synchronisation: XLA may record the call in a CUDA graph.
    {ffi::Traits::kCmdBufferCompatible});
