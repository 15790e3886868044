"""The cross-entropy of token logits in Mosaic TPU: logits exist in VMEM alone, a tile at a time.

The requirements and limits of the kernels are data in this module, so Pallas is not imported before a call.
"""

from collections.abc import Iterable

from ejkernel.families.cross_entropy import FAMILY, CrossEntropy
from ejkernel.ops import ConfigSpace, Implementation
from ejkernel_pallas.tpu.cross_entropy import config
from ejkernel_pallas.tpu.requirements import make_mosaic_tpu_implementation, tpu_requires

HANDLES = frozenset({"lm_head", "logits_soft_cap", "label_smoothing", "z_loss", "sum_over_tokens"})
MAX_ROW_BYTES = 2**14
"""Bytes of a token's channels that fit VMEM: a block of hidden states, of the matrix and of a gradient have all of
them.
"""


def _refusal_reasons(record: CrossEntropy) -> Iterable[str]:
    """Yields the reasons to refuse a record that `Requires` cannot express."""
    if record.lm_head is None:
        yield "lm_head: got none, the kernels compute logits from hidden states"
    else:
        channels, most = record.lm_head.shape[0], MAX_ROW_BYTES // record.lm_head.dtype.itemsize
        if channels > most:
            yield f"lm_head: got {channels} channels of {record.lm_head.dtype}, the kernels take at most {most}"


def implementations() -> tuple[Implementation, ...]:
    """Returns the implementation of this family."""
    requires = tpu_requires(supported_fields=HANDLES, refusal_reasons=_refusal_reasons)
    return (
        make_mosaic_tpu_implementation(
            FAMILY,
            ConfigSpace.of(config, forward=config.TpuLossTiles, fixed_if_invariant=("block_t",)),
            requires,
            fields_without_gradient=frozenset({"lm_head_bias"}),
            # XLA has three products, the kernels five: they save memory, not time (docs/pallas_tpu.md).
            priority=-10,
            invariant_to=frozenset({"batch"}),
            invariance_limits=config.invariance_limits,
        ),
    )
