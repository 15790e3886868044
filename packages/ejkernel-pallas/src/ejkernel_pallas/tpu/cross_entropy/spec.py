"""The compile-time constants of the cross-entropy's kernels."""

import dataclasses

from ejkernel.arithmetic import cdiv
from ejkernel.families.cross_entropy import CrossEntropy, vocabulary
from ejkernel_pallas.tpu.cross_entropy.config import TpuLossTiles


@dataclasses.dataclass(frozen=True, kw_only=True)
class LossSpec:
    """Constants of a kernel.

    Attributes:
        num_entries: V.
        block_t: Tokens per block.
        block_v: Entries per block.
        num_token_blocks: Blocks of tokens.
        num_entry_blocks: Blocks of entries; the last may be partial.
        soft_cap: The soft cap, or None.
        target_part: The part of the targets that is not spread evenly.
        even_part: What smoothing gives to each entry.
    """

    num_entries: int
    block_t: int
    block_v: int
    num_token_blocks: int
    num_entry_blocks: int
    soft_cap: float | None
    target_part: float
    even_part: float


def make_spec(record: CrossEntropy, config: TpuLossTiles) -> LossSpec:
    """Returns the constants of a record's kernels."""
    entries = vocabulary(record)
    return LossSpec(
        num_entries=entries,
        block_t=config.block_t,
        block_v=config.block_v,
        num_token_blocks=cdiv(record.weights.shape[0], config.block_t),
        num_entry_blocks=cdiv(entries, config.block_v),
        soft_cap=record.logits_soft_cap,
        target_part=1 - record.label_smoothing,
        even_part=record.label_smoothing / entries,
    )
