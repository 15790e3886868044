"""Tiles whose visits several blocks share, so that the last ones leave no multiprocessor idle.

Where all tiles take equally long, blocks take them in waves, and the last wave may be a few tiles for which a whole
chip waits. These are split. Forward, a part visits some of the keys of a tile of queries (split-KV), and gives its
output and lse; backward, it visits some of the queries of a tile of keys, and gives its sums.
"""

import dataclasses

BEGINNING = 2
"""What an item costs beside its visits, in visits: its first scores and its last product have nothing beside them."""
MERGING = 16
"""What it costs that there are parts, in visits of one to three microseconds on an H200: XLA's kernels merge them."""


@dataclasses.dataclass(frozen=True)
class Split:
    """The last tiles of a list.

    Attributes:
        tiles: How many are split.
        parts: Of each of them.
    """

    tiles: int
    parts: int


WHOLE = Split(tiles=0, parts=1)


def make_split(tiles: int, blocks: int, visits: int, heads: int = 1) -> Split:
    """How the tiles are split that are left when every block has had as many as all others.

    Args:
        tiles: All tiles, which take equally long.
        blocks: That run at a time, or pairs of them that own a tile.
        visits: Of a tile, for each head.
        heads: For which a tile makes its visits.
    """
    left, most = tiles % blocks, min(visits, visits * heads // 2)
    waves = {parts: -(-left * parts // blocks) for parts in range(1, max(1, most) + 1)}
    costs = {n: count * (-(-visits // n) * heads + BEGINNING) + (MERGING if n > 1 else 0) for n, count in waves.items()}
    parts = min(costs, key=lambda n: costs[n])
    return Split(left, parts) if parts > 1 else WHOLE
