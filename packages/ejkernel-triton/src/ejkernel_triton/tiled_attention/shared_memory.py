"""How much shared memory a tile of the kernels takes."""

from typing import Any, NamedTuple

import jax.numpy as jnp

from ejkernel.families.tiled_attention import TiledAttention
from ejkernel_triton.tiled_attention.spec import in_pieces, padded_row


class Share(NamedTuple):
    """How often shared memory holds the rows that a program keeps, and those of a stage that it streams."""

    stationary: int
    streamed: int


HALVES = {"forward": Share(1, 2), "keys": Share(2, 2), "queries": Share(2, 2)}
SPLIT = {"forward": Share(2, 1), "keys": Share(4, 2), "queries": Share(4, 2)}
"""In float32, whose parts pass through shared memory."""
PIECES = {"forward": Share(2, 1), "keys": Share(0, 1), "queries": Share(0, 1)}
"""In float32 with rows of which the backward kernels hold pieces."""


def row_bytes(record: TiledAttention, which: str, tile: Any) -> int:
    """Bytes of the rows of a `Tile` in a pass: "forward", "keys" or "queries"."""
    itemsize = jnp.dtype(record.query.dtype).itemsize
    pieces = in_pieces(record, tile.stationary, tile.streamed)
    share = (PIECES if pieces else SPLIT if itemsize > 2 else HALVES)[which]
    rows = share.stationary * tile.stationary + share.streamed * tile.stages * tile.streamed
    return rows * itemsize * padded_row(record)


def pair_bytes(record: TiledAttention, tile: Any) -> int:
    """Bytes of what is read of pairs: tiles of a bias are copied ahead as those of keys are, a mask's are not."""
    of_pair = 0 if record.bias is None else (tile.stages - 1) * record.bias.dtype.itemsize
    return (of_pair + (record.mask is not None)) * tile.stationary * tile.streamed
