"""The compile-time constants of the divergence kernels."""

import dataclasses

from ejkernel.arithmetic import LOG2E
from ejkernel.families.kl_divergence import KLDivergence
from ejkernel_triton.cross_entropy.spec import lanes_and_strips
from ejkernel_triton.kl_divergence.config import DivergenceTiles


@dataclasses.dataclass(frozen=True, kw_only=True)
class DivergenceSpec:
    """Constants of the kernels, whose logits and logarithms are to base 2.

    Attributes:
        T: Tokens.
        V: Entries of the vocabulary, on this device.
        LANES: Entries that all threads of a program load together.
        STRIPS: Such loads at a time; a thread's entries of different strips never leave it.
        DIRECTION: `"forward"`, `"reverse"` or `"jsd"`.
        LOGIT_FACTOR: Factor from the logits to tempered logits to base 2.
        BETA: The teacher's part of the mixture.
    """

    T: int
    V: int
    LANES: int
    STRIPS: int
    DIRECTION: str
    LOGIT_FACTOR: float
    BETA: float


def make_spec(record: KLDivergence, config: DivergenceTiles) -> DivergenceSpec:
    """Returns the constants of a record's kernels."""
    itemsize = max(record.student.dtype.itemsize, record.teacher.dtype.itemsize)
    lanes, strips = lanes_and_strips(config.block_v, config.num_warps, itemsize)
    tokens, entries = record.student.shape
    return DivergenceSpec(
        T=tokens,
        V=entries,
        LANES=lanes,
        STRIPS=strips,
        DIRECTION=record.direction,
        LOGIT_FACTOR=LOG2E / record.temperature,
        BETA=record.beta,
    )
