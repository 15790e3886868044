"""The expert routing family: the record its operations lower to and its meaning."""

from typing import Any

import numpy as np

from ejkernel.families.contract import Family
from ejkernel.families.expert_routing.record import ExpertRouting, Routing, order_preserving_integers, sorted_by_expert
from ejkernel.families.expert_routing.reference import reference
from ejkernel.families.grouped_matmul import EXPERT_PARALLELISM_HINT

__all__ = [
    "FAMILY",
    "ExpertRouting",
    "Routing",
    "order_preserving_integers",
    "reference",
    "requests",
    "sorted_by_expert",
]


def requests(record: ExpertRouting) -> tuple[dict[str, Any], ...]:
    """Returns the owners of a record's entries: its tokens."""
    return ({"t": np.arange(record.logits.shape[0])},)


FAMILY = Family(
    name="expert_routing",
    record=ExpertRouting,
    differentiable=(),
    dtype=lambda record: record.logits.dtype,
    head_dims=lambda record: (record.logits.shape[-1],),
    axes={"logits": "t e", "output": ("t k", "t k", "r", "e")},
    shardable="",
    unsplittable_axis_hints={"e": EXPERT_PARALLELISM_HINT},
    reference=reference,
    requests=requests,
)
