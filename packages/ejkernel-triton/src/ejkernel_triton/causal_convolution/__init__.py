"""The causal convolution in Triton, for GPUs from Ampere on and AMD's through HIP."""

from collections.abc import Iterable
from typing import Any

from ejkernel.ops import ConfigSpace, Implementation
from ejkernel_triton.causal_convolution import config
from ejkernel_triton.requirements import triton_implementation, triton_requires


def _reasons(record: Any) -> Iterable[str]:
    """Yields the reasons to refuse a record that `Requires` cannot express."""
    if not record.x.size:
        yield "an array is empty"


def implementations() -> tuple[Implementation, ...]:
    """Returns the implementation, which also serves CPUs if Triton's interpreter is enabled."""
    return (
        triton_implementation(
            "causal_convolution",
            forward="causal_convolution.forward:forward",
            backward="causal_convolution.backward:backward",
            gradients=frozenset({"x", "weight", "bias", "initial_state"}),
            requires=triton_requires(
                head_dims=range(2, 9), handles={"bias", "initial_state", "cu_seqlens", "activation"}, extra=_reasons
            ),
            config=ConfigSpace(
                forward=config.ConvolutionForward,
                backward=config.ConvolutionBackward,
                faces=config.FACES,
                heuristic=config.heuristic,
                candidates=config.candidates,
            ),
        ),
    )
