// The XLA FFI handler of the indexer's selection.
#include "common/dependent_launch.cuh"
#include "common/ffi_handler.cuh"
#include "lightning_indexer/select.cuh"

namespace ejkernel::lightning_indexer {
namespace {

constexpr HandlerErrors kErrors{"lightning indexer selection"};

using S32 = ffi::Buffer<ffi::S32>;

template <int Slots>
ffi::Error launch(cudaStream_t stream, SelectCall& call, int64_t rows) {
  call.capacity = Slots * kSelectThreads;
  const size_t bytes = sizeof(SelectShared) + call.capacity * sizeof(uint64_t);
  return kErrors.check("launch", launch_in_order(select_kernel<Slots>, rows, kSelectThreads, bytes, stream, call));
}

ffi::Error select(cudaStream_t stream, S32 ordered_scores, S32 key_starts, S32 key_ends, ffi::Result<S32> indices,
                  ffi::ResultBuffer<ffi::F32> scores) {
  if (indices->element_count() == 0) return ffi::Error::Success();
  SelectCall call;
  call.ordered_scores = ordered_scores.typed_data();
  call.key_starts = key_starts.typed_data();
  call.key_ends = key_ends.typed_data();
  call.indices = indices->typed_data();
  call.scores = scores->typed_data();
  call.pitch = last_dimension(ordered_scores);
  call.top_k = last_dimension(*indices);
  const int64_t rows = count(key_starts);
  // The kernel relies on the shapes and checks nothing.
  if (call.pitch % 4 || count(ordered_scores) != rows * call.pitch || count(key_ends) != rows ||
      count(*indices) != rows * call.top_k || count(*scores) != rows * call.top_k) {
    return kErrors.invalid_shapes();
  }
  if (rows > INT32_MAX) return kErrors.invalid("the kernel has at most 2 ** 31 - 1 rows");
  if (call.top_k <= 2048) return launch<kFewSlots>(stream, call, rows);
  if (call.top_k <= 4096) return launch<kManySlots>(stream, call, rows);
  return kErrors.invalid("the kernel selects at most 4096 keys");
}

}  // namespace

EJKERNEL_FFI_HANDLER(ejkernel_indexer_select, select);

}  // namespace ejkernel::lightning_indexer
