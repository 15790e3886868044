"""The causal convolution in Triton, for GPUs from Ampere on and AMD's through HIP."""

from collections.abc import Iterable
from typing import Any

from ejkernel.ops import ConfigSpace, Implementation, Requires
from ejkernel_triton.causal_convolution import config
from ejkernel_triton.launch import interpreting


def _reasons(record: Any) -> Iterable[str]:
    """What `Requires` has no word for."""
    if not record.x.size:
        yield "an array is empty"


def implementations() -> tuple[Implementation, ...]:
    """One implementation; for the CPU too where Triton's interpreter is switched on."""
    interpreted = interpreting()
    return (
        Implementation(
            family="causal_convolution",
            name="triton",
            platform="triton",
            backend="gpu",
            forward="ejkernel_triton.causal_convolution.passes:forward",
            backward="ejkernel_triton.causal_convolution.passes:backward",
            gradients=frozenset({"x", "weight", "bias", "initial_state"}),
            requires=Requires(
                devices=frozenset({"nvidia", "amd"}) | ({"cpu"} if interpreted else frozenset()),
                modules=("triton",) if interpreted else ("triton", "jax_triton"),
                min_compute_capability=8.0,
                dtypes=frozenset({"float16", "bfloat16", "float32"}),
                head_dims=range(2, 9),
                handles=frozenset({"bias", "initial_state", "cu_seqlens", "activation"}),
                extra=_reasons,
            ),
            config=ConfigSpace(
                forward=config.ConvolutionForward,
                backward=config.ConvolutionBackward,
                faces=config.FACES,
                heuristic=config.heuristic,
                candidates=config.candidates,
            ),
            priority=10,
        ),
    )
