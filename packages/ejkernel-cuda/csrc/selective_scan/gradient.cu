// The XLA FFI handler of the backward selective scan.
#include "common/dependent_launch.cuh"
#include "selective_scan/call.cuh"
#include "selective_scan/gradient.cuh"

namespace ejkernel::selective_scan {
namespace {

constexpr HandlerErrors kErrors{"selective scan, backward"};

template <typename Tile>
ffi::Error launch(cudaStream_t stream, const ScanGradient& call, int64_t items) {
  constexpr int kThreads = Tile::kWarpgroups * Tile::kThreads, kBytes = Tile::kWarpgroups * Tile::kBytes;
  const int64_t blocks = (items + Tile::kWarpgroups - 1) / Tile::kWarpgroups;
  return kErrors.check("launch", launch_in_order(gradient_kernel<Tile>, blocks, kThreads, kBytes, stream, call));
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
  const ScanOperands operands{x, step, decay, columns, skip, bounds, first_intervals};
  if (!operands.has_axes()) return kErrors.invalid(kMissingAxis);
  ScanGradient call{};
  const ScanSizes sizes = set_operands(call, operands);
  call.states = states.typed_data();
  call.cotangent = cotangent.untyped_data();
  call.behind = behind.typed_data();
  call.dx = dx->untyped_data();
  call.dstep = dstep->untyped_data();
  call.partial = partial->typed_data();
  call.ddecay = ddecay->typed_data();
  call.dskip = dskip->typed_data();
  call.dfirst = dfirst->typed_data();
  const int64_t warpgroups_a_row = (call.channels + kGradientChannels - 1) / kGradientChannels;
  const int64_t items = sizes.rows * warpgroups_a_row, tokens = sizes.packs * sizes.row;
  const int64_t states_size = sizes.rows * sizes.elements;
  if (!consistent(call, operands, sizes) || sizes.padded != 16 || call.channels % 8 != 0 ||
      count(states) != sizes.intervals * sizes.elements || count(cotangent) != tokens ||
      count(behind) != states_size || count(*dx) != tokens || count(*dstep) != tokens ||
      count(*partial) != sizes.packs * warpgroups_a_row * call.tokens * 32 || count(*ddecay) != states_size ||
      count(*dskip) != sizes.rows * call.channels || count(*dfirst) != states_size) {
    return kErrors.invalid_shapes();
  }
  if (cotangent.element_type() != x.element_type() || dx->element_type() != x.element_type() ||
      dstep->element_type() != step.element_type() ||
      (step.element_type() != ffi::F32 && step.element_type() != x.element_type())) {
    return kErrors.invalid("the dtypes of the arrays do not belong together");
  }
  return dispatch_dtype<__nv_bfloat16, __half, float>(x.element_type(), kErrors, kUnsupported, [&](auto number) {
    return launch_for_step<decltype(number)>(stream, call, items, step.element_type(), warpgroups);
  });
}

}  // namespace

EJKERNEL_FFI_HANDLER(ejkernel_selective_scan_gradient, selective_scan_gradient, "warpgroups");

}  // namespace ejkernel::selective_scan
