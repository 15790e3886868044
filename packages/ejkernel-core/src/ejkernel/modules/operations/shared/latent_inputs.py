"""The shared code of the operations on latent vectors: checks of sizes, projections, seeds."""

from collections.abc import Mapping
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
import numpy as np

from ejkernel import _compat
from ejkernel.modules.operations.shared.shapes import (
    as_float_dtype,
    check_dtype,
    check_not_empty,
    check_same_dtype,
    check_shape,
)
from ejkernel.ops.invariant_rows import compute_rows, product_tile_rows
from ejkernel.planning.precision import product_precision

Record = TypeVar("Record")


def set_canonical_values(record: Any, **values: Any) -> None:
    """Gives fields of a record that is being made their canonical values."""
    for name, value in values.items():
        object.__setattr__(record, name, value)


def as_logits_dtype(name: str, value: Any) -> Any:
    """Returns the dtype that scores are rounded to; None and everything wider than float32 is float32: they are not
    rounded.

    Raises:
        ValueError: The value is not a floating dtype.
    """
    dtype = jnp.dtype("float32") if value is None else as_float_dtype(name, value)
    return dtype if jnp.finfo(dtype).bits < 32 else jnp.dtype("float32")


def check_latent_sizes(args: Any, required_axes: Mapping[str, str], optional_axes: Mapping[str, str]) -> dict[str, int]:
    """Checks shapes and dtypes of the arrays of a call.

    Args:
        args: The argument record.
        required_axes: Name -> axes of the arrays that are always there; the query first.
        optional_axes: The same for those that may be None.

    Returns:
        The sizes of all axes.

    Raises:
        ValueError: A shape contradicts another, an axis is empty, or a dtype is not the query's.
    """
    sizes: dict[str, int] = {}
    shapes = {
        **required_axes,
        **{name: axes for name, axes in optional_axes.items() if getattr(args, name) is not None},
    }
    for name, axes in shapes.items():
        check_shape(name, getattr(args, name), axes, sizes)
        check_not_empty(name, getattr(args, name), axes, " ".join(axis for axis in axes.split() if axis != "B"))
    lead = next(iter(required_axes))
    check_dtype(lead, getattr(args, lead), jnp.floating, "a floating dtype")
    check_same_dtype({name: getattr(args, name) for name in shapes})
    if sizes["H"] % sizes["Hk"]:
        raise ValueError(
            f"w_kc: got shape {args.w_kc.shape} with {sizes['Hk']} heads, wants a divisor of query's {sizes['H']}"
        )
    return sizes


def check_query_size(sizes: Mapping[str, int], has_rotary_part: bool) -> None:
    """Checks the size of a query: the size of the keys' part without rotary position, plus the size of the rotary part
    if `has_rotary_part`.

    Raises:
        ValueError: The query has another size.
    """
    query_size = sizes["Dn"] + (sizes["Dr"] if has_rotary_part else 0)
    if sizes["Dq"] != query_size:
        parts = f"Dn + Dr = {sizes['Dn']} + {sizes['Dr']}" if has_rotary_part else f"w_kc's Dn = {sizes['Dn']}"
        raise ValueError(f"query: got a head size of {sizes['Dq']}, wants {parts}")


def check_self_attention_sizes(args: Any) -> dict[str, int]:
    """Checks shapes and dtypes of the arrays of latent self-attention, and returns the sizes of all axes.

    Args:
        args: The argument record, with query, key_value, w_kc, w_vc, b_q and b_k.

    Raises:
        ValueError: As `check_latent_sizes`, and for b_q without b_k.
    """
    required = {"query": "B T H Dq", "key_value": "B T R", "w_kc": "R Hk Dn", "w_vc": "R Hk Dv"}
    sizes = check_latent_sizes(args, required, {"b_k": "B T Dr", "b_q": "B T Dr"})
    if args.b_q is not None and args.b_k is None:
        raise ValueError("b_q: got a value with b_k None, wants both, b_k alone, or neither")
    check_query_size(sizes, args.b_k is not None and args.b_q is None)
    return sizes


def project_latent(latent: jax.Array, weights: jax.Array) -> jax.Array:
    """Returns latent vectors [B, T, R] read out by weights [R, Hk, n]: [B, T, Hk, n] in their dtype."""
    return compute_rows(_product_with_latent, (latent,), (weights,), axes=2, tile_rows=product_tile_rows(1))


def _product_with_latent(latent: jax.Array, weights: jax.Array) -> jax.Array:
    accumulator_dtype = jnp.promote_types(latent.dtype, jnp.float32)
    product = jnp.einsum(
        "btr,rgn->btgn",
        latent,
        weights,
        precision=product_precision(latent.dtype),
        preferred_element_type=accumulator_dtype,
    )
    return product.astype(latent.dtype)


def rng_seed(rng: Any) -> jax.Array:
    """Returns a dropout seed, uint32 [], from an integer or a PRNG key, typed or raw."""
    if jnp.issubdtype(rng.dtype, jax.dtypes.prng_key) or rng.ndim:
        return jax.random.bits(rng, (), jnp.uint32)
    return jnp.asarray(rng).astype(jnp.uint32)


def with_accumulator_dtype(args: Record) -> Record:
    """Returns an argument record with its floating arrays in the accumulator's dtype: float32, or float64 for those."""

    def to_accumulator_dtype(x: Any) -> Any:
        return x.astype(jnp.promote_types(x.dtype, jnp.float32)) if jnp.issubdtype(x.dtype, jnp.floating) else x

    return jax.tree.map(to_accumulator_dtype, args)


def check_lengths(name: str, lengths: Any, size: int) -> None:
    """Checks the values of lengths, where they can be read: not under a trace.

    Raises:
        ValueError: One is negative or larger than `size`.
    """
    if _compat.is_tracer(lengths) or not getattr(lengths, "is_fully_addressable", True):
        return
    values = np.asarray(jax.device_get(lengths))
    if values.dtype.kind in "iu" and values.size and (values.min() < 0 or values.max() > size):
        shown = np.array2string(values, threshold=16, separator=", ")
        raise ValueError(f"{name}: got {shown}, wants lengths from 0 to the cache's {size}")
