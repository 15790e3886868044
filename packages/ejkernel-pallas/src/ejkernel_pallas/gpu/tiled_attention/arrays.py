"""Arrays of one tile of scores in the registers of a warpgroup."""

import inspect
from typing import Any

import jax
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax import lax

from ejkernel_pallas.gpu.tiled_attention.masking import COLUMNS, ROWS


def over_columns(rows: jax.Array, shape: tuple[int, int]) -> jax.Array:
    """A value for every row, for all columns."""
    return lax.broadcast_in_dim(rows, shape, [0])


def over_rows(columns: jax.Array, shape: tuple[int, int]) -> jax.Array:
    """A value for every column, for all rows."""
    return lax.broadcast_in_dim(columns, shape, [1])


def full_rows(rows: int, value: float) -> jax.Array:
    """The same value for every row of a tile."""
    return plgpu.layout_cast(jnp.full((rows,), value, jnp.float32), ROWS)


def full_tile(shape: tuple[int, int]) -> jax.Array:
    """A tile of zeros."""
    return plgpu.layout_cast(jnp.full(shape, 0, jnp.float32), plgpu.Layout.WGMMA)


def load_rows(vector: Any) -> jax.Array:
    """A value for every row, from shared memory."""
    return _load(vector, ROWS)


def load_columns(vector: Any) -> jax.Array:
    """A value for every column, from shared memory."""
    return _load(vector, COLUMNS)


def _load(vector: Any, layout: Any) -> jax.Array:
    # JAX 0.10 wants an index, which is deprecated in 0.11 and gone in 0.12.
    index = inspect.signature(plgpu.load).parameters.get("idx")
    indexed = {} if index is None or index.default is not inspect.Parameter.empty else {"idx": ()}
    return plgpu.load(vector, **indexed, layout=layout, optimized=False)
