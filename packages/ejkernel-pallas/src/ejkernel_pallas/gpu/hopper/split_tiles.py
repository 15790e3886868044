"""Split-KV of the tail wave, against wave quantisation.

    without   | tile 0 | tile 1 | ... | tile 131 |   wave 1: all 132 multiprocessors
              | tile 132 | idle ................ |   tail wave
    with      | tile 132 split into parts ...... |   tail wave, about 1/parts as long, then a combine step

Tiles of equal duration run in waves. The tiles of a partly empty last wave are split. In the forward pass, a part has
some of the key blocks of a query tile (split-KV) and returns its output and lse, which the combine step merges; in the
backward pass it has some of the query blocks of a key tile, and gradients are added.
"""

import dataclasses

from ejkernel.arithmetic import cdiv

PROLOGUE_COST_IN_BLOCKS = 2
"""Fixed cost of an item, in key blocks: its first scores and its last product overlap with nothing."""
COMBINE_COST_IN_BLOCKS = 16
"""Cost of the combine step, which XLA compiles, in key blocks of one to three microseconds on an H200."""


@dataclasses.dataclass(frozen=True)
class TailSplit:
    """The split of the last tiles of a list.

    Attributes:
        num_split_tiles: Number of split tiles.
        splits_per_tile: Parts per split tile.
    """

    num_split_tiles: int
    splits_per_tile: int


NO_SPLIT = TailSplit(num_split_tiles=0, splits_per_tile=1)


def split_tail_wave(num_tiles: int, num_blocks: int, steps_per_head: int, heads_per_tile: int = 1) -> TailSplit:
    """Returns the split of the tail wave: the tiles that remain after every block has processed the same number of
    tiles.

    Args:
        num_tiles: Number of tiles, of equal duration.
        num_blocks: Thread blocks that run at a time, or clusters of two that share a tile.
        steps_per_head: Key or query blocks per tile and head.
        heads_per_tile: Heads over which a tile loops.
    """
    # A part has at least two blocks, counted over the heads.
    tail_tiles, max_parts = num_tiles % num_blocks, min(steps_per_head, steps_per_head * heads_per_tile // 2)
    # The cost of each number of parts, in key blocks; a single part means that tiles are not split.
    waves_by_parts = {parts: cdiv(tail_tiles * parts, num_blocks) for parts in range(1, max(1, max_parts) + 1)}
    cost_by_parts = {
        n: count * (cdiv(steps_per_head, n) * heads_per_tile + PROLOGUE_COST_IN_BLOCKS)
        + (COMBINE_COST_IN_BLOCKS if n > 1 else 0)
        for n, count in waves_by_parts.items()
    }
    parts = min(cost_by_parts, key=lambda n: cost_by_parts[n])
    return TailSplit(tail_tiles, parts) if parts > 1 else NO_SPLIT
