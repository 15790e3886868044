"""The quantised matmul in XLA: the matrix is dequantised once, at x's width, and multiplied by the vendor's library."""

from ejkernel.families.quantized_matmul import FAMILY
from ejkernel.ops import NO_CHOICE, Implementation, Requires

IMPLEMENTATIONS = (
    Implementation(
        family="quantized_matmul",
        name="xla",
        platform="xla",
        backend="any",
        forward="ejkernel_xla.quantized_matmul.passes:forward",
        backward="ejkernel_xla.quantized_matmul.passes:backward",
        gradients=frozenset(FAMILY.differentiable),
        requires=Requires(
            devices=frozenset({"cpu", "gpu", "tpu"}),
            dtypes=frozenset({"float16", "bfloat16", "float32", "float64"}),
            handles=frozenset({"zeros", "transpose", "precision"}),
        ),
        config=NO_CHOICE,
    ),
)
