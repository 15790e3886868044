"""The gated grouped matmul in XLA: a gather, the grouped matmul and the activation, one after the other."""

from ejkernel.ops import NO_CHOICE
from ejkernel_xla.registration import xla_implementation

IMPLEMENTATIONS = (
    xla_implementation(
        "gated_grouped_matmul",
        gradients=("lhs", "rhs", "rhs_bias", "rhs_scale"),
        handles=(
            *("indices", "rhs_bias", "activation", "transpose_rhs", "interleaved", "gated", "alpha", "beta", "limit"),
            *("precision", "rhs_scale"),
        ),
        config=NO_CHOICE,
    ),
)
