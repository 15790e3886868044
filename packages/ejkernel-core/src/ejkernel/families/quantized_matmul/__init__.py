"""The quantised matmul family: the record its operation lowers to and its meaning."""

from typing import Any

import numpy as np

from ejkernel.families.contract import Family
from ejkernel.families.quantized_matmul.record import (
    QuantizedMatmul,
    accumulator,
    apply_tensor_scale,
    columns,
    dequantized_matrix,
)
from ejkernel.families.quantized_matmul.reference import reference

__all__ = [
    "FAMILY",
    "QuantizedMatmul",
    "accumulator",
    "apply_tensor_scale",
    "axes",
    "columns",
    "dequantized_matrix",
    "reference",
    "requests",
]


def axes(record: QuantizedMatmul) -> dict[str, str]:
    """Returns axis letters of a record's fields and of its output; w counts words and q groups."""
    row = "n" if record.transpose else "k"
    packed = {"packed": f"{row} w", "scales": f"{row} q", "zeros": f"{row} q", "tensor_scale": ""}
    return {"x": "m k", **packed, "output": "m n"}


def requests(record: QuantizedMatmul) -> tuple[dict[str, Any], ...]:
    """Returns the owners of a record's entries: its rows."""
    return ({"m": np.arange(record.x.shape[0])},)


FAMILY = Family(
    name="quantized_matmul",
    record=QuantizedMatmul,
    differentiable=("x",),
    dtype=lambda record: record.x.dtype,
    head_dims=lambda record: (record.x.shape[-1], columns(record)),
    axes=axes,
    # Each shard is a separate call, since rows are independent, and so are columns that are rows of the packed matrix.
    shardable=lambda record: "mn" if record.transpose else "m",
    reference=reference,
    requests=requests,
)
