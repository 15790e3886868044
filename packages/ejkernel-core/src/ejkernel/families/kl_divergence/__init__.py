"""The KL divergence family: the record its operations lower to and its meaning."""

from typing import Any

import numpy as np

from ejkernel.families.contract import Family
from ejkernel.families.kl_divergence.record import DIRECTIONS, KLDivergence, accumulator
from ejkernel.families.kl_divergence.reference import divergence_terms, log_mixture, log_softmax, reference
from ejkernel.planning.requests import PADDING

__all__ = [
    "DIRECTIONS",
    "FAMILY",
    "KLDivergence",
    "accumulator",
    "divergence_terms",
    "log_mixture",
    "log_softmax",
    "reference",
    "requests",
]


def requests(record: KLDivergence) -> tuple[dict[str, Any], ...]:
    """Returns the owners of a record's entries: its tokens."""
    active = np.asarray(record.token_mask)
    return ({"t": np.where(active, np.arange(active.size), PADDING)},)


FAMILY = Family(
    name="kl_divergence",
    record=KLDivergence,
    differentiable=("student",),
    dtype=lambda record: record.student.dtype,
    axes={"student": "t v", "teacher": "t v", "token_mask": "t", "output": ("t", "t")},
    # Each shard is a separate call, since tokens are independent.
    shardable="t",
    unsplittable_axis_hints={"v": "call within jax.shard_map, with vocab_parallel_axis"},
    reference=reference,
    requests=requests,
)
