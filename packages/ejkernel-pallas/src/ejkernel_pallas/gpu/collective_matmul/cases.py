"""Conformance cases with the whole tiles that these kernels need; on one device, the same kernels send nothing."""

import functools
from typing import Any

import jax
import jax.numpy as jnp

from ejkernel.modules.operations.all_gather_matmul import AllGatherMatmulArguments
from ejkernel.modules.operations.cases.collective_matmul import ProductSizes
from ejkernel.modules.operations.cases.tables import Row, make_cases_of_rows
from ejkernel.modules.operations.reduce_scatter_matmul import ReduceScatterMatmulArguments
from ejkernel.ops.model import Case

WIDE = ProductSizes(256, 384, 512, jnp.bfloat16)
"""Tiles of 256 columns, more steps than stages."""
NARROW = ProductSizes(384, 128, 384, jnp.float16)
"""Tiles of 128 columns, and fewer steps than stages."""


def cases() -> dict[str, tuple[Case, ...]]:
    """Returns the conformance cases of each operation, by its name."""
    precise: Row[ProductSizes] = (
        "tiles",
        WIDE,
        lambda key: {"precision": jax.lax.Precision.HIGHEST},
        ("precision",),
        (),
    )
    narrow: Row[ProductSizes] = ("narrow tiles", NARROW, lambda key: {}, (), ())
    transposed: Row[ProductSizes] = ("tiles, transposed", WIDE, lambda key: {"rhs_transpose": True}, (), ())
    plain, rows_of_y = (functools.partial(_make_matrices, transposes_y=transposes) for transposes in (False, True))
    return {
        "all_gather_matmul": (
            *make_cases_of_rows(AllGatherMatmulArguments, plain, (precise, narrow)),
            *make_cases_of_rows(AllGatherMatmulArguments, rows_of_y, (transposed,)),
        ),
        "reduce_scatter_matmul": make_cases_of_rows(ReduceScatterMatmulArguments, rows_of_y, (precise, narrow)),
    }


def _make_matrices(key: jax.Array, sizes: ProductSizes, *, transposes_y: bool) -> dict[str, Any]:
    m, k, n, dtype = sizes
    x_key, y_key = jax.random.split(key)
    y = jax.random.normal(y_key, (n, k) if transposes_y else (k, n)) * k**-0.5
    return {"x": jax.random.normal(x_key, (m, k)).astype(dtype), "y": y.astype(dtype), "axis_name": None}
