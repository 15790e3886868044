"""The quantised matmul family: the record its operation lowers to and its meaning."""

from collections.abc import Mapping
from typing import Any

import jax
import numpy as np

from ejkernel.families.contract import Family
from ejkernel.families.quantized_matmul.record import QuantizedMatmul, accumulator, columns, finished, matrix
from ejkernel.families.quantized_matmul.reference import reference

__all__ = [
    "FAMILY",
    "QuantizedMatmul",
    "accumulator",
    "axes",
    "columns",
    "finished",
    "localise",
    "matrix",
    "reference",
    "requests",
]


def localise(record: QuantizedMatmul, offsets: Mapping[str, jax.Array]) -> QuantizedMatmul:
    """Returns one shard's record: rows, and columns that lie in rows of their own, are independent."""
    return record


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
    shardable=lambda record: "mn" if record.transpose else "m",
    aligned=(),
    localise=localise,
    reference=reference,
    requests=requests,
)
