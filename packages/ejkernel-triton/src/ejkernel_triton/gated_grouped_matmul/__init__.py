"""The gated grouped matmul in Triton, for GPUs from Ampere on and AMD's through HIP."""

from collections.abc import Iterable
from typing import Any

from ejkernel.ops import ConfigSpace, Implementation
from ejkernel_triton.gated_grouped_matmul import config
from ejkernel_triton.grouped_matmul import matrix_size_refusal_reasons
from ejkernel_triton.grouped_matmul.config import GroupedBackward
from ejkernel_triton.requirements import triton_implementation, triton_requires

HANDLED_FIELDS = (
    *("indices", "rhs_bias", "activation", "transpose_rhs", "interleaved", "gated", "alpha", "beta", "limit"),
    "precision",
)
"""Optional fields that the kernels honour."""


def _refusal_reasons(record: Any) -> Iterable[str]:
    """Returns the reasons to refuse a record that `Requires` cannot express."""
    return matrix_size_refusal_reasons(record.rhs)


def implementations() -> tuple[Implementation, ...]:
    """Returns the implementation, which also serves CPUs if Triton's interpreter is enabled."""
    return (
        triton_implementation(
            "gated_grouped_matmul",
            forward="gated_grouped_matmul.forward:forward",
            backward="gated_grouped_matmul.backward:backward",
            gradients=frozenset({"lhs", "rhs", "rhs_bias"}),
            requires=triton_requires(handles=HANDLED_FIELDS, extra_reasons=_refusal_reasons),
            config=ConfigSpace.of(config, forward=config.GatedTiles, backward=GroupedBackward),
            invariant_to=frozenset({"batch"}),
        ),
    )
