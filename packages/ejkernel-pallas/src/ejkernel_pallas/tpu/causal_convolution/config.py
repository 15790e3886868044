"""The configuration of the causal convolution's kernels: the heuristic, and the candidates worth measuring."""

import dataclasses
from typing import Any

from ejkernel.arithmetic import cdiv
from ejkernel.families.causal_convolution import CausalConvolution
from ejkernel.ops.params import Direction

CHANNELS_PER_REGISTER, TOKENS_PER_REGISTER = 128, 16
"""Channels and tokens of a vector register of bfloat16."""
CANDIDATE_BLOCK_TOKENS = (128, 256, 512)
CANDIDATE_BLOCK_CHANNELS = (256, 512, 1024)
MAX_BLOCK_ELEMENTS = 2**20
"""The largest block, in elements: 32 MiB of VMEM in the backward pass, which double-buffers three blocks and has two
more in float32.
"""


@dataclasses.dataclass(frozen=True, kw_only=True)
class TpuConvolution:
    """The configuration of either pass.

    Attributes:
        block_t: Tokens per grid step, a multiple of 16.
        block_c: Channels per grid step, a multiple of 128.
    """

    block_t: int
    block_c: int

    def __post_init__(self) -> None:
        if self.block_t < TOKENS_PER_REGISTER or self.block_t % TOKENS_PER_REGISTER:
            raise ValueError(f"block_t: got {self.block_t}, wants a multiple of {TOKENS_PER_REGISTER}")
        if self.block_c < CHANNELS_PER_REGISTER or self.block_c % CHANNELS_PER_REGISTER:
            raise ValueError(f"block_c: got {self.block_c}, wants a multiple of {CHANNELS_PER_REGISTER}")
        if self.block_t * self.block_c > MAX_BLOCK_ELEMENTS:
            raise ValueError(
                f"block_t and block_c: got {self.block_t} and {self.block_c}, wants at most "
                f"{MAX_BLOCK_ELEMENTS} elements in a block, which takes 32 bytes of VMEM per element"
            )


PUBLIC_FIELDS = {"block_t": "block_t", "block_c": "block_c"}
"""Maps fields of the public configuration to fields of this one."""


def heuristic(record: CausalConvolution, device: Any, direction: Direction) -> TpuConvolution:
    """Returns the configuration for a record. It is not measured: the profile predicts it as the fastest on v5e."""
    return _fit_block_sizes(record, 512, 1024 if direction == "forward" else 512)


def candidates(record: CausalConvolution, device: Any, direction: Direction) -> tuple[TpuConvolution, ...]:
    """Returns configurations worth measuring."""
    found = (_fit_block_sizes(record, t, c) for t in CANDIDATE_BLOCK_TOKENS for c in CANDIDATE_BLOCK_CHANNELS)
    return tuple(dict.fromkeys((heuristic(record, device, direction), *found)))


def _fit_block_sizes(record: CausalConvolution, block_t: int, block_c: int) -> TpuConvolution:
    """Returns a block size no larger than the array, rounded up to whole registers."""
    tokens, channels = (
        cdiv(size, multiple) * multiple
        for size, multiple in zip(record.x.shape[1:], (TOKENS_PER_REGISTER, CHANNELS_PER_REGISTER), strict=True)
    )
    return TpuConvolution(block_t=min(block_t, tokens), block_c=min(block_c, channels))
