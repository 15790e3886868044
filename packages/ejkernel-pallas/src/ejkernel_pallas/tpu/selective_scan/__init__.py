"""The selective scan (Mamba-1) in Mosaic TPU: 1024 channels in a register, states in VMEM across the grid.

The requirements and limits of the kernels are data in this module, so Pallas is not imported before a call.
"""

from collections.abc import Iterable
from typing import Any

from ejkernel.families.selective_scan import FAMILY
from ejkernel.ops import ConfigSpace, Implementation
from ejkernel.types.arguments import optional_fields
from ejkernel_pallas.tpu.requirements import SUPPORTED_DTYPES, make_mosaic_tpu_implementation, tpu_requires
from ejkernel_pallas.tpu.selective_scan import config, plan

SUPPORTED_STATE_SIZES = range(1, 129)
"""Elements of a channel's state. VMEM holds B and C of a chunk with each element in all lanes, 32 KiB per element."""


def _refusal_reasons(record: Any) -> Iterable[str]:
    """Yields the reasons to refuse a record that `Requires` cannot express."""
    arrays = (record.x, record.decay, record.initial_state)
    if not all(array.size for array in arrays if array is not None):
        yield f"x: got {record.x.shape} and A of {record.decay.shape}, the kernels take no empty arrays"
    if str(record.step.dtype) not in SUPPORTED_DTYPES:
        yield f"step: got dtype {record.step.dtype}, the kernels take {', '.join(sorted(SUPPORTED_DTYPES))}"
    # The backward pass reads states out of the slots, and has chunks of 64 tokens.
    in_slots = record.state_slots is not None
    if (
        chunks := max(plan.num_chunks_of_call(record), plan.num_slot_update_chunks(record) * in_slots)
    ) > plan.MAX_CHUNKS:
        yield f"x: got {chunks} chunks of tokens, the kernels take at most {plan.MAX_CHUNKS}, which fit SMEM"


def implementations() -> tuple[Implementation, ...]:
    """Returns the implementation of this family."""
    requires = tpu_requires(
        supported_fields=optional_fields(FAMILY.record),
        refusal_reasons=_refusal_reasons,
        head_dims=SUPPORTED_STATE_SIZES,
    )
    return (
        make_mosaic_tpu_implementation(
            FAMILY,
            ConfigSpace.of(config, forward=config.TpuScan),
            requires,
            invariant_to=frozenset({"batch", "padding", "chunking"}),
            invariance_limits=config.invariance_limits,
        ),
    )
