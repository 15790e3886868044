// The XLA FFI handler of the selective scan.
#include <string>

#include "selective_scan/call.cuh"

namespace ffi = xla::ffi;

namespace ejkernel::selective_scan {
namespace {

ffi::Error failed(const char* what, cudaError_t error) {
  return ffi::Error::Internal(std::string("ejkernel selective scan: ") + what + ": " + cudaGetErrorString(error));
}

ffi::Error wrong(const char* what) {
  return ffi::Error::InvalidArgument(std::string("ejkernel selective scan: ") + what);
}

template <typename Tile>
ffi::Error launch(cudaStream_t stream, const SelectiveScan& call) {
  // More than 48 KiB must be requested per device and process, so it is requested at each launch.
  cudaError_t error =
      cudaFuncSetAttribute(scan_kernel<Tile>, cudaFuncAttributeMaxDynamicSharedMemorySize, Tile::kBytes);
  if (error != cudaSuccess) return failed("shared memory", error);
  const int64_t warps = int64_t(call.rows) * ((call.channels + Tile::kChannels - 1) / Tile::kChannels);
  scan_kernel<Tile><<<(warps + Tile::kWarps - 1) / Tile::kWarps, Tile::kWarps * 32, Tile::kBytes, stream>>>(call);
  if ((error = cudaGetLastError()) != cudaSuccess) return failed("launch", error);
  return ffi::Error::Success();
}

// The kernel's template sizes: channels and lanes, and the padded state dimension.
struct Shape {
  int channels, lanes, padded;
};

template <typename X, typename Step>
ffi::Error launch_for_shape(cudaStream_t stream, const SelectiveScan& call, const Shape& shape) {
  const auto is = [&](int channels, int lanes, int padded) {
    return shape.channels == channels && shape.lanes == lanes && shape.padded == padded;
  };
  if (is(2, 2, 16)) return launch<ScanTile<X, Step, 16, 2, 2>>(stream, call);
  if (is(2, 2, 8)) return launch<ScanTile<X, Step, 8, 2, 2>>(stream, call);
  if (is(2, 4, 16)) return launch<ScanTile<X, Step, 16, 2, 4>>(stream, call);
  if (is(1, 4, 16)) return launch<ScanTile<X, Step, 16, 1, 4>>(stream, call);
  if (is(1, 1, 16)) return launch<ScanTile<X, Step, 16, 1, 1>>(stream, call);
  return wrong("there is no kernel for so many channels and lanes");
}

template <typename X>
ffi::Error launch_for_step(cudaStream_t stream, const SelectiveScan& call, const Shape& shape, ffi::DataType step) {
  if (step == ffi::F32) return launch_for_shape<X, float>(stream, call, shape);
  return launch_for_shape<X, X>(stream, call, shape);
}

ffi::Error selective_scan(
    cudaStream_t stream, ffi::AnyBuffer x, ffi::AnyBuffer step, ffi::Buffer<ffi::F32> decay,
    ffi::Buffer<ffi::F32> columns, ffi::Buffer<ffi::F32> skip, ffi::Buffer<ffi::F32> initial,
    ffi::Buffer<ffi::S32> bounds, ffi::Buffer<ffi::S32> first_intervals, ffi::Result<ffi::AnyBuffer> output,
    ffi::Result<ffi::Buffer<ffi::F32>> states, ffi::Result<ffi::Buffer<ffi::F32>> final, int32_t channels,
    int32_t lanes) {
  if (output->element_count() == 0) return ffi::Error::Success();
  const auto x_shape = x.dimensions(), decay_shape = decay.dimensions(), columns_shape = columns.dimensions();
  if (x_shape.size() < 3 || decay_shape.size() < 2 || columns_shape.size() < 4) return wrong("an axis is missing");
  SelectiveScan call{};
  call.x = x.untyped_data();
  call.step = step.untyped_data();
  call.decay = decay.typed_data();
  call.columns = columns.typed_data();
  call.skip = skip.typed_data();
  call.initial = initial.element_count() == 0 ? nullptr : initial.typed_data();
  call.output = output->untyped_data();
  call.states = states->typed_data();
  call.final = final->typed_data();
  call.channels = x_shape[x_shape.size() - 1];
  call.tokens = x_shape[x_shape.size() - 2];
  call.size = decay_shape[decay_shape.size() - 1];
  const int64_t row = int64_t(call.tokens) * call.channels, packs = x.element_count() / row;
  const int64_t elements = int64_t(call.channels) * call.size, maps = decay.element_count() / elements;
  const int64_t padded = columns_shape[columns_shape.size() - 1];
  call.packing = packing_of(bounds, first_intervals);
  const int64_t rows = call.packing.bounds == nullptr ? packs : packs * call.packing.sequences;
  call.rows = rows;
  // Extra leading axes, which jax.vmap adds to all arrays alike, count as more rows, and more A and D.
  call.rows_a_map = rows / maps;
  const int64_t intervals = stored_intervals(call.packing, packs, call.tokens);
  if (packs % maps != 0 || !belongs(call.packing, bounds, first_intervals, packs) ||
      int64_t(step.element_count()) != packs * row ||
      int64_t(skip.element_count()) != maps * call.channels || call.size > padded ||
      int64_t(columns.element_count()) != packs * call.tokens * 2 * padded ||
      (call.initial != nullptr && int64_t(initial.element_count()) != rows * elements) ||
      int64_t(output->element_count()) != packs * row ||
      int64_t(states->element_count()) != intervals * elements ||
      int64_t(final->element_count()) != rows * elements || output->element_type() != x.element_type()) {
    return wrong("the shapes of the arrays do not belong together");
  }
  if (step.element_type() != ffi::F32 && step.element_type() != x.element_type()) {
    return wrong("dt is neither float32 nor of the dtype of x");
  }
  if (lanes > 1 && call.channels % 8 != 0) return wrong("so many lanes want a multiple of 8 channels");
  const Shape shape{channels, lanes, int(padded)};
  switch (x.element_type()) {
    case ffi::BF16: return launch_for_step<__nv_bfloat16>(stream, call, shape, step.element_type());
    case ffi::F16: return launch_for_step<__half>(stream, call, shape, step.element_type());
    case ffi::F32: return launch_for_step<float>(stream, call, shape, step.element_type());
    default: return wrong("x is not of bfloat16, float16 or float32");
  }
}

}  // namespace
}  // namespace ejkernel::selective_scan

// A symbol that the library exports.
extern "C" __attribute__((visibility("default"))) XLA_FFI_Error* ejkernel_selective_scan(XLA_FFI_CallFrame* frame);

XLA_FFI_DEFINE_HANDLER_SYMBOL(
    ejkernel_selective_scan, ejkernel::selective_scan::selective_scan,
    ffi::Ffi::Bind()
        .Ctx<ffi::PlatformStream<cudaStream_t>>()
        .Arg<ffi::AnyBuffer>()
        .Arg<ffi::AnyBuffer>()
        .Arg<ffi::Buffer<ffi::F32>>()
        .Arg<ffi::Buffer<ffi::F32>>()
        .Arg<ffi::Buffer<ffi::F32>>()
        .Arg<ffi::Buffer<ffi::F32>>()
        .Arg<ffi::Buffer<ffi::S32>>()
        .Arg<ffi::Buffer<ffi::S32>>()
        .Ret<ffi::AnyBuffer>()
        .Ret<ffi::Buffer<ffi::F32>>()
        .Ret<ffi::Buffer<ffi::F32>>()
        .Attr<int32_t>("channels")
        .Attr<int32_t>("lanes"),
    // Only kernel launches and no host synchronisation: XLA may capture the call in a CUDA graph.
    {ffi::Traits::kCmdBufferCompatible});
