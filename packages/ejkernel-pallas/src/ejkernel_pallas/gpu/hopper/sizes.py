"""Sizes that Hopper's instructions and shared memory have."""

ROWS = 64
"""Rows of one warpgroup's product instruction: M of WGMMA."""
PART = 64
"""Columns of a 16-bit matrix that lie together in shared memory: a swizzled row of 128 bytes."""
THREADS = 128
"""Of a warpgroup."""
SHARED_MEMORY = 227 * 1024
"""Bytes that a block can have on Hopper."""
