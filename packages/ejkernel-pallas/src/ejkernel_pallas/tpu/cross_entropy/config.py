"""The configuration of the cross-entropy's kernels: the heuristic, and the candidates worth measuring."""

import dataclasses
from collections.abc import Iterator
from typing import Any

from ejkernel.arithmetic import cdiv
from ejkernel.families.cross_entropy import FAMILY, CrossEntropy, vocabulary
from ejkernel.ops.params import Direction
from ejkernel.planning.fixed_sizes import with_fixed_sizes

TOKENS_PER_REGISTER, ENTRIES_PER_REGISTER = 16, 128
"""Tokens and entries of a vector register of bfloat16."""
MAX_ROW_BYTES = 2**22
"""The largest block of hidden states or of the matrix, in bytes: 512 rows of 4096 channels in bfloat16. Blocks of
float32, which products split into parts in bfloat16, are half as large.
"""


@dataclasses.dataclass(frozen=True, kw_only=True)
class TpuLossTiles:
    """The configuration of either pass.

    Attributes:
        block_t: Tokens per grid step, a multiple of 16.
        block_v: Entries of the vocabulary per grid step, a multiple of 128.
    """

    block_t: int
    block_v: int

    def __post_init__(self) -> None:
        if self.block_t < TOKENS_PER_REGISTER or self.block_t % TOKENS_PER_REGISTER:
            raise ValueError(f"block_t: got {self.block_t}, wants a multiple of {TOKENS_PER_REGISTER}")
        if self.block_v < ENTRIES_PER_REGISTER or self.block_v % ENTRIES_PER_REGISTER:
            raise ValueError(f"block_v: got {self.block_v}, wants a multiple of {ENTRIES_PER_REGISTER}")


PUBLIC_FIELDS = {"block_m": "block_t", "block_v": "block_v"}
"""Maps fields of the public configuration to fields of this one."""


def heuristic(record: CrossEntropy, device: Any, direction: Direction) -> TpuLossTiles:
    """Returns the configuration for a record. It is not measured."""
    itemsize = record.inputs.dtype.itemsize
    rows = max(ENTRIES_PER_REGISTER, MAX_ROW_BYTES * 2 // (record.inputs.shape[1] * itemsize * itemsize))
    rows = min(1024, rows // ENTRIES_PER_REGISTER * ENTRIES_PER_REGISTER)
    # The forward pass has no gradient in VMEM, and one product per block of the matrix: more tokens share a block.
    return _fit_block_sizes(record, 2 * rows if direction == "forward" else rows, rows)


FIXED_TOKENS = 512
"""Tokens of the call whose configuration serves all calls in a `batch_invariant` block."""


def batch_invariant(record: CrossEntropy, device: Any, direction: Direction) -> TpuLossTiles:
    """Returns the blocks of all calls in a `batch_invariant` block."""
    return heuristic(with_fixed_sizes(record, FAMILY.axes_of(record), {"t": FIXED_TOKENS}), device, direction)


def invariance_limits(record: CrossEntropy) -> Iterator[str]:
    """Yields why rows of a record depend on the rest of its call."""
    if record.sum_over_tokens:
        yield "the loss is a sum over all tokens"


def candidates(record: CrossEntropy, device: Any, direction: Direction) -> tuple[TpuLossTiles, ...]:
    """Returns configurations worth measuring."""
    default = heuristic(record, device, direction)
    halves = (
        _fit_block_sizes(record, default.block_t, max(ENTRIES_PER_REGISTER, default.block_v // 2)),
        _fit_block_sizes(record, max(ENTRIES_PER_REGISTER, default.block_t // 2), default.block_v),
    )
    return tuple(dict.fromkeys((default, *halves)))


def _fit_block_sizes(record: CrossEntropy, block_t: int, block_v: int) -> TpuLossTiles:
    """Returns a block size no larger than the arrays, in whole registers."""
    tokens, entries = (
        cdiv(size, multiple) * multiple
        for size, multiple in (
            (record.weights.shape[0], TOKENS_PER_REGISTER),
            (vocabulary(record), ENTRIES_PER_REGISTER),
        )
    )
    return TpuLossTiles(
        block_t=min(block_t, tokens), block_v=min(block_v // ENTRIES_PER_REGISTER * ENTRIES_PER_REGISTER, entries)
    )
