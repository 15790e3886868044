"""Lengths of chunks: the heuristic, and the candidates that are worth measuring."""

import dataclasses
from collections.abc import Iterator
from typing import Any

from ejkernel.families.linear_recurrence import LinearRecurrence
from ejkernel.ops.params import Direction
from ejkernel.planning.fixed_tiles import TILE_ROWS
from ejkernel_xla.fixed_tiles import symbolic_sizes_limit
from ejkernel_xla.sizes import check_positive

CHUNK_LENGTHS = (32, 64, 128)

MAX_TOKENWISE_STATE = 64 * 64
"""Elements of the largest state that a CPU updates token by token faster than it multiplies a chunk's scores."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class RecurrenceChunk:
    """The configuration of either pass.

    Attributes:
        chunk_size: Tokens per chunk, at most.
        batch_invariant: Whether rows are computed in tiles, one token at a time.
        tile_rows: Rows of such a tile.
    """

    chunk_size: int
    batch_invariant: bool = False
    tile_rows: int = 1

    def __post_init__(self) -> None:
        check_positive(self)


PUBLIC_FIELDS = {"chunk_size": "chunk_size", "block_q": "chunk_size"}
"""Public configuration field -> field of this."""


def heuristic(record: LinearRecurrence, device: Any, direction: Direction) -> RecurrenceChunk:
    """Returns the length for a record on a device, not measured."""
    return RecurrenceChunk(chunk_size=_default_chunk_length(record, device, direction))


def batch_invariant(record: LinearRecurrence, device: Any, direction: Direction) -> RecurrenceChunk:
    """Returns the length for all calls in a `batch_invariant` block: only a single token has the same sums in each."""
    return RecurrenceChunk(chunk_size=1, batch_invariant=True, tile_rows=1 if device.platform == "cpu" else TILE_ROWS)


def invariance_limits(record: LinearRecurrence) -> Iterator[str]:
    """Yields why rows of a record depend on the rest of its call."""
    if record.parents is not None:
        yield "parents: a token of all requests is computed at a time"
    yield from symbolic_sizes_limit(record)


def candidates(record: LinearRecurrence, device: Any, direction: Direction) -> tuple[RecurrenceChunk, ...]:
    """Returns lengths worth measuring for a record on a device: the likely one, and those that it has
    the tokens for.
    """
    fitting = {n for n in CHUNK_LENGTHS if n <= record.query.shape[1]}
    return tuple(
        RecurrenceChunk(chunk_size=n) for n in sorted(fitting | {_default_chunk_length(record, device, direction)})
    )


def _default_chunk_length(record: LinearRecurrence, device: Any, direction: Direction) -> int:
    """Returns the chunk length of the rule, which is shorter on CPUs.

    It is half as long there, and one token if gates of channels make a chunk more work than a state that fits the
    caches. If every chunk keeps a state, gates of channels halve it too: that runs as fast, and compiles faster.
    """
    if device.platform != "cpu":
        return 64
    by_channel = any(x is not None and x.shape[3] > 1 for x in (record.decay, record.value_decay))
    if direction == "backward" or record.beta is not None or record.low_rank_read is not None:
        return 32 if by_channel else 64
    small = record.query.shape[3] * record.value.shape[3] <= MAX_TOKENWISE_STATE
    return 1 if by_channel and small else 32
