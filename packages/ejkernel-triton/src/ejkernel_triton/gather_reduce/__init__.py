"""Gather-reduce in Triton, for GPUs from Ampere on and AMD's through HIP."""

from ejkernel.ops import ConfigSpace, Implementation
from ejkernel_triton.gather_reduce import config
from ejkernel_triton.requirements import triton_implementation, triton_requires


def implementations() -> tuple[Implementation, ...]:
    """Returns the implementation, which also serves CPUs if Triton's interpreter is enabled."""
    return (
        triton_implementation(
            "gather_reduce",
            forward="gather_reduce.forward:forward",
            backward="gather_reduce.backward:backward",
            gradients=frozenset({"rows", "weights"}),
            requires=triton_requires(handles={"weights"}),
            config=ConfigSpace.of(config, forward=config.GatherTiles),
            invariant_to=frozenset({"batch"}),
        ),
    )
