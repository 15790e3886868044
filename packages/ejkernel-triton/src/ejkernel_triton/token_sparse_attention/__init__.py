"""Token-sparse attention in Triton, for GPUs from Ampere on and AMD's through HIP."""

from collections.abc import Iterable
from typing import Any

from ejkernel.families.token_sparse_attention import FAMILY
from ejkernel.ops import ConfigSpace, Implementation
from ejkernel.ops.device import current_device
from ejkernel.types.arguments import optional_fields
from ejkernel_triton.requirements import triton_implementation, triton_requires
from ejkernel_triton.token_sparse_attention import config

MAX_HEAD_DIM = 1024
"""The largest rows that the tiles of a program hold."""


def shared_memory_refusal_reasons(record: Any) -> Iterable[str]:
    """Yields the reasons to refuse a record that `Requires` cannot express."""
    if shared_memory_refusal := config.shared_memory_refusal(record, current_device()):
        yield shared_memory_refusal


def implementations() -> tuple[Implementation, ...]:
    """Returns the implementation, which also serves CPUs if Triton's interpreter is enabled."""
    return (
        triton_implementation(
            "token_sparse_attention",
            forward="token_sparse_attention.forward:forward",
            backward="token_sparse_attention.backward:backward",
            gradients=frozenset(FAMILY.differentiable),
            requires=triton_requires(
                head_dims=range(1, MAX_HEAD_DIM + 1),
                handles={*optional_fields(FAMILY.record), "lse_cotangent"},
                extra_reasons=shared_memory_refusal_reasons,
            ),
            config=ConfigSpace.of(config, forward=config.SparseForward, backward=config.SparseBackward),
        ),
    )
