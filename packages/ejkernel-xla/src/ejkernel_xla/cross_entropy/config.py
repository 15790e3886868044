"""Sizes of the blocks of logits: the heuristic, and the candidates that are worth measuring."""

import dataclasses
from collections.abc import Iterator
from typing import Any

from ejkernel.arithmetic import at_most, known_or
from ejkernel.families.cross_entropy import CrossEntropy, vocabulary
from ejkernel.ops.params import Direction
from ejkernel.planning.fixed_tiles import TILE_ROWS
from ejkernel_xla.fixed_tiles import symbolic_sizes_limit
from ejkernel_xla.sizes import check_positive

BLOCK_LOGITS = 2**26
"""Logits in a block, about: 256 MiB of float32."""

MIN_TOKENS = 128

ALL_TOKENS = 2**31 - 1
"""Tokens in a block that has them all, if their count is symbolic."""

FIXED_ROWS = 512
"""Tokens of all tiles in a `batch_invariant` block, except on a CPU, which has `TILE_ROWS`: GPUs need long products."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class LogitBlocks:
    """The configuration of either pass.

    Attributes:
        block_t: Tokens in a block, at most.
        block_v: Entries of the vocabulary in a block, at most. Where a block has all of them, a sum of losses makes its
            gradients in the forward pass, and the logits are made once.
        batch_invariant: Whether tokens are computed in tiles of fixed sizes.
    """

    block_t: int
    block_v: int
    batch_invariant: bool = False

    def __post_init__(self) -> None:
        check_positive(self)


PUBLIC_FIELDS = {"block_m": "block_t", "block_v": "block_v"}
"""Public configuration field -> field of this."""


def heuristic(record: CrossEntropy, device: Any, direction: Direction) -> LogitBlocks:
    """Returns the sizes for a record, not measured: the whole of logits that are given, which XLA reads in place, and
    otherwise as many tokens as `BLOCK_LOGITS` allows.
    """
    tokens, entries = record.inputs.shape[0], vocabulary(record)
    if record.lm_head is not None:
        tokens = at_most(max(BLOCK_LOGITS // entries, MIN_TOKENS), tokens)
    return LogitBlocks(block_t=max(known_or(tokens, ALL_TOKENS), 1), block_v=entries)


def batch_invariant(record: CrossEntropy, device: Any, direction: Direction) -> LogitBlocks:
    """Returns the sizes for all calls in a `batch_invariant` block."""
    rows = TILE_ROWS if device.platform == "cpu" else FIXED_ROWS
    return LogitBlocks(block_t=rows, block_v=vocabulary(record), batch_invariant=True)


def invariance_limits(record: CrossEntropy) -> Iterator[str]:
    """Yields why rows of a record depend on the rest of its call."""
    if record.sum_over_tokens:
        yield "the loss is a sum over all tokens"
    yield from symbolic_sizes_limit(record)


def candidates(record: CrossEntropy, device: Any, direction: Direction) -> tuple[LogitBlocks, ...]:
    """Returns sizes worth measuring for a record: the likely one, and those of half and twice the tokens."""
    default = heuristic(record, device, direction)
    if record.lm_head is None:
        return (default,)
    sizes = dict.fromkeys(
        min(n, record.inputs.shape[0]) for n in (default.block_t, default.block_t // 2, 2 * default.block_t)
    )
    return tuple(LogitBlocks(block_t=n, block_v=default.block_v) for n in sizes if n)
