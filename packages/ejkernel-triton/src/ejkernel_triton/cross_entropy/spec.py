"""The compile-time constants of the cross-entropy kernels."""

import dataclasses
from typing import Any

from ejkernel.families.cross_entropy import CrossEntropy, vocabulary
from ejkernel.ops.device import current_device
from ejkernel_triton.cross_entropy.config import BYTES_PER_LOAD, LossTiles
from ejkernel_triton.launch import is_interpreting


@dataclasses.dataclass(frozen=True, kw_only=True)
class CrossEntropySpec:
    """Constants of the kernels.

    Attributes:
        T: Tokens.
        V: Entries of the vocabulary.
        LANES: Entries that all threads of a program load together.
        STRIPS: Such loads at a time; a thread's entries of different strips never leave it.
        HAS_BIAS: Whether there is a bias.
        HAS_SOFT_TARGETS: Whether there are distributions to predict.
        SOFT_CAP: The soft cap, or None.
        TARGET_PART: The part of the targets that is not spread evenly.
        EVEN_PART: What smoothing gives to each entry.
        Z_LOSS: Factor of the squared log-sum-exp.
        IN_PLACE: Whether gradients replace the logits in their memory.
    """

    T: int
    V: int
    LANES: int
    STRIPS: int
    HAS_BIAS: bool
    HAS_SOFT_TARGETS: bool
    SOFT_CAP: float | None
    TARGET_PART: float
    EVEN_PART: float
    Z_LOSS: float
    IN_PLACE: bool


def make_spec(
    record: CrossEntropy, logits_dtype: Any, config: LossTiles, *, in_place: bool = False
) -> CrossEntropySpec:
    """Returns the constants of a kernel that reads the logits of a record's tokens."""
    lanes, strips = lanes_and_strips(config.block_v, config.num_warps, logits_dtype.itemsize)
    return CrossEntropySpec(
        T=record.weights.shape[0],
        V=vocabulary(record),
        LANES=lanes,
        STRIPS=strips,
        HAS_BIAS=record.lm_head_bias is not None,
        HAS_SOFT_TARGETS=record.soft_targets is not None,
        SOFT_CAP=record.logits_soft_cap,
        TARGET_PART=1 - record.label_smoothing,
        EVEN_PART=record.label_smoothing / vocabulary(record),
        Z_LOSS=record.z_loss,
        IN_PLACE=in_place,
    )


def lanes_and_strips(block_v: int, num_warps: int, itemsize: int) -> tuple[int, int]:
    """Returns the entries that a program's threads load together, of 16 bytes each, and how many such strips a block
    of entries has.
    """
    if is_interpreting():
        lanes = max(1, block_v // 2)
    else:
        warp_size = 64 if current_device().vendor == "amd" else 32
        lanes = min(block_v, num_warps * warp_size * BYTES_PER_LOAD // itemsize)
    return lanes, block_v // lanes
