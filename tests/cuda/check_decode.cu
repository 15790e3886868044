// Runs the decoding kernels on small random calls and compares them with float64 on the host. Needs a GPU, and no JAX,
// so that it is quick under compute-sanitizer:
//
//   nvcc -std=c++17 -O3 -arch=native -I packages/ejkernel-cuda/csrc tests/cuda/check_decode.cu -o check_decode
//   ./check_decode
//   compute-sanitizer --tool memcheck ./check_decode
//   compute-sanitizer --tool racecheck ./check_decode
//   compute-sanitizer --tool racecheck ./check_decode int8      # lines that have this in them: a dtype, or a call
//
// Prints a line for each call, and fails if an output is off. Slots that no row attends to hold NaN, where a cache's
// dtype has one, and outputs are NaN before each call.
#include <algorithm>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <random>
#include <type_traits>
#include <vector>

#include <cuda_fp8.h>

#include "dense_decode/split_decode.cuh"
#include "paged_decode/paged_write.cuh"

using namespace ejkernel;
using namespace ejkernel::dense_decode;
using namespace ejkernel::paged_decode;

namespace {

void expect_success(cudaError_t error, const char* what) {
  if (error == cudaSuccess) return;
  std::printf("%s: %s\n", what, cudaGetErrorString(error));
  std::exit(1);
}

template <typename T>
T* on_device(const std::vector<T>& host) {
  T* device;
  expect_success(cudaMalloc(&device, host.size() * sizeof(T)), "cudaMalloc");
  expect_success(cudaMemcpy(device, host.data(), host.size() * sizeof(T), cudaMemcpyHostToDevice), "cudaMemcpy");
  return device;
}

template <typename T>
std::vector<T> on_host(const T* device, size_t count) {
  std::vector<T> host(count);
  expect_success(cudaMemcpy(host.data(), device, count * sizeof(T), cudaMemcpyDeviceToHost), "cudaMemcpy");
  return host;
}

// A number as a cache's bits, and back.
template <typename CacheT>
CacheT encoded(float x) {
  CacheT params;
  if constexpr (std::is_same_v<CacheT, Int8>) params.number = x != x ? 127 : std::lround(x * 30);
  if constexpr (std::is_same_v<CacheT, E4m3>) params.bits = __nv_fp8_e4m3(x).__x;
  if constexpr (std::is_same_v<CacheT, E5m2>) params.bits = __nv_fp8_e5m2(x).__x;
  if constexpr (std::is_same_v<CacheT, __half>) params = __float2half(x);
  if constexpr (std::is_same_v<CacheT, __nv_bfloat16>) params = __float2bfloat16(x);
  return params;
}

template <typename CacheT>
double decoded(CacheT x) {
  if constexpr (std::is_same_v<CacheT, Int8>) return x.number;
  if constexpr (std::is_same_v<CacheT, E4m3>) {
    __nv_fp8_e4m3 number;
    number.__x = x.bits;
    return float(number);
  }
  if constexpr (std::is_same_v<CacheT, E5m2>) {
    __nv_fp8_e5m2 number;
    number.__x = x.bits;
    return float(number);
  }
  if constexpr (std::is_same_v<CacheT, __half>) return __half2float(x);
  if constexpr (std::is_same_v<CacheT, __nv_bfloat16>) return __bfloat162float(x);
}

const char* chosen = "";  // what a line has to have in it

struct Call {
  const char* name;
  std::vector<int> lengths;
  int heads = 8, kv_heads = 2, size = 128, value_size = 128, page_size = 16;
  std::vector<int> query_start = {};  // empty for one row a sequence
  int left = 1 << 30, right = 0, blocks = 12, num_queues = 2;
  float cap = 0.f;
  bool sinks = false, starts = false, absent = false, dense = false, half = false;
  int splits = 0;  // of the kernel of dense caches; 0 for the persistent one
  bool write = false;  // tokens of query rows are not in the cache yet, which has a head more than tokens have
};

template <typename CacheT>
bool check(const Call& z, const char* dtype) {
  if (!std::strstr(z.name, chosen) && !std::strstr(dtype, chosen)) return true;
  std::mt19937 random(7);
  std::normal_distribution<float> normal;
  const bool bfloat16 = sizeof(CacheT) == 1 ? !z.half : std::is_same_v<CacheT, __nv_bfloat16>;
  const int sequences = z.lengths.size(), rows = z.query_start.empty() ? sequences : z.query_start.back() + 1;
  int longest = 1;
  for (int length : z.lengths) longest = std::max(longest, length);
  const int columns = z.dense ? 1 : (longest + z.page_size - 1) / z.page_size;
  const int page_size = z.dense ? longest + 3 : z.page_size, pages = sequences * columns + (z.dense ? 0 : 3);
  // Page n of a sequence, in another order than it has in memory; beyond a sequence's end, and where `absent`, padding.
  std::vector<int> tables(sequences * columns);
  for (int n = 0; n < sequences; ++n) {
    for (int column = 0; column < columns; ++column) {
      const int page = n * columns + (columns - 1 - column);
      const bool used = column * page_size < z.lengths[n] && !(z.absent && column % 5 == 2);
      tables[n * columns + column] = used || z.dense ? page : column % 2 ? -1 : pages + 7;
    }
  }
  const auto page_of = [&](int n, int key) { return tables[n * columns + key / page_size]; };
  // Sequence and position of a query row.
  const auto place = [&](int row) {
    if (z.query_start.empty()) return RowPosition{row, z.lengths[row] - 1};
    for (int n = 0; n < sequences; ++n) {
      const int first = z.query_start[n], next = z.query_start[n + 1];
      if (first <= row && row < next) return RowPosition{n, z.lengths[n] - (next - row)};
    }
    return RowPosition{-1, -1};
  };
  const auto random_cache = [&](int size) {
    std::vector<CacheT> cache(size_t(pages) * page_size * (z.kv_heads + z.write) * size, encoded<CacheT>(NAN));
    for (int n = 0; n < sequences; ++n) {
      for (int key = 0; key < z.lengths[n]; ++key) {
        const int page = page_of(n, key);
        if (page < 0 || page >= pages) continue;
        const size_t at = (size_t(page) * page_size + key % page_size) * (z.kv_heads + z.write) * size;
        for (int i = 0; i < z.kv_heads * size; ++i) cache[at + i] = encoded<CacheT>(normal(random));
        // A head that pads the cache: zeros where a token is written.
        if (z.write) std::fill_n(&cache[at + z.kv_heads * size], size, CacheT{});
      }
    }
    return cache;
  };
  const auto keys = random_cache(z.size), values = random_cache(z.value_size);
  std::vector<uint16_t> query(size_t(rows) * z.heads * z.size);
  std::vector<double> query_numbers(query.size());
  for (size_t i = 0; i < query.size(); ++i) {
    const __nv_bfloat16 b = __float2bfloat16(normal(random));
    const __half h = __float2half(normal(random));
    query[i] = bfloat16 ? __bfloat16_as_ushort(b) : __half_as_ushort(h);
    query_numbers[i] = bfloat16 ? __bfloat162float(b) : __half2float(h);
  }
  // The cache before the call, and its new tokens: NaN in all other rows, and in slots where nothing may be written.
  const int cache_heads = z.kv_heads + z.write;
  auto old_keys = keys, old_values = values;
  std::vector<CacheT> new_keys(size_t(rows) * z.kv_heads * z.size, encoded<CacheT>(NAN));
  std::vector<CacheT> new_values(size_t(rows) * z.kv_heads * z.value_size, encoded<CacheT>(NAN));
  for (int row = 0; z.write && row < rows; ++row) {
    const RowPosition to = place(row);
    if (to.sequence < 0 || to.position < 0) continue;
    const int page = page_of(to.sequence, to.position), slot = to.position % page_size;
    if (page < 0 || page >= pages) continue;
    const auto move = [&](std::vector<CacheT>& tokens, std::vector<CacheT>& cache, int size) {
      const size_t at = (size_t(page) * page_size + slot) * cache_heads * size;
      std::copy_n(&cache[at], z.kv_heads * size, &tokens[size_t(row) * z.kv_heads * size]);
      std::fill_n(&cache[at], cache_heads * size, encoded<CacheT>(NAN));
    };
    move(new_keys, old_keys, z.size);
    move(new_values, old_values, z.value_size);
  }
  std::vector<float> sinks(z.heads);
  std::vector<int> starts(sequences, 0);
  for (float& sink : sinks) sink = normal(random);
  for (int n = 0; z.starts && n < sequences; ++n) starts[n] = z.lengths[n] / 4;

  const auto strides = [&](int size) {
    const uint32_t head = size * sizeof(CacheT) / 16, slot = cache_heads * head;
    return Strides{page_size * slot, slot, head};
  };
  const auto fill = [&](auto& call) {
    call.query = on_device(query);
    call.keys = reinterpret_cast<const unsigned char*>(on_device(old_keys));
    call.values = reinterpret_cast<const unsigned char*>(on_device(old_values));
    call.starts = on_device(starts);
    call.sinks = z.sinks ? on_device(sinks) : nullptr;
    call.output = on_device(std::vector<uint16_t>(size_t(rows) * z.heads * z.value_size, 0xffff));
    call.lse = on_device(std::vector<float>(rows * z.heads, NAN));
    call.key_strides = strides(z.size);
    call.value_strides = strides(z.value_size);
    call.rows = call.rows_per_sink = rows;
    call.heads = z.heads;
    call.kv_heads = z.kv_heads;
    call.size = z.size;
    call.value_size = z.value_size;
    call.columns = columns;
    call.page_size = page_size;
    call.bfloat16 = bfloat16;
    call.scale = (sizeof(CacheT) == 1 && std::is_same_v<CacheT, Int8> ? 1.f / 30 : 1.f) / std::sqrt(float(z.size));
    call.cap = z.cap;
    call.value_scale = 1.5f;
    call.left = z.left;
    call.right = z.right;
  };
  const uint64_t ticket = 1234567890123456789;
  uint64_t* flags = nullptr;
  const auto launch = [&](auto size) -> DecodeParams {
    constexpr int kSize = decltype(size)::value;
    using S = TileShape<kSize, CacheT>;
    if constexpr (sizeof(CacheT) == 2) {
      if (z.splits > 0) {
        SplitDecodeParams call{};
        fill(call);
        call.ends = on_device(z.lengths);
        call.pages = 1;
        call.splits = z.splits;
        const size_t parts = size_t(z.splits) * rows * z.heads;
        call.partial = on_device(std::vector<float>(parts * z.value_size, NAN));
        call.statistics = on_device(std::vector<float>(parts * 2, NAN));
        cudaFuncSetAttribute(split_kernel<kSize, CacheT>, cudaFuncAttributeMaxDynamicSharedMemorySize, S::kSmemBytes);
        const int groups = (z.heads / z.kv_heads + kHeadsPerBlock - 1) / kHeadsPerBlock;
        split_kernel<kSize, CacheT><<<rows * z.splits * z.kv_heads * groups, S::kWarps * 32, S::kSmemBytes>>>(call);
        if (z.splits > 1) expect_success(launch_early(merge_kernel, rows * z.heads, kMergeThreads, 0, nullptr, call),
            "merge");
        return call;
      }
    }
    CacheWriteParams write{};
    PagedDecodeParams& call = write.call;
    fill(call);
    call.lengths = on_device(z.lengths);
    call.tables = z.dense ? nullptr : on_device(tables);
    call.query_start = z.query_start.empty() ? nullptr : on_device(z.query_start);
    call.pages = pages;
    call.sequences = sequences;
    call.num_queues = z.num_queues;
    call.partial = on_device(std::vector<float>(size_t(z.blocks) * 2 * kHeadsPerBlock * z.value_size, NAN));
    call.statistics = on_device(std::vector<float>(z.blocks * 2 * kHeadsPerBlock * 2, NAN));
    // What flags hold at the start does not matter.
    flags = call.flags = on_device(std::vector<uint64_t>(z.blocks * 2, 99));
    call.ticket = ticket;
    call.writes_cache = z.write;
    if (z.write) {
      const auto part = [&](const std::vector<CacheT>& tokens, const unsigned char* pages, Strides strides, int size) {
        const int pieces = size * sizeof(CacheT) / 16;
        return NewTokenCopy{reinterpret_cast<const uint4*>(on_device(tokens)), (uint4*)pages, strides, pieces, pieces};
      };
      write.sources[0] = part(new_keys, call.keys, call.key_strides, z.size);
      write.sources[1] = part(new_values, call.values, call.value_strides, z.value_size);
      write.heads = cache_heads;
    }
    // Twice, as a graph of launches does: the second one finds the flags that the first one leaves.
    for (int n = 0; n < 2; ++n) {
      if (z.write) expect_success(launch_write(nullptr, write), "write");
      expect_success(launch_paged<kSize, CacheT>(nullptr, call, z.blocks), "launch");
    }
    return static_cast<DecodeParams>(call);
  };
  const int padded = std::max(z.size, z.value_size);
  const DecodeParams call = padded <= 64    ? launch(std::integral_constant<int, 64>())
                      : padded <= 128 ? launch(std::integral_constant<int, 128>())
                                      : launch(std::integral_constant<int, 256>());
  expect_success(cudaGetLastError(), "launch");
  expect_success(cudaDeviceSynchronize(), "kernels");
  const auto got = on_host(static_cast<const uint16_t*>(call.output), size_t(rows) * z.heads * z.value_size);
  const auto got_lse = on_host(call.lse, rows * z.heads);
  // Every bit of the cache: what was written, and what was not.
  const auto same = [](const unsigned char* cache, const std::vector<CacheT>& want) {
    const auto have = on_host(cache, want.size() * sizeof(CacheT));
    return std::memcmp(have.data(), want.data(), have.size()) == 0;
  };
  const bool kept = same(call.keys, keys) && same(call.values, values);
  const auto left = on_host(flags, flags == nullptr ? 0 : z.blocks * 2);
  const bool cleared = std::count(left.begin(), left.end(), ticket) == 0;

  double difference = 0, norm = 0, lse_difference = 0;
  for (int row = 0; row < rows; ++row) {
    const RowPosition found = place(row);
    const int sequence = found.sequence, position = found.position;
    for (int head = 0; head < z.heads; ++head) {
      const int kv_head = head / (z.heads / z.kv_heads);
      std::vector<double> sums(z.value_size, 0);
      double whole = z.sinks && sequence >= 0 ? std::exp(double(sinks[head])) : 0;
      for (int key = 0; sequence >= 0 && key < z.lengths[sequence]; ++key) {
        const int page = page_of(sequence, key);
        if (page < 0 || page >= pages || key < starts[sequence]) continue;
        if (key < position - z.left || key > position + z.right) continue;
        const size_t at = (size_t(page) * page_size + key % page_size) * cache_heads + kv_head;
        double score = 0;
        for (int i = 0; i < z.size; ++i) {
          score += query_numbers[(size_t(row) * z.heads + head) * z.size + i] * decoded(keys[at * z.size + i]);
        }
        score *= (std::is_same_v<CacheT, Int8> ? 1. / 30 : 1.) / std::sqrt(double(z.size));
        if (z.cap > 0) score = z.cap * std::tanh(score / z.cap);
        whole += std::exp(score);
        for (int i = 0; i < z.value_size; ++i) sums[i] += std::exp(score) * decoded(values[at * z.value_size + i]);
      }
      const size_t place = size_t(row) * z.heads + head;
      for (int i = 0; i < z.value_size; ++i) {
        const double want = whole > 0 ? 1.5 * sums[i] / whole : 0;
        const uint16_t bits = got[place * z.value_size + i];
        const double have = bfloat16 ? __bfloat162float(__ushort_as_bfloat16(bits))
            : __half2float(__ushort_as_half(bits));
        difference += (have - want) * (have - want);
        norm += want * want;
      }
      if (whole > 0) {
        lse_difference = std::fmax(lse_difference, std::fabs(got_lse[place] - std::log(whole)));
        if (std::isnan(got_lse[place])) lse_difference = INFINITY;
      } else if (got_lse[place] != -INFINITY) {
        lse_difference = INFINITY;
      }
    }
  }
  const double error = std::sqrt(difference / (norm > 0 ? norm : 1));
  const bool right = kept && cleared && error < (bfloat16 ? 5e-3 : 1e-3) && lse_difference < 5e-3;
  std::printf("%-8s %-32s relative error %.1e, lse %.1e%s\n", dtype, z.name, error, lse_difference, right ? ""
      : kept ? "  WRONG" : "  WRONG CACHE");
  return right;
}

}  // namespace

int main(int count, char** arguments) {
  if (count > 1) chosen = arguments[1];
  bool right = true;
  const std::vector<int> uneven = {537, 1, 0, 64, 300};
  std::vector<Call> calls(19);
  calls[0] = {"pages of 16", uneven};
  calls[1] = {"pages of 1, sinks, cap", uneven, 6, 3, 64, 48, 1};
  calls[1].num_queues = 3;
  calls[1].sinks = true;
  calls[1].cap = 1.5f;
  calls[2] = {"20 heads, pages of 24", uneven, 20, 1, 160, 256, 24};
  calls[3] = {"window, starts, absent pages", uneven};
  calls[3].left = 200;
  calls[3].starts = calls[3].absent = true;
  calls[4] = {"query rows of some sequences", uneven, 8, 2, 128, 128, 64, {0, 2, 2, 2, 3, 4}};
  calls[5] = {"not causal", uneven, 8, 2, 128, 128, 64, {0, 2, 2, 2, 3, 4}};
  calls[5].left = 40;
  calls[5].right = 3;
  calls[6] = {"no pages", uneven};
  calls[6].dense = calls[6].sinks = calls[6].half = true;
  calls[7] = {"one sequence, one line", {2000}, 8, 2, 128, 128, 64};
  calls[7].num_queues = 1;
  calls[7].blocks = 33;
  for (const int splits : {1, 3}) {
    Call& z = calls[7 + (splits + 1) / 2] = {splits == 1 ? "dense, whole" : "dense, 3 splits", uneven, 40, 2, 128, 96};
    z.dense = z.sinks = true;
    z.splits = splits;
  }
  calls[10] = {"new tokens, a padded head", uneven};
  calls[10].write = true;
  calls[11] = {"new tokens of some, absent pages", uneven, 6, 3, 64, 48, 16, {0, 2, 2, 2, 3, 4}};
  calls[11].num_queues = 3;
  calls[11].write = calls[11].absent = true;
  // Shares of whole items, and items of two shares each.
  calls[12] = {"one length, whole items", std::vector<int>(16, 2176), 4, 1, 64, 64, 64};
  calls[12].blocks = 17;
  calls[13] = {"one length, two shares each", {2176, 2176, 2176}, 8, 2, 128, 128, 64};
  calls[13].blocks = 13;
  calls[12].num_queues = calls[13].num_queues = 1;
  // More pieces than a thread has in registers, and than a warp has lanes.
  calls[14] = {"19 pieces", {4864}, 8, 2, 128, 128, 64};
  calls[14].blocks = 38;
  calls[15] = {"40 pieces, heads of 256", {10240, 3}, 4, 1, 256, 208, 64};
  calls[15].blocks = 40;
  calls[15].num_queues = 1;
  // New tokens far behind a segment's first keys, several of a sequence, and ones that their rows do not attend to.
  calls[16] = {"new tokens, long segments", {3000, 1, 200, 1500}, 8, 2, 128, 128, 64, {0, 3, 3, 3, 4}};
  calls[17] = {"new tokens, not attended to", uneven};
  calls[17].right = -5;
  calls[18] = {"new tokens, heads of 256", {600, 3, 70}, 20, 1, 256, 208, 24, {0, 2, 2, 3}};
  calls[16].write = calls[17].write = calls[18].write = true;
  for (const Call& z : calls) {
    right &= check<__nv_bfloat16>(z, "bfloat16") & check<__half>(z, "float16");
    if (z.splits > 0) continue;
    right &= check<E4m3>(z, "e4m3") & check<E5m2>(z, "e5m2") & check<Int8>(z, "int8");
  }
  std::printf(right ? "all right\n" : "WRONG\n");
  return right ? 0 : 1;
}
