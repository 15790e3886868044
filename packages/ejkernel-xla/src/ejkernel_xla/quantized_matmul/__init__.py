"""The quantised matmul in XLA: the matrix is dequantised once, at x's width, and multiplied by the vendor's library."""

from ejkernel.families.quantized_matmul import FAMILY
from ejkernel.ops import NO_CHOICE
from ejkernel_xla.registration import xla_implementation

IMPLEMENTATIONS = (
    xla_implementation(
        "quantized_matmul",
        gradients=FAMILY.differentiable,
        symbolic=False,
        handles={"zeros", "tensor_scale", "transpose", "precision"},
        config=NO_CHOICE,
    ),
)
