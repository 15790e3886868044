"""Lengths of chunks: which is used when nobody chose, and which are worth measuring."""

from typing import Any

from ejkernel.families.linear_recurrence import LinearRecurrence
from ejkernel.ops.config.params import BaseOperationConfig, Direction

LENGTHS = (32, 64, 128)

SMALL_STATE = 64 * 64
"""Numbers of a state that a CPU updates every token in less time than it multiplies a chunk's scores."""


def chunk_length(config: Any) -> int:
    """Tokens a chunk, at most."""
    return getattr(config, length_field(type(config)))


def length_field(config: type[BaseOperationConfig]) -> str:
    """Name of the field that an operation's configuration has it in."""
    return "chunk_size" if hasattr(config, "chunk_size") else "block_q"


def heuristic(
    config: type[BaseOperationConfig], record: LinearRecurrence, device: Any, direction: Direction
) -> BaseOperationConfig:
    """The length for a record on a device, not measured."""
    return _with_length(config, _likely(record, device, direction))


def candidates(
    config: type[BaseOperationConfig], record: LinearRecurrence, device: Any, direction: Direction
) -> tuple[BaseOperationConfig, ...]:
    """Lengths worth measuring for a record on a device: the likely one, and those that it has the tokens for."""
    fitting = {n for n in LENGTHS if n <= record.query.shape[1]}
    return tuple(_with_length(config, n) for n in sorted(fitting | {_likely(record, device, direction)}))


def _likely(record: LinearRecurrence, device: Any, direction: Direction) -> int:
    """Shorter for what a CPU does with few products a chunk, as long as no state is kept of every chunk.

    Half as long, and token by token where gates of channels make a chunk more work than a state that fits the caches.
    """
    if direction == "backward" or record.beta is not None or device.platform != "cpu":
        return 64
    by_channel = any(x is not None and x.shape[3] > 1 for x in (record.decay, record.value_decay))
    small = record.query.shape[3] * record.value.shape[3] <= SMALL_STATE
    return 1 if by_channel and small else 32


def _with_length(config: type[BaseOperationConfig], length: int) -> BaseOperationConfig:
    chosen: dict[str, Any] = {length_field(config): length}
    return config(**chosen)
