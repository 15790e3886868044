// The XLA FFI handler of the backward selective scan.
#include <string>

#include "selective_scan/call.cuh"
#include "selective_scan/gradient.cuh"

namespace ffi = xla::ffi;

namespace ejkernel::selective_scan {
namespace {

ffi::Error failed(const char* what, cudaError_t error) {
  return ffi::Error::Internal(std::string("ejkernel selective scan: ") + what + ": " + cudaGetErrorString(error));
}

ffi::Error wrong(const char* what) {
  return ffi::Error::InvalidArgument(std::string("ejkernel selective scan, backward: ") + what);
}

template <typename Tile>
ffi::Error launch(cudaStream_t stream, const ScanGradient& call, int64_t items) {
  constexpr int kThreads = Tile::kWarpgroups * Tile::kThreads, kBytes = Tile::kWarpgroups * Tile::kBytes;
  // More than 48 KiB must be requested per device and process, so it is requested at each launch.
  cudaError_t error = cudaFuncSetAttribute(gradient_kernel<Tile>, cudaFuncAttributeMaxDynamicSharedMemorySize, kBytes);
  if (error != cudaSuccess) return failed("shared memory", error);
  gradient_kernel<Tile><<<(items + Tile::kWarpgroups - 1) / Tile::kWarpgroups, kThreads, kBytes, stream>>>(call);
  if ((error = cudaGetLastError()) != cudaSuccess) return failed("launch", error);
  return ffi::Error::Success();
}

template <typename X>
ffi::Error launch_for_step(
    cudaStream_t stream, const ScanGradient& call, int64_t items, ffi::DataType step, int warpgroups) {
  if (warpgroups == 2) {
    if (step == ffi::F32) return launch<GradientTile<X, float, 2>>(stream, call, items);
    return launch<GradientTile<X, X, 2>>(stream, call, items);
  }
  if (step == ffi::F32) return launch<GradientTile<X, float, 1>>(stream, call, items);
  return launch<GradientTile<X, X, 1>>(stream, call, items);
}

ffi::Error selective_scan_gradient(
    cudaStream_t stream, ffi::AnyBuffer x, ffi::AnyBuffer step, ffi::Buffer<ffi::F32> decay,
    ffi::Buffer<ffi::F32> columns, ffi::Buffer<ffi::F32> skip, ffi::Buffer<ffi::F32> states, ffi::AnyBuffer cotangent,
    ffi::Buffer<ffi::F32> behind, ffi::Buffer<ffi::S32> bounds, ffi::Buffer<ffi::S32> first_intervals,
    ffi::Result<ffi::AnyBuffer> dx, ffi::Result<ffi::AnyBuffer> dstep,
    ffi::Result<ffi::Buffer<ffi::F32>> partial, ffi::Result<ffi::Buffer<ffi::F32>> ddecay,
    ffi::Result<ffi::Buffer<ffi::F32>> dskip, ffi::Result<ffi::Buffer<ffi::F32>> dfirst, int32_t warpgroups) {
  if (dx->element_count() == 0) return ffi::Error::Success();
  const auto x_shape = x.dimensions(), decay_shape = decay.dimensions(), columns_shape = columns.dimensions();
  if (x_shape.size() < 3 || decay_shape.size() < 2 || columns_shape.size() < 4) return wrong("an axis is missing");
  ScanGradient call{};
  call.x = x.untyped_data();
  call.step = step.untyped_data();
  call.decay = decay.typed_data();
  call.columns = columns.typed_data();
  call.skip = skip.typed_data();
  call.states = states.typed_data();
  call.cotangent = cotangent.untyped_data();
  call.behind = behind.typed_data();
  call.dx = dx->untyped_data();
  call.dstep = dstep->untyped_data();
  call.partial = partial->typed_data();
  call.ddecay = ddecay->typed_data();
  call.dskip = dskip->typed_data();
  call.dfirst = dfirst->typed_data();
  call.channels = x_shape[x_shape.size() - 1];
  call.tokens = x_shape[x_shape.size() - 2];
  call.size = decay_shape[decay_shape.size() - 1];
  const int64_t row = int64_t(call.tokens) * call.channels, packs = x.element_count() / row;
  const int64_t elements = int64_t(call.channels) * call.size, maps = decay.element_count() / elements;
  call.packing = packing_of(bounds, first_intervals);
  const int64_t rows = call.packing.bounds == nullptr ? packs : packs * call.packing.sequences;
  const int64_t intervals = stored_intervals(call.packing, packs, call.tokens);
  const int64_t warpgroups_a_row = (call.channels + kGradientChannels - 1) / kGradientChannels;
  const int64_t items = rows * warpgroups_a_row;
  call.rows = rows;
  // Extra leading axes, which jax.vmap adds to all arrays alike, count as more rows, and more A and D.
  call.rows_a_map = rows / maps;
  const auto has = [](const auto& buffer, int64_t count) { return int64_t(buffer.element_count()) == count; };
  if (packs % maps != 0 || !belongs(call.packing, bounds, first_intervals, packs) ||
      columns_shape[columns_shape.size() - 1] != 16 || call.size > 16 || call.channels % 8 != 0 ||
      !has(step, packs * row) || !has(skip, maps * call.channels) ||
      !has(columns, packs * call.tokens * 32) || !has(states, intervals * elements) ||
      !has(cotangent, packs * row) || !has(behind, rows * elements) || !has(*dx, packs * row) ||
      !has(*dstep, packs * row) || !has(*partial, packs * warpgroups_a_row * call.tokens * 32) ||
      !has(*ddecay, rows * elements) || !has(*dskip, rows * call.channels) || !has(*dfirst, rows * elements)) {
    return wrong("the shapes of the arrays do not belong together");
  }
  if (cotangent.element_type() != x.element_type() || dx->element_type() != x.element_type() ||
      dstep->element_type() != step.element_type() ||
      (step.element_type() != ffi::F32 && step.element_type() != x.element_type())) {
    return wrong("the dtypes of the arrays do not belong together");
  }
  switch (x.element_type()) {
    case ffi::BF16: return launch_for_step<__nv_bfloat16>(stream, call, items, step.element_type(), warpgroups);
    case ffi::F16: return launch_for_step<__half>(stream, call, items, step.element_type(), warpgroups);
    case ffi::F32: return launch_for_step<float>(stream, call, items, step.element_type(), warpgroups);
    default: return wrong("x is not of bfloat16, float16 or float32");
  }
}

}  // namespace
}  // namespace ejkernel::selective_scan

// A symbol that the library exports.
extern "C" __attribute__((visibility("default"))) XLA_FFI_Error* ejkernel_selective_scan_gradient(
    XLA_FFI_CallFrame* frame);

XLA_FFI_DEFINE_HANDLER_SYMBOL(
    ejkernel_selective_scan_gradient, ejkernel::selective_scan::selective_scan_gradient,
    ffi::Ffi::Bind()
        .Ctx<ffi::PlatformStream<cudaStream_t>>()
        .Arg<ffi::AnyBuffer>()
        .Arg<ffi::AnyBuffer>()
        .Arg<ffi::Buffer<ffi::F32>>()
        .Arg<ffi::Buffer<ffi::F32>>()
        .Arg<ffi::Buffer<ffi::F32>>()
        .Arg<ffi::Buffer<ffi::F32>>()
        .Arg<ffi::AnyBuffer>()
        .Arg<ffi::Buffer<ffi::F32>>()
        .Arg<ffi::Buffer<ffi::S32>>()
        .Arg<ffi::Buffer<ffi::S32>>()
        .Ret<ffi::AnyBuffer>()
        .Ret<ffi::AnyBuffer>()
        .Ret<ffi::Buffer<ffi::F32>>()
        .Ret<ffi::Buffer<ffi::F32>>()
        .Ret<ffi::Buffer<ffi::F32>>()
        .Ret<ffi::Buffer<ffi::F32>>()
        .Attr<int32_t>("warpgroups"),
    // Only kernel launches and no host synchronisation: XLA may capture the call in a CUDA graph.
    {ffi::Traits::kCmdBufferCompatible});
