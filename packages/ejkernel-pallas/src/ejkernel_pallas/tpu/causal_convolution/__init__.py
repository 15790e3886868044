"""The causal convolution in Mosaic TPU: blocks of tokens and channels, and the tokens before a block in VMEM.

The requirements and limits of the kernels are data in this module, so Pallas is not imported before a call.
"""

from collections.abc import Iterable
from typing import Any

from ejkernel.families.causal_convolution import FAMILY
from ejkernel.ops import ConfigSpace, Implementation
from ejkernel.types.arguments import optional_fields
from ejkernel_pallas.tpu.causal_convolution import config
from ejkernel_pallas.tpu.requirements import make_mosaic_tpu_implementation, tpu_requires

FILTER_WIDTHS = range(2, 9)
"""Numbers of weights per channel that the kernels support: the eight rows of a register hold the tokens before a block.
"""
MAX_SEQUENCES = 2**16
"""Packed sequences whose bounds scalar memory holds: a quarter of its 1 MiB."""


def _refusal_reasons(record: Any) -> Iterable[str]:
    """Yields the reasons to refuse a record that `Requires` cannot express."""
    if not record.x.size:
        yield f"x: got {record.x.shape}, the kernels take arrays that are not empty"
    if record.cu_seqlens is not None and record.cu_seqlens.shape[0] - 1 > MAX_SEQUENCES:
        count = record.cu_seqlens.shape[0] - 1
        yield f"cu_seqlens: got {count} sequences, the kernels take at most {MAX_SEQUENCES}, which fit SMEM"


def implementations() -> tuple[Implementation, ...]:
    """Returns the implementation of this family."""
    requires = tpu_requires(
        supported_fields=optional_fields(FAMILY.record), refusal_reasons=_refusal_reasons, head_dims=FILTER_WIDTHS
    )
    return (make_mosaic_tpu_implementation(FAMILY, ConfigSpace.of(config, forward=config.TpuConvolution), requires),)
