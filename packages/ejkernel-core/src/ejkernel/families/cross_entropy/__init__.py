"""The cross-entropy family: the record its operations lower to and its meaning."""

from typing import Any

import numpy as np

from ejkernel.families.contract import Family
from ejkernel.families.cross_entropy.factors import LogitGradientFactors, logit_gradient_factors, power_of_two
from ejkernel.families.cross_entropy.record import (
    CrossEntropy,
    CrossEntropyResiduals,
    accumulator,
    smoothed_targets,
    target_probability_sums,
    vocabulary,
)
from ejkernel.families.cross_entropy.reference import reference
from ejkernel.planning.requests import PADDING, SHARED

__all__ = [
    "FAMILY",
    "CrossEntropy",
    "CrossEntropyResiduals",
    "LogitGradientFactors",
    "accumulator",
    "axes",
    "logit_gradient_factors",
    "power_of_two",
    "reference",
    "requests",
    "smoothed_targets",
    "target_probability_sums",
    "vocabulary",
]


def axes(record: CrossEntropy) -> dict[str, Any]:
    """Returns axis letters of a record's fields and of its outputs."""
    head = {"lm_head": "d v", "lm_head_bias": "v", "soft_targets": "t v"}
    tokens = {"inputs": "t v" if record.lm_head is None else "t d", "targets": "t", "weights": "t"}
    return {**tokens, **head, "output": ("t", "t", "t", "t")}


def requests(record: CrossEntropy) -> tuple[dict[str, Any], ...]:
    """Returns the owners of a record's entries: its tokens, or one for all where their losses are summed."""
    active = np.asarray(record.weights) != 0
    owners = np.zeros(active.shape, np.int64) if record.sum_over_tokens else np.arange(active.size)
    return ({"t": np.where(active, owners, PADDING), "weights": np.full(active.shape, SHARED)},)


FAMILY = Family(
    name="cross_entropy",
    record=CrossEntropy,
    differentiable=("inputs", "lm_head", "lm_head_bias"),
    dtype=lambda record: record.inputs.dtype,
    axes=axes,
    # Each shard is a separate call. A summed loss has size 1 per shard, so the loss has one entry for each shard of
    # tokens.
    shardable="t",
    unsplittable_axis_hints={"v": "call within jax.shard_map, with vocab_parallel_axis"},
    reference=reference,
    requests=requests,
)
