"""The causal convolution in Triton, for GPUs from Ampere on and AMD's through HIP."""

from ejkernel.ops import ConfigSpace, Implementation
from ejkernel_triton.causal_convolution import config
from ejkernel_triton.requirements import triton_implementation, triton_requires


def implementations() -> tuple[Implementation, ...]:
    """Returns the implementation, which also serves CPUs if Triton's interpreter is enabled."""
    return (
        triton_implementation(
            "causal_convolution",
            forward="causal_convolution.forward:forward",
            backward="causal_convolution.backward:backward",
            gradients=frozenset({"x", "weight", "bias", "initial_state"}),
            requires=triton_requires(
                head_dims=range(2, 9), handles={"bias", "initial_state", "cu_seqlens", "activation"}
            ),
            config=ConfigSpace.of(config, forward=config.ConvolutionForward, backward=config.ConvolutionBackward),
            invariant_to=frozenset({"batch", "padding", "packing", "chunking"}),
        ),
    )
