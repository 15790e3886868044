"""Sizes of Hopper's instructions and shared memory, and the dtype of indices."""

import jax.numpy as jnp

from ejkernel.ops.chips import GPUS

I32 = jnp.int32
"""The dtype of indices and counts in kernels: a Python int would become a constant of another one under x64."""

WGMMA_M = 64
"""Rows of one warpgroup's product instruction: M of WGMMA."""
SWIZZLE_COLUMNS = 64
"""Columns of a 16-bit matrix that are contiguous in shared memory: one row of the 128-byte swizzle."""
THREADS_PER_WARPGROUP = 128
"""Threads of a warpgroup."""
WARPS_PER_WARPGROUP = 4
"""Warps of a warpgroup."""
ROWS_PER_WARP = 16
"""Rows of a product that one warp holds."""
SHARED_MEMORY_BYTES = GPUS["sm_90"].shared_memory
"""Bytes of shared memory of a thread block on Hopper."""
STORE_BYTES_PER_THREAD = 16
"""Bytes that a thread writes at a time."""
MAX_GATHERED_MATRIX_BYTES = 2**31 * STORE_BYTES_PER_THREAD
"""Largest size in bytes of a matrix of which rows are gathered: 32-bit offsets count units of 16 bytes."""
