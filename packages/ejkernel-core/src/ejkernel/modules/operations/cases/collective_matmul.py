"""Inputs for `all_gather_matmul` and `reduce_scatter_matmul`: the named cases every backend is tested on, each on one
device.
"""

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from ejkernel.modules.operations.cases.tables import Row, make_cases_of_rows
from ejkernel.ops.model import Case


class ProductSizes(NamedTuple):
    """Rows, contracted elements and columns of a product, and the dtype of its operands."""

    m: int
    k: int
    n: int
    dtype: Any = jnp.float32


def _no_arguments(key: jax.Array) -> dict[str, Any]:
    return {}


def _highest_precision(key: jax.Array) -> dict[str, Any]:
    return {"precision": jax.lax.Precision.HIGHEST}


_SHARED_TABLE: tuple[Row[ProductSizes], ...] = (
    ("float32", ProductSizes(24, 40, 33), _no_arguments, (), ()),
    ("one row", ProductSizes(1, 7, 5), _no_arguments, (), ("awkward",)),
    ("bfloat16", ProductSizes(130, 256, 136, jnp.bfloat16), _highest_precision, ("precision",), ()),
    (
        "feed-forward of Llama 3 70B over eight devices",
        ProductSizes(8192, 8192, 3584, jnp.bfloat16),
        _no_arguments,
        (),
        ("bench",),
    ),
    ("small model", ProductSizes(512, 512, 1024), _no_arguments, (), ("bench_cpu",)),
)
_TRANSPOSED_TABLE: tuple[Row[ProductSizes], ...] = (
    ("transposed", ProductSizes(17, 24, 24), lambda key: {"rhs_transpose": True}, (), ()),
)


def all_gather_cases(record_type: type) -> tuple[Case, ...]:
    """Returns the named cases of `all_gather_matmul`, as argument records of the given type."""
    plain, transposed = (functools.partial(_make_matrices, transposes_y=transposes) for transposes in (False, True))
    cases = make_cases_of_rows(record_type, plain, _SHARED_TABLE)
    return *cases, *make_cases_of_rows(record_type, transposed, _TRANSPOSED_TABLE)


def reduce_scatter_cases(record_type: type) -> tuple[Case, ...]:
    """Returns the named cases of `reduce_scatter_matmul`, as argument records of the given type."""
    return make_cases_of_rows(record_type, functools.partial(_make_matrices, transposes_y=True), _SHARED_TABLE)


def _make_matrices(key: jax.Array, sizes: ProductSizes, *, transposes_y: bool) -> dict[str, Any]:
    m, k, n, dtype = sizes
    x_key, y_key = jax.random.split(key)
    y = jax.random.normal(y_key, (n, k) if transposes_y else (k, n)) * k**-0.5
    return {"x": jax.random.normal(x_key, (m, k)).astype(dtype), "y": y.astype(dtype), "axis_name": None}
