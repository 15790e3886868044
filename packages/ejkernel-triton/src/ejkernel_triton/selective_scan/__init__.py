"""The selective scan (Mamba-1) in Triton, for GPUs from Ampere on and AMD's through HIP."""

from ejkernel.families.selective_scan import scan_sequences
from ejkernel.ops import ConfigSpace, Implementation
from ejkernel_triton.requirements import triton_implementation, triton_requires
from ejkernel_triton.selective_scan import config, decode

DIFFERENTIABLE_FIELDS = frozenset({"x", "step", "decay", "write", "read", "skip", "initial_state"})
MAX_STATE_DIM = 32
"""The largest state dimension that fits registers."""


def implementations() -> tuple[Implementation, ...]:
    """Returns the scan and its decode step, which also serve CPUs if Triton's interpreter is enabled."""
    return (
        triton_implementation(
            "selective_scan",
            forward="selective_scan.forward:forward",
            backward="selective_scan.backward:backward",
            gradients=DIFFERENTIABLE_FIELDS,
            requires=triton_requires(
                head_dims=range(1, MAX_STATE_DIM + 1),
                handles=scan_sequences.PACKED_STATE_FIELDS | {"initial_state"},
                extra_reasons=decode.scan_refusal_reasons,
            ),
            config=ConfigSpace.of(config, forward=config.ScanForward, backward=config.ScanBackward),
            invariant_to=frozenset({"batch", "padding", "packing", "chunking"}),
        ),
        *decode.implementations(),
    )
