"""The gated grouped matmul in XLA: a gather, the grouped matmul and the activation, one after the other."""

from ejkernel.ops import NO_CHOICE
from ejkernel_xla.registration import xla_implementation

IMPLEMENTATIONS = (
    xla_implementation(
        "gated_grouped_matmul",
        forward="passes:forward",
        backward=None,
        handles=("indices", "activation", "precision"),
        config=NO_CHOICE,
    ),
)
