"""The helpers of `ejkernel_triton.blocks` that attention has no use for, interpreted; run by `test_interpreted.py`."""

import jax
import numpy as np
import triton  # noqa: TID251
import triton.language as tl  # noqa: TID251

from ejkernel_triton import launch
from ejkernel_triton.blocks import swizzled_tile_index


@triton.jit
def tiles_kernel(anything, row, column, ROWS: tl.constexpr, COLUMNS: tl.constexpr, GROUP: tl.constexpr, per):
    program = tl.program_id(0)
    tile_row, tile_column = swizzled_tile_index(program, ROWS, COLUMNS, GROUP)
    tl.store(row + program, tile_row)
    tl.store(column + program, tile_column)


def grouped(rows, columns, group):
    """The tiles of all programs, in their order."""
    shape = launch.ShapeDtype((1, rows * columns), np.int32)
    constants = {"ROWS": rows, "COLUMNS": columns, "GROUP": group}
    options = {"batch": 1, "grid": rows * columns, "num_warps": 1, "num_stages": 1, "constants": constants}
    found = launch.launch(tiles_kernel, (jax.numpy.zeros((1, 1)),), [shape, shape], **options)
    return [(int(row), int(column)) for row, column in zip(*(x[0] for x in found), strict=True)]


def main():
    assert grouped(3, 2, 2) == [(0, 0), (1, 0), (0, 1), (1, 1), (2, 0), (2, 1)]
    for sizes in ((5, 3, 2), (4, 4, 4), (1, 6, 3), (7, 2, 1)):
        found = grouped(*sizes)
        assert sorted(found) == [(row, column) for row in range(sizes[0]) for column in range(sizes[1])]


if __name__ == "__main__":
    main()
