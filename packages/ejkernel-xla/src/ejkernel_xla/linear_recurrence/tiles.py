"""Lengths of chunks: which is used when nobody chose, and which are worth measuring."""

from typing import Any

from ejkernel.families.linear_recurrence import LinearRecurrence
from ejkernel.ops.config.params import BaseOperationConfig, Direction

LENGTHS = (32, 64, 128)


def chunk_length(config: Any) -> int:
    """Tokens a chunk, at most."""
    return getattr(config, length_field(type(config)))


def length_field(config: type[BaseOperationConfig]) -> str:
    """Name of the field that an operation's configuration has it in."""
    return "chunk_size" if hasattr(config, "chunk_size") else "block_q"


def heuristic(
    config: type[BaseOperationConfig], record: LinearRecurrence, device: Any, direction: Direction
) -> BaseOperationConfig:
    """The length for a record on a device, not measured.

    Half as long for what a CPU does with few products a chunk, as long as no state is kept of every chunk.
    """
    by_channel = any(x is not None and x.shape[3] > 1 for x in (record.decay, record.value_decay))
    few = direction == "forward" and record.beta is None and not by_channel
    return _with_length(config, 32 if few and device.platform == "cpu" else 64)


def candidates(
    config: type[BaseOperationConfig], record: LinearRecurrence, device: Any, direction: Direction
) -> tuple[BaseOperationConfig, ...]:
    """Lengths worth measuring for a record on a device: those that it has the tokens for."""
    short = [n for n in LENGTHS if n <= record.query.shape[1]] or LENGTHS[:1]
    return tuple(_with_length(config, n) for n in short)


def _with_length(config: type[BaseOperationConfig], length: int) -> BaseOperationConfig:
    chosen: dict[str, Any] = {length_field(config): length}
    return config(**chosen)
