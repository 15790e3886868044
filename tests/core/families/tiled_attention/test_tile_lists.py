"""Lists of tiles, against loops over every small pattern of tiles with some, and with every pair."""

import itertools

import numpy as np
import pytest

from ejkernel.families.tiled_attention.block_maps import BlockMap, block_lists
from ejkernel.families.tiled_attention.tile_pairs import nonempty_and_full_tile_runs

KINDS = np.asarray(list(itertools.product((0, 1, 2), repeat=4)))  # of four tiles: none, some or all pairs attend
SOME, EVERY = KINDS > 0, KINDS == 2


def test_tile_runs_are_the_nonempty_span_and_its_first_full_run():
    for kinds, first, full_start, full_end, last in zip(
        KINDS, *nonempty_and_full_tile_runs(SOME, EVERY, np), strict=True
    ):
        work = [i for i in range(4) if kinds[i]]
        assert (first, last) == ((work[0], work[-1] + 1) if work else (0, 0)), kinds
        if 2 not in kinds:
            assert full_start == full_end == last
            continue
        assert full_start == list(kinds).index(2)
        assert full_start < full_end
        assert set(kinds[full_start:full_end]) == {2}
        assert full_end == 4 or kinds[full_end] != 2


@pytest.mark.parametrize("beyond", [False, True], ids=["", "tiles without work count as full"])
def test_block_lists_have_full_tiles_first_then_partial_ones_in_order(beyond):
    """Where a tile has no pair at all, `every` may say anything."""
    every = EVERY | ~SOME if beyond else EVERY
    some, every = SOME[None, None], every[None, None]
    lists = block_lists(
        BlockMap(any_allowed=some, all_allowed=every, mask_ids=None, tile_masks=None, reachable=some[:, 0])
    )
    for row, kinds in enumerate(KINDS):
        full, partial = ([i for i in range(4) if kinds[i] == kind] for kind in (2, 1))
        assert lists.full[0, 0, row] == len(full), kinds
        assert lists.count[0, 0, row] == len(full) + len(partial), kinds
        assert list(lists.blocks[0, 0, row][: lists.count[0, 0, row]]) == [*full, *partial], kinds
