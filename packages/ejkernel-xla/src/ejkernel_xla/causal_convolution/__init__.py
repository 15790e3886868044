"""The causal convolution in XLA: one fused sum over shifted views."""

from ejkernel.families.causal_convolution import FAMILY
from ejkernel.ops import NO_CHOICE, Implementation, Requires

IMPLEMENTATIONS = (
    Implementation(
        family="causal_convolution",
        name="xla",
        platform="xla",
        backend="any",
        forward="ejkernel_xla.causal_convolution.passes:forward",
        backward="ejkernel_xla.causal_convolution.passes:backward",
        gradients=frozenset(FAMILY.differentiable),
        requires=Requires(
            devices=frozenset({"cpu", "gpu", "tpu"}),
            symbolic=True,
            dtypes=frozenset({"float16", "bfloat16", "float32", "float64"}),
            handles=frozenset({"bias", "initial_state", "cu_seqlens", "sequence_state", "activation"}),
        ),
        config=NO_CHOICE,
    ),
)
