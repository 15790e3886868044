"""The tile list of a grouped matmul has every row once, whatever the groups."""

import jax
import jax.numpy as jnp
import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from ejkernel.families.grouped_matmul import UNASSIGNED_ROW_CHOICES, GroupedMatmul
from ejkernel.families.grouped_matmul.row_tiles import NO_GROUP, find_row_tiles, max_num_row_tiles


@jax.jit(static_argnums=(2, 3, 4, 5))
def tiles_of(sizes, offset, rows, matrices, block, left_over):
    record = GroupedMatmul(
        lhs=jnp.zeros((rows, 1)),
        rhs=jnp.zeros((matrices, 1, 1)),
        group_sizes=sizes,
        out_dtype=jnp.float32,
        group_offset=offset,
        left_over=left_over,
    )
    assert find_row_tiles(record, block).shape[0] == max_num_row_tiles(rows, matrices, block) + 1
    return find_row_tiles(record, block)


@given(
    sizes=st.lists(st.sampled_from([0, 0, 1, 5, 8, 13, 40]), min_size=5, max_size=5),
    offset=st.integers(-2, 6),
    matrices=st.sampled_from([2, 5]),
    block=st.sampled_from([1, 8]),
    left_over=st.sampled_from(UNASSIGNED_ROW_CHOICES),
)
@settings(deadline=None, max_examples=60)
def test_every_row_is_in_the_one_tile_of_its_group(sizes, offset, matrices, block, left_over):
    rows = 64
    table = np.asarray(tiles_of(jnp.asarray(sizes), jnp.int32(offset), rows, matrices, block, left_over))
    before, count, total, _ = table[-1]
    ends = np.minimum(np.cumsum(sizes), rows)
    starts = np.append(0, ends[:-1])
    owner = np.full(rows, NO_GROUP)
    for group, end in enumerate(ends):
        if 0 <= group - offset < matrices:
            owner[starts[group] : end] = group - offset
    seen = np.zeros(rows, int)
    for entry in range(total):
        matrix, row, end, begin = table[entry]
        own = slice(row, min(row + block, end))
        assert begin <= row < end <= rows
        assert (row - begin) % block == 0
        assert (owner[own] == matrix).all()
        assert (matrix != NO_GROUP) == (before <= entry < before + count)
        seen[own] += 1
    # Undefined rows need no tile.
    assert (seen == ((owner != NO_GROUP) | (left_over == "zero"))).all()
    assert not table[total:-1].any()
