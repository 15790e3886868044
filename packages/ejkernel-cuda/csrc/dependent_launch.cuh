// Programmatic dependent launch: blocks of a kernel start while the kernel before it on the stream still runs.
//
//   kernel  | start_next_launch |        main loop         |
//   next          starts | wait_for_previous_launch ........ | reads what the kernel has written
//
// Every block of the next kernel waits, whether it reads anything or not: a launch is complete when its blocks are, and
// what follows on the stream must find the launch before complete, too.
#pragma once

#include <cuda_runtime.h>

namespace ejkernel {

// Lets the next launch begin as soon as all blocks have come here or have ended. It may come early: the next launch has
// none of this kernel's writes before it has waited.
__device__ __forceinline__ void start_next_launch() {
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
#endif
}

// Waits until the launch before is complete and its writes are visible.
__device__ __forceinline__ void wait_for_previous_launch() {
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}

// Launches a kernel that waits by itself for the launch before.
template <typename Call>
cudaError_t launch_early(
    void (*kernel)(Call), dim3 grid, int threads, size_t shared, cudaStream_t stream, const Call& call) {
  // Code for chips before Hopper cannot wait, on whatever chip it runs: there the launch stays an ordinary one.
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

// Launches clusters of `members` blocks of a kernel for Hopper that waits by itself for the launch before.
template <typename... Given>
cudaError_t launch_clusters(
    void (*kernel)(Given...), int clusters, int members, int threads, size_t shared, cudaStream_t stream,
    const Given&... given) {
  // More than 48 KiB have to be asked for, on every device that a process launches on; so it is done each time.
  const cudaError_t error =
      cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, static_cast<int>(shared));
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
