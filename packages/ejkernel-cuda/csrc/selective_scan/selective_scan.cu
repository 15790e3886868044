// The XLA FFI handler of the selective scan.
#include "common/dependent_launch.cuh"
#include "selective_scan/call.cuh"

namespace ejkernel::selective_scan {
namespace {

constexpr HandlerErrors kErrors{"selective scan"};

template <typename Tile>
ffi::Error launch(cudaStream_t stream, const SelectiveScan& call) {
  const int64_t warps = int64_t(call.rows) * ((call.channels + Tile::kChannels - 1) / Tile::kChannels);
  const int64_t blocks = (warps + Tile::kWarps - 1) / Tile::kWarps;
  return kErrors.check(
      "launch", launch_in_order(scan_kernel<Tile>, blocks, Tile::kWarps * 32, Tile::kBytes, stream, call));
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
  return kErrors.invalid("there is no kernel for so many channels and lanes");
}

ffi::Error selective_scan(
    cudaStream_t stream, ffi::AnyBuffer x, ffi::AnyBuffer step, ffi::Buffer<ffi::F32> decay,
    ffi::Buffer<ffi::F32> columns, ffi::Buffer<ffi::F32> skip, ffi::Buffer<ffi::F32> initial,
    ffi::Buffer<ffi::S32> bounds, ffi::Buffer<ffi::S32> first_intervals, ffi::Result<ffi::AnyBuffer> output,
    ffi::Result<ffi::Buffer<ffi::F32>> states, ffi::Result<ffi::Buffer<ffi::F32>> final, int32_t channels,
    int32_t lanes) {
  if (output->element_count() == 0) return ffi::Error::Success();
  const ScanOperands operands{x, step, decay, columns, skip, bounds, first_intervals};
  if (!operands.has_axes()) return kErrors.invalid(kMissingAxis);
  SelectiveScan call{};
  const ScanSizes sizes = set_operands(call, operands);
  call.initial = data_or_null(initial);
  call.output = output->untyped_data();
  call.states = states->typed_data();
  call.final = final->typed_data();
  if (!consistent(call, operands, sizes) ||
      (call.initial != nullptr && count(initial) != sizes.rows * sizes.elements) ||
      count(*output) != sizes.packs * sizes.row || count(*states) != sizes.intervals * sizes.elements ||
      count(*final) != sizes.rows * sizes.elements || output->element_type() != x.element_type()) {
    return kErrors.invalid_shapes();
  }
  if (step.element_type() != ffi::F32 && step.element_type() != x.element_type()) {
    return kErrors.invalid("dt is neither float32 nor of the dtype of x");
  }
  if (lanes > 1 && call.channels % 8 != 0) return kErrors.invalid("so many lanes want a multiple of 8 channels");
  const Shape shape{channels, lanes, int(sizes.padded)};
  return dispatch_dtype<__nv_bfloat16, __half, float>(x.element_type(), kErrors, kUnsupported, [&](auto number) {
    using X = decltype(number);
    return step.element_type() == ffi::F32 ? launch_for_shape<X, float>(stream, call, shape)
                                           : launch_for_shape<X, X>(stream, call, shape);
  });
}

}  // namespace

EJKERNEL_FFI_HANDLER(ejkernel_selective_scan, selective_scan, "channels", "lanes");

}  // namespace ejkernel::selective_scan
