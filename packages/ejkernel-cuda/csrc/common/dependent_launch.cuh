// Programmatic dependent launch: blocks of a kernel start while the kernel before it on the stream still runs.
//
//   kernel  | start_next_launch |        main loop         |
//   next          starts | wait_for_previous_launch ........ | reads what the kernel has written
//
// Every block of the next kernel waits, even if it reads nothing: a launch is complete when its blocks are, and the
// launch after it relies on all earlier launches being complete.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>

namespace ejkernel {

// Lets the next launch start as soon as all blocks have called this or have exited. It may be called at any time: the
// next launch sees this kernel's writes only after it waits.
__device__ __forceinline__ void start_next_launch() {
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
#endif
}

// Waits until the previous launch is complete and its writes are visible.
__device__ __forceinline__ void wait_for_previous_launch() {
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}

// Requests a kernel's dynamic shared memory. More than 48 KiB must be requested per device and process, so it is
// requested at each launch.
template <typename... Given>
cudaError_t request_shared_memory(void (*kernel)(Given...), size_t bytes) {
  return cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, static_cast<int>(bytes));
}

// Launches a kernel that starts when the previous launch is complete.
template <typename Call>
cudaError_t launch_in_order(
    void (*kernel)(Call), int64_t blocks, int threads, size_t shared, cudaStream_t stream, const Call& call) {
  const cudaError_t error = shared == 0 ? cudaSuccess : request_shared_memory(kernel, shared);
  if (error != cudaSuccess) return error;
  kernel<<<static_cast<unsigned>(blocks), threads, shared, stream>>>(call);
  return cudaGetLastError();
}

// Launches a kernel that calls `wait_for_previous_launch` itself, so that it may start early.
template <typename Call>
cudaError_t launch_early(
    void (*kernel)(Call), dim3 grid, int threads, size_t shared, cudaStream_t stream, const Call& call) {
  // Code compiled for chips before Hopper has no wait, on whatever chip it runs, so it is launched without overlap.
  cudaFuncAttributes compiled;
  const cudaError_t error = cudaFuncGetAttributes(&compiled, kernel);
  if (error != cudaSuccess) return error;
  cudaLaunchAttribute early{};
  early.id = cudaLaunchAttributeProgrammaticStreamSerialization;
  early.val.programmaticStreamSerializationAllowed = 1;
  cudaLaunchConfig_t config{};
  config.gridDim = grid;
  config.blockDim = dim3(threads);
  config.dynamicSmemBytes = shared;
  config.stream = stream;
  config.attrs = &early;
  config.numAttrs = compiled.ptxVersion >= 90 ? 1 : 0;
  return cudaLaunchKernelEx(&config, kernel, call);
}

// Launches clusters of `members` blocks of a Hopper kernel that calls `wait_for_previous_launch` itself.
template <typename... Given>
cudaError_t launch_clusters(
    void (*kernel)(Given...), int clusters, int members, int threads, size_t shared, cudaStream_t stream,
    const Given&... given) {
  const cudaError_t error = request_shared_memory(kernel, shared);
  if (error != cudaSuccess) return error;
  cudaLaunchAttribute attributes[2] = {};
  attributes[0].id = cudaLaunchAttributeClusterDimension;
  attributes[0].val.clusterDim = {static_cast<unsigned>(members), 1, 1};
  attributes[1].id = cudaLaunchAttributeProgrammaticStreamSerialization;
  attributes[1].val.programmaticStreamSerializationAllowed = 1;
  cudaLaunchConfig_t config{};
  config.gridDim = dim3(static_cast<unsigned>(clusters * members));
  config.blockDim = dim3(threads);
  config.dynamicSmemBytes = shared;
  config.stream = stream;
  config.attrs = attributes;
  config.numAttrs = 2;
  return cudaLaunchKernelEx(&config, kernel, given...);
}

}  // namespace ejkernel
