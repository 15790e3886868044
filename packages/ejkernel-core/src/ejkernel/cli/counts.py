"""Counts the floating-point operations and the bytes of a call, which a benchmark divides by its times."""

import dataclasses
import math
from collections.abc import Callable
from typing import Any

import jax
import numpy as np

from ejkernel.families.contract import Family
from ejkernel.types.arguments import non_default_fields

ARRAY_MASK_FIELDS = ("mask", "bias", "q_segment_ids", "kv_segment_ids", "q_positions", "kv_positions")


@dataclasses.dataclass(frozen=True)
class WorkCount:
    """Holds the work of one pass of a call.

    Attributes:
        flops: Floating-point operations; None where they were not counted.
        size: Bytes that must be read and written at least.
        text: How they were counted.
    """

    flops: float | None
    size: float | None
    text: str

    def rates(self, seconds: float) -> tuple[float | None, float | None]:
        """Returns TFLOP/s and GB/s."""
        flops = None if self.flops is None else self.flops / seconds / 1e12
        return flops, None if self.size is None else self.size / seconds / 1e9


def count_work(family: Family, record: Any, passes: str, output: Any) -> WorkCount:
    """Counts the work of a call.

    Args:
        family: What the call lowers to.
        record: Its record, with values.
        passes: `"forward"`, or with backward.
        output: The shapes of the family's output.
    """
    both = passes != "forward"
    count_flops = _FLOPS_BY_FAMILY.get(family.name)
    flops, text = (
        count_flops(record) if count_flops is not None else (None, "not counted for this family of operations")
    )
    factor, words = _BACKWARD_FLOPS_FACTORS.get(family.name, (2.0, "2")) if both else (0.0, "")
    if flops is not None and both:
        flops, text = flops * (1 + factor), f"{text}; the backward pass counts as {words} forward passes"
    if family.name == "paged_attention":  # most of the cache may belong to other sequences
        return WorkCount(flops, None, f"FLOP: {text}; bytes are not counted")
    read, written = _num_bytes(record), _num_bytes(output)
    if both:  # reads inputs, output and cotangent again, writes a gradient for each input
        read, written = 2 * read + 2 * written, written + read
    return WorkCount(flops, float(read + written), f"FLOP: {text}; bytes: each input and output once per pass")


def _num_bytes(tree: Any) -> int:
    return sum(math.prod(x.shape) * x.dtype.itemsize for x in jax.tree.leaves(tree))


def _attention_flops(record: Any) -> tuple[float | None, str]:
    if getattr(record, "pattern", None) is not None:
        return None, "not counted for block patterns"
    (batch, queries, heads, dim), keys, values = record.query.shape, record.key.shape[1], record.value.shape[-1]
    low, high = np.zeros(queries), np.full(queries, keys)
    at = np.arange(queries)
    if record.causal:
        high = np.minimum(high, at + 1)
    if record.sliding_window is not None:
        left, right = record.sliding_window
        low = low if left is None else np.maximum(low, at - left)
        high = high if right is None else np.minimum(high, at + right + 1)
    pairs = float(np.maximum(high - low, 0).sum())
    inside = (
        ", without subtracting masks that are arrays"
        if set(non_default_fields(record)) & set(ARRAY_MASK_FIELDS)
        else ""
    )
    text = f"2 * (D + Dv) per head and attended pair, {pairs:.4g} pairs{inside}"
    return 2.0 * (dim + values) * pairs * batch * heads, text


def _grouped_matmul_flops(record: Any) -> tuple[float, str]:
    m, k = record.lhs.shape
    rows = min(m, int(np.sum(record.group_sizes)))
    n = record.rhs.shape[1 if record.transpose_rhs else 2]
    return 2.0 * rows * k * n, f"2 * M * K * N, with M = {rows} rows that belong to a group"


def _recurrence_flops(record: Any) -> tuple[float, str]:
    tokens = math.prod(record.query.shape[:-2])
    heads, state = record.query.shape[-2], record.key.shape[-1] * record.value.shape[-1]
    steps = 4.0 if record.beta is None else 6.0
    text = f"{steps:.0f} * K * V per token and head, without the additional work of chunks"
    return steps * tokens * heads * state, text


def _convolution_flops_and_formula(record: Any) -> tuple[float, str]:
    return 2.0 * math.prod(record.x.shape) * record.weight.shape[-1], "2 * width per element"


_FLOPS_BY_FAMILY: dict[str, Callable[[Any], tuple[float | None, str]]] = {
    "tiled_attention": _attention_flops,
    "ring_attention": _attention_flops,
    "grouped_matmul": _grouped_matmul_flops,
    "linear_recurrence": _recurrence_flops,
    "causal_convolution": _convolution_flops_and_formula,
}
_BACKWARD_FLOPS_FACTORS = {"tiled_attention": (2.5, "2.5"), "ring_attention": (2.5, "2.5")}
