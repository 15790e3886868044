"""Sizes of Hopper's instructions and shared memory."""

WGMMA_M = 64
"""Rows of one warpgroup's product instruction: M of WGMMA."""
SWIZZLE_COLUMNS = 64
"""Columns of a 16-bit matrix that are contiguous in shared memory: one row of the 128-byte swizzle."""
THREADS = 128
"""Threads of a warpgroup."""
WARPS = 4
"""Warps of a warpgroup."""
WARP_ROWS = 16
"""Rows of a product that one warp holds."""
SHARED_MEMORY = 227 * 1024
"""Bytes of shared memory of a thread block on Hopper."""
