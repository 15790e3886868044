"""The expert routing family: the record its operations lower to and its meaning."""

from typing import Any

import numpy as np

from ejkernel.families.contract import Family
from ejkernel.families.expert_routing.record import ExpertRouting, Routing, ordered, sorted_by_expert
from ejkernel.families.expert_routing.reference import reference
from ejkernel.families.grouped_matmul import EXPERTS_OVER_DEVICES

__all__ = ["FAMILY", "ExpertRouting", "Routing", "ordered", "reference", "requests", "sorted_by_expert"]


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
    unsplit={"e": EXPERTS_OVER_DEVICES},
    reference=reference,
    requests=requests,
)
