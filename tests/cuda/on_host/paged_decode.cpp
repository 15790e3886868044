// Runs the kernels over codes of csrc/paged_decode block by block, in the order of their indices: a block waits for
// results of those before it alone.
#include "device.h"

#include "cuda_bf16.h"
#include "cuda_fp16.h"
#include "cuda_runtime.h"

// A grid of queues and their blocks.
namespace device {
struct Position { unsigned x, y; };
inline unsigned queues;
}  // namespace device
#undef blockIdx
#undef gridDim
#define blockIdx (device::Position{device::current->block->index % device::queues, device::current->block->index / device::queues})
#define gridDim (device::Position{device::queues, device::blocks_of_grid / device::queues})
#define blockDim (device::Index{device::kThreads})
#define __shared__ static


struct dim3 { unsigned x, y; };
using cudaStream_t = void*;

inline long long min(long long a, long long b) { return a < b ? a : b; }
inline long long max(long long a, long long b) { return a < b ? b : a; }
inline void __threadfence() {}
inline __half __float2half_rn(float) { return {}; }
inline float __fdividef(float a, float b) { return a / b; }
inline uint32_t __funnelshift_r(uint32_t low, uint32_t high, int shift) {
  return uint32_t((uint64_t(high) << 32 | low) >> shift);
}
inline int __reduce_min_sync(unsigned, int x) {
  for (int step = 1; step < 32; step *= 2) x = min(x, int(__shfl_xor_sync(~0u, uint32_t(x), step)));
  return x;
}
inline int __reduce_max_sync(unsigned mask, int x) { return -__reduce_min_sync(mask, -x); }
inline long long __shfl_sync(unsigned mask, long long x, int lane) {
  const uint32_t low = __shfl_sync(mask, uint32_t(x), lane), high = __shfl_sync(mask, uint32_t(x >> 32), lane);
  return (long long)(uint64_t(high) << 32 | low);
}
inline long long __shfl_up_sync(unsigned mask, long long x, int lanes) {
  const int lane = device::current->index % 32;
  return __shfl_sync(mask, x, lane < lanes ? lane : lane - lanes);
}

#include "common/tensor_core.cuh"
namespace ejkernel {
template <>
struct Half<__half> {
  static uint32_t pack(float, float) { return 0; }
};
inline void load_matrices(uint32_t (&)[4], uint32_t) {}
inline void load_matrices_transposed(uint32_t (&)[4], uint32_t) {}
}  // namespace ejkernel

#include "paged_decode/codes.cuh"

namespace ejkernel::paged_decode {
namespace {

struct Sizes {
  int rows, heads, signs, kv_heads, sequences, columns, pages, page_size, queues, left, right, key_bits, value_bits, key_levels,
      value_levels, blocks;
};

struct Arrays {
  const void *query, *keys, *values, *tables, *lengths, *starts, *query_start, *num_valid_seqs, *sinks, *signs, *key_norms,
      *value_norms, *key_codebook, *value_codebook, *query_map, *rotation;
  void *output, *lse, *partial, *statistics, *flags, *rotated_output;
};

template <int KeyBits, int ValueBits, int Signs>
bool run_if(CodeDecodeParams call, const Sizes& n) {
  if (n.key_bits != KeyBits || n.value_bits != ValueBits || n.signs != Signs) return false;
  using S = TileShape<128, Codes<KeyBits, ValueBits, Signs>>;
  call.columns_per_round = S::kKeysPerRound / call.page_size;
  call.slots_per_round = S::kKeysPerRound % call.page_size;
  call.heads_per_kv_head = call.heads / call.kv_heads;
  call.blocks_per_kv_head = (call.heads_per_kv_head + S::kHeads - 1) / S::kHeads;
  call.items_per_queue = call.kv_heads * call.blocks_per_kv_head / call.num_queues;
  for (int block = 0; block < n.blocks; ++block) {
    const auto kernel = [&] { paged_kernel<128, Codes<KeyBits, ValueBits, Signs>>(call); };
    device::run_cluster(block, 1, S::kSmemBytes, kernel, S::kWarps * 32);
  }
  return true;
}

const char* run(const Arrays& a, const Sizes& n, const float* factors) {
  CodeDecodeParams call{};
  const uint32_t key_row = 128 * n.key_bits / 8, value_row = 128 * n.value_bits / 8, sign_row = n.signs / 8;
  const auto strides = [&](uint32_t row) {
    return Strides{n.page_size * n.kv_heads * row / 16, n.kv_heads * row / 16, row / 16};
  };
  call.query = a.query, call.keys = (const unsigned char*)a.keys, call.values = (const unsigned char*)a.values;
  call.tables = (const int*)a.tables, call.lengths = (const int*)a.lengths, call.starts = (const int*)a.starts;
  call.query_start = (const int*)a.query_start, call.num_valid_seqs = (const int*)a.num_valid_seqs;
  call.sinks = (const float*)a.sinks, call.signs = (const unsigned char*)a.signs;
  call.key_norms = (const uint32_t*)a.key_norms, call.value_norms = (const uint16_t*)a.value_norms;
  call.key_codebook = (const float*)a.key_codebook, call.value_codebook = (const float*)a.value_codebook;
  call.query_map = (const float*)a.query_map, call.rotation = (const float*)a.rotation;
  call.final_output = (uint16_t*)a.output, call.output = a.rotated_output, call.lse = (float*)a.lse;
  call.partial = (float*)a.partial, call.statistics = (float*)a.statistics, call.flags = (uint64_t*)a.flags;
  call.ticket = 1ull << 63 | 7;
  call.key_strides = strides(key_row), call.value_strides = strides(value_row), call.sign_strides = strides(sign_row);
  call.rows = n.rows, call.rows_per_sink = max(n.rows, 1), call.heads = n.heads, call.size = 128 + n.signs;
  call.value_size = 128, call.kv_heads = n.kv_heads, call.sequences = n.sequences, call.columns = n.columns;
  call.pages = n.pages, call.page_size = n.page_size, call.num_queues = n.queues;
  call.left = n.left, call.right = n.right, call.scale = factors[0], call.cap = factors[1];
  call.value_scale = factors[2], call.bfloat16 = true;
  call.key_levels = n.key_levels, call.value_levels = n.value_levels, call.ones = 0x3f803f80;
  device::complaint = nullptr;
  device::queues = n.queues, device::blocks_of_grid = n.blocks;
  const size_t tokens = size_t(n.pages) * n.page_size * n.kv_heads;
  const auto bytes = [](const void* array) { return static_cast<const char*>(array); };
  device::arrays = {{bytes(a.keys), tokens * key_row}, {bytes(a.values), tokens * value_row},
                    {bytes(a.signs), tokens * sign_row}, {bytes(a.key_norms), tokens * 4}, {bytes(a.value_norms), tokens * 2}};
  if (!(run_if<4, 4, 0>(call, n) || run_if<4, 4, 128>(call, n) || run_if<3, 4, 128>(call, n) || run_if<2, 3, 128>(call, n) ||
        run_if<1, 2, 128>(call, n) || run_if<3, 3, 0>(call, n) || run_if<2, 2, 0>(call, n))) {
    return "no kernel is compiled for this format";
  }
  return device::complaint;
}

}  // namespace
}  // namespace ejkernel::paged_decode

// What was wrong, or null.
extern "C" const char* paged_codes(const void* arrays, const void* sizes, const float* factors) {
  using namespace ejkernel::paged_decode;
  return run(*static_cast<const Arrays*>(arrays), *static_cast<const Sizes*>(sizes), factors);
}
