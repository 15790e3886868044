// Runs the kernels of csrc/quantized_matmul.cuh block by block.
#include "device.h"
#include "quantized_matmul.cuh"

namespace ejkernel {
namespace {

struct Arrays {
  const void *x, *words, *scales, *zeros;
  void* output;
  float* parts;
};

struct Numbers {
  int m, k, n, row_words, row_groups, log_group, code, scale, transpose, wide, splits, stages, cluster, bfloat;
};

template <typename L, typename T>
void launch(const QuantizedCall<T>& call) {
  const int ring = ring_bytes<L>(call.stages, call.log_group, log_scale_bytes(call.scale));
  const int bytes = ring + L::extra_bytes(call.log_group), together = call.cluster ? call.splits : 1;
  const int blocks = (call.n + L::kTile - 1) / L::kTile * call.splits;
  for (int first = 0; first < blocks; first += together) {
    device::run_cluster(first, together, bytes, [&] { quantized_kernel<L, T>(call); });
  }
}

template <template <Code, int, int, typename> class L, Code C, int WarpsN, typename T>
void launch_for_rows(const QuantizedCall<T>& call) {
  if (call.m <= 8) return launch<L<C, 1, WarpsN, T>, T>(call);
  if (call.m <= 16) return launch<L<C, 2, WarpsN, T>, T>(call);
  return launch<L<C, 8, WarpsN, T>, T>(call);
}

template <template <Code, int, int, typename> class L, int Wide, int Narrow, typename T>
void launch_for_code(const Numbers& a, const QuantizedCall<T>& call) {
  switch (static_cast<Code>(a.code)) {
    case Code::kAffine4:
      return a.wide ? launch_for_rows<L, Code::kAffine4, Wide, T>(call)
                    : launch_for_rows<L, Code::kAffine4, Narrow, T>(call);
    case Code::kAffine8: return launch_for_rows<L, Code::kAffine8, Wide, T>(call);
    case Code::kTable4: return launch_for_rows<L, Code::kTable4, Wide, T>(call);
    default: return launch_for_rows<L, Code::kFloat8, Wide, T>(call);
  }
}

template <typename T>
void run(const Arrays& arrays, const Numbers& a) {
  QuantizedCall<T> call;
  call.x = static_cast<const T*>(arrays.x);
  call.words = static_cast<const uint32_t*>(arrays.words);
  call.scales = arrays.scales;
  call.zeros = arrays.zeros;
  call.output = static_cast<T*>(arrays.output);
  call.parts = arrays.parts;
  call.scale = static_cast<Scale>(a.scale);
  call.m = a.m, call.k = a.k, call.n = a.n;
  call.row_words = a.row_words, call.row_groups = a.row_groups, call.log_group = a.log_group;
  call.splits = a.splits, call.stages = a.stages, call.cluster = a.cluster && a.splits > 1;
  const size_t rows = a.transpose ? a.n : a.k, groups = (rows * a.row_groups) << log_scale_bytes(call.scale);
  device::arrays = {{static_cast<const char*>(arrays.x), size_t(a.m) * a.k * 2},
                    {static_cast<const char*>(arrays.words), rows * a.row_words * 4},
                    {static_cast<const char*>(arrays.scales), groups},
                    {static_cast<const char*>(arrays.zeros), call.scale == Scale::kAffine ? groups : 0}};
  if (a.transpose) return launch_for_code<Transposed, 8, 4, T>(a, call);
  return launch_for_code<RowsFirst, 4, 2, T>(a, call);
}

}  // namespace
}  // namespace ejkernel

// What was wrong, or null.
extern "C" const char* quantized_matmul(const ejkernel::Arrays* arrays, const ejkernel::Numbers* numbers) {
  device::complaint = nullptr;
  numbers->bfloat ? ejkernel::run<__nv_bfloat16>(*arrays, *numbers) : ejkernel::run<__half>(*arrays, *numbers);
  return device::complaint;
}
