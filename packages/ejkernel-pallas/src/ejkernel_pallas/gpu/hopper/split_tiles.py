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

BEGINNING = 2
"""Fixed cost of an item, in key blocks: its first scores and its last product overlap with nothing."""
MERGING = 16
"""Cost of the combine step, which XLA compiles, in key blocks of one to three microseconds on an H200."""


@dataclasses.dataclass(frozen=True)
class Split:
    """The split of the last tiles of a list.

    Attributes:
        tiles: Number of split tiles.
        parts: Parts per split tile.
    """

    tiles: int
    parts: int


WHOLE = Split(tiles=0, parts=1)


def make_split(tiles: int, blocks: int, steps: int, heads: int = 1) -> Split:
    """Returns the split of the tail wave: the tiles that remain after every block has processed the same number of
    tiles.

    Args:
        tiles: Number of tiles, of equal duration.
        blocks: Thread blocks that run at a time, or clusters of two that share a tile.
        steps: Key or query blocks per tile and head.
        heads: Heads over which a tile loops.
    """
    # A part has at least two blocks, counted over the heads.
    left, most = tiles % blocks, min(steps, steps * heads // 2)
    # The cost of each number of parts, in key blocks; a single part means that tiles are not split.
    waves = {parts: cdiv(left * parts, blocks) for parts in range(1, max(1, most) + 1)}
    costs = {n: count * (cdiv(steps, n) * heads + BEGINNING) + (MERGING if n > 1 else 0) for n, count in waves.items()}
    parts = min(costs, key=lambda n: costs[n])
    return Split(left, parts) if parts > 1 else WHOLE
