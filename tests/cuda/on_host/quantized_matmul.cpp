// Runs the kernels of csrc/quantized_matmul block by block.
#include "device.h"
#include "quantized_matmul/columns.cuh"
#include "quantized_matmul/quantized_matmul.cuh"
#include "quantized_matmul/rows_warpgroups.cuh"
#include "quantized_matmul/warpgroups.cuh"

namespace ejkernel::quantized_matmul {
namespace {

struct Arrays {
  const void *x, *words, *scales, *zeros;
  void* output;
};

struct Numbers {
  int m, k, n, row_words, row_groups, log_group, transpose, warpgroups, splits;
};

template <typename L>
void launch(const QuantizedCall& call) {
  const int tiles = (call.n + L::kTile - 1) / L::kTile * ((call.m + L::kRows - 1) / L::kRows);
  for (int first = 0; first < tiles * call.splits; first += call.splits) {
    device::run_cluster(first, call.splits, shared_bytes<L>(), [&] { quantized_kernel<L>(call); });
  }
}

template <typename L>
void launch_whole_columns(const QuantizedCall& call) {
  for (int block = 0; block < (call.n + L::kTile - 1) / L::kTile; ++block) {
    const auto kernel = [&] { whole_columns_kernel<L>(call); };
    device::run_cluster(block, 1, L::kWarps * L::kWarpBytes, kernel, L::kThreads);
  }
}

void launch_transposed(const QuantizedCall& call) {
  if (call.m <= 8) return launch<Transposed<1>>(call);
  if (call.m <= 16) return launch<Transposed<2>>(call);
  call.m <= 32 ? launch<Transposed<4>>(call) : launch<Transposed<8>>(call);
}

void describe(
    TensorMap* map, const void* matrix, int rows, int row_bytes, int tile_rows, int tile_bytes, int number_bytes) {
  const Matrix own = {static_cast<const char*>(matrix), rows, row_bytes, tile_rows, tile_bytes, number_bytes};
  std::memcpy(map, &own, sizeof(own));
}

template <int Rows>
void launch_warpgroups(const QuantizedCall& from) {
  using L = Warpgroups<Rows>;
  const int groups = from.k / kGroup;
  Maps maps;
  describe(&maps.words, from.words, from.n, from.k / 2, L::kTile, 128, 4);
  describe(&maps.scales, from.scales, from.n / 2, groups * 4, L::kTile / 2, 16, 2);
  describe(&maps.zeros, from.zeros, from.n / 2, groups * 4, L::kTile / 2, 16, 2);
  // It begins as NaN.
  std::vector<char> memory(from.k / kUnit * XUnit<Rows>::kBytes + 16, char(0xFF));
  char* const arranged = reinterpret_cast<char*>((uintptr_t(memory.data()) + 15) / 16 * 16);
  for (int block = 0; block < groups * Rows * 8 / kArrangeThreads; ++block) {
    const ArrangeCall call = {maps.words, from.x, arranged, from.m, from.k, from.n, from.splits};
    device::run_cluster(block, 1, 0, [&] { arrange_kernel<Rows>(call); }, kArrangeThreads);
  }
  device::arrays.push_back({arranged, memory.size() - 16});
  const WarpgroupsCall call = {arranged, from.output, from.m, from.k, from.n, from.splits};
  for (int first = 0; first < (call.n + L::kTile - 1) / L::kTile * call.splits; first += call.splits) {
    device::run_cluster(first, call.splits, L::kBytes, [&] { warpgroups_kernel<L>(call, maps); }, L::kThreads);
  }
}

template <int Rows>
void launch_rows(const QuantizedCall& from) {
  using L = RowsWarpgroups<Rows>;
  const RowsCall call = {from.scales, from.zeros, from.output, from.m, from.k, from.n, from.splits};
  RowsMaps maps;
  describe(&maps.x, from.x, call.m, call.k * 2, Rows, 128, 2);
  describe(&maps.words, from.words, call.k, call.n / 2, L::kDepth, 128, 4);
  for (int first = 0; first < (call.n + L::kTile - 1) / L::kTile * call.splits; first += call.splits) {
    device::run_cluster(first, call.splits, L::kBytes, [&] { rows_warpgroups_kernel<L>(call, maps); }, L::kThreads);
  }
}

void run(const Arrays& arrays, const Numbers& a) {
  QuantizedCall call;
  call.x = static_cast<const __nv_bfloat16*>(arrays.x);
  call.words = static_cast<const uint32_t*>(arrays.words);
  call.scales = static_cast<const uint16_t*>(arrays.scales);
  call.zeros = static_cast<const uint16_t*>(arrays.zeros);
  call.output = static_cast<__nv_bfloat16*>(arrays.output);
  call.m = a.m, call.k = a.k, call.n = a.n;
  call.row_words = a.row_words, call.row_groups = a.row_groups, call.log_group = a.log_group;
  call.splits = a.splits;
  const size_t rows = a.transpose ? a.n : a.k;
  const size_t groups = rows * a.row_groups * 2;
  device::arrays = {{static_cast<const char*>(arrays.x), size_t(a.m) * a.k * 2},
                    {static_cast<const char*>(arrays.words), rows * a.row_words * 4},
                    {static_cast<const char*>(arrays.scales), groups},
                    {static_cast<const char*>(arrays.zeros), groups}};
  if (a.warpgroups && !a.transpose) {
    if (call.m <= 8) return launch_rows<8>(call);
    if (call.m <= 16) return launch_rows<16>(call);
    if (call.m <= 32) return launch_rows<32>(call);
    return call.m <= 48 ? launch_rows<48>(call) : launch_rows<64>(call);
  }
  if (a.warpgroups) return call.m <= 32 ? launch_warpgroups<32>(call) : launch_warpgroups<64>(call);
  if (a.splits == 0) {
    return call.m <= 8 ? launch_whole_columns<WholeColumns<1>>(call) : launch_whole_columns<WholeColumns<2>>(call);
  }
  a.transpose ? launch_transposed(call) : launch<RowsFirst<1>>(call);
}

}  // namespace
}  // namespace ejkernel::quantized_matmul

// What was wrong, or null.
extern "C" const char* quantized_matmul(const ejkernel::quantized_matmul::Arrays* arrays, const ejkernel::quantized_matmul::Numbers* numbers) {
  device::complaint = nullptr;
  ejkernel::quantized_matmul::run(*arrays, *numbers);
  return device::complaint;
}
