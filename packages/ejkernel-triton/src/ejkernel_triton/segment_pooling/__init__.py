"""Segment pooling in Triton, for GPUs from Ampere on and AMD's through HIP."""

from ejkernel.ops import ConfigSpace, Implementation
from ejkernel_triton.requirements import triton_implementation, triton_requires
from ejkernel_triton.segment_pooling import config


def implementations() -> tuple[Implementation, ...]:
    """Returns the implementation, which also serves CPUs if Triton's interpreter is enabled."""
    return (
        triton_implementation(
            "segment_pooling",
            forward="segment_pooling.forward:forward",
            backward="segment_pooling.backward:backward",
            gradients=frozenset({"values"}),
            requires=triton_requires(handles={"lengths", "ranges"}),
            config=ConfigSpace.of(config, forward=config.PoolingForward, backward=config.PoolingBackward),
            invariant_to=frozenset({"batch", "padding"}),
        ),
    )
