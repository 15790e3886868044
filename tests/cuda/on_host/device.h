// CUDA C++ on a machine without a GPU: threads are fibers of one thread of the host, which the kernels' sources see
// through the names of CUDA. Each file of this folder that has a name of CUDA's stands in for that one.
//
// Asynchronous copies happen when a thread waits for them and not before, shared memory begins as NaN and is NaN again
// when its block has ended, and the order of threads changes with every switch: a barrier or a wait that is missing
// changes the result.
#pragma once

#include <setjmp.h>
#include <ucontext.h>

#include <cmath>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <deque>
#include <functional>
#include <memory>
#include <random>
#include <vector>

#define __device__
#define __host__
#define __global__
#define __grid_constant__
#define __forceinline__ inline
#define __launch_bounds__(...)
#define __cluster_dims__(...)
#define __CUDA_ARCH__ 900

struct uint2 { uint32_t x, y; };
struct alignas(16) uint4 { uint32_t x, y, z, w; };
struct alignas(16) int4 { int x, y, z, w; };
struct float2 { float x, y; };
struct alignas(16) float4 { float x, y, z, w; };

inline int min(int a, int b) { return a < b ? a : b; }
inline int max(int a, int b) { return a < b ? b : a; }
inline float __uint_as_float(uint32_t x) { float y; std::memcpy(&y, &x, 4); return y; }
inline uint32_t __float_as_uint(float x) { uint32_t y; std::memcpy(&y, &x, 4); return y; }
inline uint32_t __byte_perm(uint32_t a, uint32_t b, uint32_t selector) {
  const uint64_t bytes = uint64_t(b) << 32 | a;
  uint32_t result = 0;
  for (int i = 0; i < 4; ++i) result |= uint32_t(bytes >> (selector >> (4 * i) & 7) * 8 & 0xFF) << (8 * i);
  return result;
}

namespace device {

constexpr int kThreads = 256, kMostThreads = 1024, kStack = 256 * 1024;

struct Copy { char* to; const char* from; int bytes, size; };

struct Index { unsigned x; };

void yield();

inline const char* complaint;  // the first
inline void complain(const char* what) { complaint = complaint ? complaint : what; }

struct Barrier {
  int size = 0, count = 0;
  unsigned generation = 0;
  void wait() {
    const unsigned own = generation;
    if (++count == size) {
      count = 0;
      ++generation;
    } else {
      while (generation == own) yield();
    }
  }
  void arrive() {
    if (++count < size) return;
    count = 0;
    ++generation;
  }
};

struct Warp {
  Barrier barrier;
  uint32_t values[32][6];
};

struct Block {
  unsigned index, rank, running;  // in the grid, in the cluster; how many of its threads have not returned
  std::vector<char> memory;
  char* shared;
  Barrier barrier, first;  // of all threads, of the first ones
  Barrier named[16];
  Warp warps[kMostThreads / 32];
  std::deque<std::function<void()>> bulk_copies;  // that still have to happen
};

struct Thread {
  ucontext_t context;  // of its beginning
  jmp_buf place;  // where it goes on
  bool begun = false;
  Block* block;
  unsigned index;
  bool done = false;
  std::vector<Copy> open;
  std::vector<std::vector<Copy>> groups;  // those that still have to happen
  std::vector<std::function<void()>> products;  // of warpgroups: of the group that is open, and the others
  std::vector<std::vector<std::function<void()>>> product_groups;
};

inline std::vector<std::unique_ptr<Block>> blocks;  // of a cluster
inline Barrier cluster;
inline Thread* current;
inline jmp_buf scheduler;
inline std::vector<std::unique_ptr<char[]>> stacks;  // of the threads of any cluster
inline std::function<void()> body;
inline unsigned blocks_of_grid;
inline std::vector<std::pair<const char*, size_t>> arrays;  // what kernels may read

// `swapcontext` would ask the kernel for the mask of signals at each switch.
inline void yield() {
  if (!_setjmp(current->place)) _longjmp(scheduler, 1);
}
inline void resume(Thread& thread) {
  if (_setjmp(scheduler)) return;
  if (thread.begun) _longjmp(thread.place, 1);
  thread.begun = true;
  setcontext(&thread.context);
}
inline Warp& warp() { return current->block->warps[current->index / 32]; }

inline void run_thread() {
  body();
  current->done = true;
  yield();
}

// Complains unless memory is that of an array.
inline void check_read(const char* from, int bytes) {
  bool known = false;
  for (const auto& [start, size] : arrays) known |= from >= start && from + bytes <= start + size;
  if (!known) complain("a copy outside of the arrays");
}

inline void perform(const Copy& copy) {
  if (reinterpret_cast<uintptr_t>(copy.to) % copy.size || (copy.bytes && uintptr_t(copy.from) % copy.size)) {
    complain("a copy is not aligned");
  }
  if (copy.bytes) check_read(copy.from, copy.bytes);
  if (copy.bytes < copy.size) std::memset(copy.to, 0, copy.size);
  std::memcpy(copy.to, copy.from, copy.bytes);
}

// Runs blocks first to first + count as a cluster.
inline void run_cluster(
    unsigned first, unsigned count, size_t shared_bytes, std::function<void()> kernel, unsigned size = kThreads) {
  static std::mt19937 random(1);
  constexpr int kGuard = 64;
  body = kernel;
  blocks.clear();
  cluster = {int(count * size)};
  std::vector<std::unique_ptr<Thread>> threads;
  for (unsigned b = 0; b < count; ++b) {
    blocks.push_back(std::make_unique<Block>());
    Block& block = *blocks.back();
    block.index = first + b;
    block.rank = b;
    block.running = size;
    block.memory.assign(shared_bytes + kGuard + 16, char(0xFF));
    block.shared = reinterpret_cast<char*>((uintptr_t(block.memory.data()) + 15) / 16 * 16);
    block.barrier.size = size;
    for (Warp& one : block.warps) one.barrier.size = 32;
    for (unsigned t = 0; t < size; ++t) {
      auto thread = std::make_unique<Thread>();
      thread->block = &block;
      thread->index = t;
      if (stacks.size() == threads.size()) stacks.push_back(std::make_unique<char[]>(kStack));
      getcontext(&thread->context);
      thread->context.uc_stack = {stacks[threads.size()].get(), 0, size_t(kStack)};
      thread->context.uc_link = nullptr;
      makecontext(&thread->context, run_thread, 0);
      threads.push_back(std::move(thread));
    }
  }
  size_t running = threads.size();
  while (running) {
    // Another thread goes first each time; strides that are odd reach all of them.
    const size_t start = random() % threads.size(), stride = random() % 2 ? 1 : threads.size() - 1;
    for (size_t i = 0; i < threads.size(); ++i) {
      Thread& thread = *threads[(start + i * stride) % threads.size()];
      if (thread.done) continue;
      current = &thread;
      resume(thread);
      if (!thread.done) continue;
      --running;
      // The multiprocessor gives the shared memory of a block that has ended to another block.
      if (--thread.block->running == 0) std::memset(thread.block->shared, 0xFF, shared_bytes);
    }
  }
  for (const auto& block : blocks) {
    for (int i = 0; i < kGuard; ++i) {
      if (block->shared[shared_bytes + i] != char(0xFF)) complain("a write past shared memory");
    }
  }
}

}  // namespace device

#define threadIdx (device::Index{device::current->index})
#define blockIdx (device::Index{device::current->block->index})
#define gridDim (device::Index{device::blocks_of_grid})
inline void __syncthreads() { device::current->block->barrier.wait(); }

inline void __syncwarp() { device::warp().barrier.wait(); }
inline float __shfl_sync(unsigned, float value, int lane) {
  device::Warp& warp = device::warp();
  warp.values[device::current->index % 32][0] = __float_as_uint(value);
  warp.barrier.wait();
  const float other = __uint_as_float(warp.values[lane % 32][0]);
  warp.barrier.wait();
  return other;
}
inline int __ffs(int x) { return __builtin_ffs(x); }
inline unsigned __shfl_sync(unsigned mask, unsigned value, int lane) {
  return __float_as_uint(__shfl_sync(mask, __uint_as_float(value), lane));
}
inline int __shfl_sync(unsigned mask, int value, int lane) { return __shfl_sync(mask, unsigned(value), lane); }
inline float __shfl_up_sync(unsigned mask, float value, int lanes) {
  const int lane = device::current->index % 32;
  return __shfl_sync(mask, value, lane < lanes ? lane : lane - lanes);
}
template <typename T>
T __ldg(const T* from) { return *from; }
inline float __shfl_xor_sync(unsigned mask, float value, int lane) {
  return __shfl_sync(mask, value, device::current->index % 32 ^ lane);
}
inline uint32_t __shfl_xor_sync(unsigned mask, uint32_t value, int lane) {
  return __float_as_uint(__shfl_xor_sync(mask, __uint_as_float(value), lane));
}
inline unsigned __ballot_sync(unsigned, bool vote) {
  device::Warp& warp = device::warp();
  warp.values[device::current->index % 32][0] = vote;
  warp.barrier.wait();
  unsigned votes = 0;
  for (int lane = 0; lane < 32; ++lane) votes |= warp.values[lane][0] << lane;
  warp.barrier.wait();
  return votes;
}
inline bool __any_sync(unsigned mask, bool vote) { return __ballot_sync(mask, vote) != 0; }
inline int __clz(unsigned x) { return __builtin_clz(x); }
