"""Tiles of queries whose keys several blocks share (split-KV), so that the last ones leave no multiprocessor idle.

Where all tiles take equally long, blocks take them in waves, and the last wave may be a few tiles for which a whole
chip waits. These are split: a part visits some of a tile's keys, and gives its output and lse.
"""

import dataclasses

import jax

from ejkernel.families.softmax_merge import Partial, merge

BEGINNING = 2
"""What an item costs beside its visits, in visits: its first scores and its last product have nothing beside them."""
MERGING = 16
"""What it costs that there are parts, in visits of one to two microseconds on an H200: kernels of XLA's merge them."""


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


def make_split(tiles: int, visits: int, blocks: int) -> Split:
    """How the tiles are split that are left when every block has had as many as all others.

    Args:
        tiles: All tiles, which take equally long.
        visits: Of a tile.
        blocks: That run at a time.
    """
    left = tiles % blocks
    waves = {parts: -(-left * parts // blocks) for parts in range(1, max(1, visits // 2) + 1)}
    costs = {n: count * (-(-visits // n) + BEGINNING) + (MERGING if n > 1 else 0) for n, count in waves.items()}
    parts = min(costs, key=lambda n: costs[n])
    return Split(left, parts) if parts > 1 else WHOLE


def merged(outputs: jax.Array, lse: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Tiles of their parts.

    Args:
        outputs: Float32 [tiles, parts, queries, D].
        lse: Float32 [tiles, parts, queries].

    Returns:
        Outputs [tiles, queries, D] and lse [tiles, queries].
    """
    parts = (Partial(outputs[:, n, :, None], lse[:, n, None]) for n in range(lse.shape[1]))
    whole = merge(*parts)
    return whole.output[:, :, 0], whole.lse[:, 0]
