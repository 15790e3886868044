"""The collective matmul family: products of arrays that are spread over the devices of a mesh axis."""

from typing import Any

import numpy as np

from ejkernel.families.collective_matmul.record import Collective, CollectiveMatmul, accumulator, columns
from ejkernel.families.collective_matmul.reference import reference
from ejkernel.families.contract import Family

__all__ = ["FAMILY", "Collective", "CollectiveMatmul", "accumulator", "axes", "columns", "reference", "requests"]


def axes(record: CollectiveMatmul) -> dict[str, str]:
    """Returns axis letters of a record's fields and of its output.

    Over devices, x's rows to gather are `s`, and the output's rows `m` are whole. The output's rows of a reduce-scatter
    are split as the contracted elements `k` are, so they have the same letter.
    """
    y = "n k" if record.transpose_y else "k n"
    if record.axis_name is None:
        return {"x": "m k", "y": y, "output": "m n"}
    if record.collective == "all_gather":
        return {"x": "s k", "y": y, "output": "m n"}
    return {"x": "m k", "y": y, "output": "k n"}


def _shardable(record: CollectiveMatmul) -> str:
    if record.axis_name is None:
        return "mn"
    return "sn" if record.collective == "all_gather" else "kn"


def requests(record: CollectiveMatmul) -> tuple[dict[str, Any], ...]:
    """Returns the request of each row: every row is one of its own."""
    return ({"m": np.arange(record.x.shape[0])},)


FAMILY = Family(
    name="collective_matmul",
    record=CollectiveMatmul,
    differentiable=("x", "y"),
    dtype=lambda record: record.x.dtype,
    head_dims=lambda record: (record.x.shape[-1], columns(record)),
    axes=axes,
    shardable=_shardable,
    unsplittable_axis_hints={"k": "reduce_scatter_matmul splits the contracted elements, with axis_name"},
    reference=reference,
    requests=requests,
)
