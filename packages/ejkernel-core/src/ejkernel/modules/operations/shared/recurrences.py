"""The shared code of the linear recurrence operations: checks of arguments, canonical gates, reversal."""

import functools
import inspect
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from ejkernel.modules.operations.shared.shapes import (
    check_cumulative_lengths,
    check_dtype,
    check_not_empty,
    check_same_dtype,
    check_shape,
)
from ejkernel.ops.batch_invariance import is_batch_invariant
from ejkernel.ops.invariant_rows import compute_rows_in_tiles
from ejkernel.ops.model import Op, tolerances
from ejkernel.promotion import with_standard_promotion
from ejkernel.types.forward_mode import reverse_rule
from ejkernel.types.integers import exact_ids

TOLERANCE = tolerances(float64=1e-9, float32=5e-5, bfloat16=2e-2, float16=4e-3)
"""The tolerances of recurrences. Sums over a whole sequence are larger than a softmax's, and so is their rounding
error.
"""

NORM_EPSILON = 1e-6


def check_tokens(
    args: Any,
    rows: str = "B ",
    allow_more_value_heads: bool = False,
    names: tuple[str, str, str] = ("query", "key", "value"),
) -> dict[str, int]:
    """Checks query, key and value, and returns the sizes of their axes.

    Args:
        args: Record with the three.
        rows: The axes in front of T.
        allow_more_value_heads: Whether values may have more heads, H, than queries and keys.
        names: What the operation calls the three.

    Raises:
        ValueError: One of them is wrong.
    """
    sizes: dict[str, int] = {}
    grouped = allow_more_value_heads and has_shared_queries(args)
    every = ("T Hk K", "T Hk K", "T H V") if grouped else ("T H K", "T Hk K", "T Hk V")
    for name, axes in zip(names, every, strict=True):
        array = getattr(args, name)
        check_shape(name, array, rows + axes, sizes)
        check_not_empty(name, array, rows + axes, axes)
        check_dtype(name, array, jnp.floating, "a floating dtype")
    check_same_dtype({name: getattr(args, name) for name in names})
    if sizes["H"] % sizes["Hk"]:
        key, most = getattr(args, names[1]), names[2] if grouped else names[0]
        raise ValueError(
            f"{names[1]}: got shape {key.shape} with {sizes['Hk']} heads, wants a divisor of {most}'s {sizes['H']}"
        )
    return sizes


def has_shared_queries(args: Any) -> bool:
    """Returns whether values have more heads than queries and keys, which are shared by groups of value heads."""
    if min(rank(args.query), rank(args.value)) < 3:
        return False
    return args.value.shape[-2] > args.query.shape[-2]


def check_floating(name: str, array: Any, axes: str, sizes: dict[str, int], broadcast: str = "") -> None:
    """Checks an optional floating array.

    Args:
        name: Argument name for the message.
        array: The argument's value, or None.
        axes: Space-separated axis names.
        sizes: Their sizes.
        broadcast: The axes that may have size 1.

    Raises:
        ValueError: The array has another shape or no floating dtype.
    """
    if array is not None:
        check_shape(name, array, axes, sizes, broadcast=broadcast)
        check_dtype(name, array, jnp.floating, "a floating dtype")


def check_log_gate(name: str, gate: Any, axes: str, sizes: dict[str, int]) -> None:
    """Checks a gate that has one value per head, or one per channel.

    Args:
        name: Argument name for the message.
        gate: The argument's value, or None.
        axes: Axis names, up to the heads.
        sizes: Every size, the channels' K included.

    Raises:
        ValueError: The gate has another shape or dtype.
    """
    is_per_channel = rank(gate) > len(axes.split())
    try:
        check_floating(name, gate, f"{axes} K" if is_per_channel else axes, sizes)
    except ValueError as error:
        other = axes if is_per_channel else f"{axes} K"
        raise ValueError(f"{error}, or [{', '.join(other.split())}]") from None


def check_and_canonicalise_packing(args: Any) -> None:
    """Checks the lengths of a record under construction if they are not traced, and keeps 64-bit ids exact.

    Raises:
        ValueError: The lengths are wrong, or there are segments too.
    """
    if args.cu_seqlens is not None:
        if args.seg_ids is not None:
            raise ValueError("seg_ids: got a value with cu_seqlens, wants one of the two")
        if rank(args.query) in (3, 4):
            check_cumulative_lengths("cu_seqlens", args.cu_seqlens, 1, args.query.shape[-3])
    if isinstance(args.seg_ids, np.ndarray) and np.issubdtype(args.seg_ids.dtype, np.integer):
        object.__setattr__(args, "seg_ids", exact_ids("seg_ids", args.seg_ids))  # JAX would wrap 64 bits around


def check_segments(args: Any, sizes: dict[str, int]) -> None:
    """Checks seg_ids.

    Raises:
        ValueError: `seg_ids` are not [B, T] integers.
    """
    if args.seg_ids is not None:
        check_shape("seg_ids", args.seg_ids, "B T", sizes)
        check_dtype("seg_ids", args.seg_ids, jnp.integer, "an integer dtype")


def check_packing(cu_seqlens: Any, sizes: dict[str, int]) -> None:
    """Checks cumulative lengths, and learns N.

    Raises:
        ValueError: `cu_seqlens` are not [N + 1] integers, or there is more than one row.
    """
    check_shape("cu_seqlens", cu_seqlens, "N+1", sizes)
    check_dtype("cu_seqlens", cu_seqlens, jnp.integer, "an integer dtype")
    if cu_seqlens.shape[0] < 2:
        raise ValueError(f"cu_seqlens: got shape {cu_seqlens.shape}, wants [N + 1] with N of at least 1")
    if sizes["B"] != 1:
        raise ValueError(f"cu_seqlens: got a value with {sizes['B']} rows, wants one row that holds all sequences")
    sizes["N"] = cu_seqlens.shape[0] - 1


def check_parents_shape_and_dtype(args: Any, sizes: dict[str, int], axes: str = "B T") -> None:
    """Checks the shape and dtype of the trees of draft tokens; `conditions.conditions_of_trees` checks their values.

    Raises:
        ValueError: `parents` are not such integers, or there are segments too.
    """
    if args.parents is None:
        return
    check_shape("parents", args.parents, axes, sizes)
    check_dtype("parents", args.parents, jnp.integer, "an integer dtype")
    if getattr(args, "seg_ids", None) is not None:
        raise ValueError("parents: got a value with seg_ids, wants one of the two")


def check_token_states_are_of_trees(parents: Any, return_token_states: bool) -> None:
    """Refuses a call without trees of draft tokens that asks for no states after tokens.

    Raises:
        ValueError: `return_token_states` is False without `parents`.
    """
    if parents is None and not return_token_states:
        raise ValueError("return_token_states: got False without parents, wants parents, or True")


def tree_fields(args: Any, keeps_token_states: bool) -> dict[str, Any]:
    """Returns the record's fields of trees of draft tokens, whose states are kept if the caller gets them."""
    if args.parents is None:
        return {}
    return {"parents": args.parents, "keeps_token_states": keeps_token_states}


def check_states(args: Any, axes: str, sizes: dict[str, int]) -> None:
    """Checks initial_state, of rows, of packed sequences or in slots, and state_indices.

    Args:
        args: Record with the two and cu_seqlens.
        axes: Axis names of one state.
        sizes: Those of the tokens, and N where they are packed.

    Raises:
        ValueError: One of them is wrong.
    """
    states, indices = args.initial_state, args.state_indices
    if indices is None:
        check_floating("initial_state", states, f"{'B' if args.cu_seqlens is None else 'N'} {axes}", sizes)
        return
    for name in ("cu_seqlens", "initial_state"):
        if getattr(args, name) is None:
            raise ValueError(f"state_indices: got a value without {name}, wants both or neither")
    check_shape("state_indices", indices, "N", sizes)
    check_dtype("state_indices", indices, jnp.integer, "an integer dtype")
    check_floating("initial_state", states, f"slots {axes}", sizes)
    if not states.shape[0]:
        raise ValueError(f"initial_state: got shape {states.shape}, wants at least one slot")


def always_returning_states(op: Op, name: str) -> Callable[..., tuple[jax.Array, jax.Array]]:
    """Returns the kernel-level function of a recurrence: the operation, which always returns the states too.

    Args:
        op: The operation; its function has an argument `return_state`.
        name: Of the function.
    """

    def run(*args: Any, **kwargs: Any) -> tuple[jax.Array, jax.Array]:
        return op.function(*args, **kwargs, return_state=True)

    parameters = [parameter for parameter in op.signature.parameters.values() if parameter.name != "return_state"]
    text = f"`{op.function.__name__}` that always returns output and states; its arguments but `return_state`."
    described = {"__name__": name, "__qualname__": name, "__module__": op.function.__module__, "__doc__": text}
    described |= {"__signature__": inspect.Signature(parameters), "op": op}
    for attribute, value in described.items():
        setattr(run, attribute, value)
    return run


def with_channel_axis(gate: jax.Array, heads: jax.Array) -> jax.Array:
    """Returns a gate as [..., H, K|1]: one that has the rank of `heads`, [..., H], gets a channel axis of size 1."""
    return gate[..., None] if gate.ndim == heads.ndim else gate


def l2_normalised(x: jax.Array) -> jax.Array:
    """Returns x over its length along the last axis, `x * rsqrt(sum x^2 + 1e-6)`, in its dtype."""
    return _normalise(is_batch_invariant(), to_float32_or_wider(x)).astype(x.dtype)


def _normalised_rows(fixed: bool, x: jax.Array) -> jax.Array:
    return compute_rows_in_tiles(lambda x: x * _inverse_norm(x), (x,), axes=x.ndim - 1, fixed=fixed)


@reverse_rule
@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _normalise(fixed: bool, x: jax.Array) -> jax.Array:
    return _normalised_rows(fixed, x)


def _inverse_norm(x: jax.Array) -> jax.Array:
    return jax.lax.rsqrt(jnp.sum(x * x, axis=-1, keepdims=True) + NORM_EPSILON)


@with_standard_promotion
def _normalised_gradient(fixed: bool, x: jax.Array, cotangent: jax.Array) -> tuple[jax.Array]:
    """Computes the gradient by hand, because XLA's CPU backend computes the sum of products of two arrays fast only as
    a matrix product, and because a vector whose cotangent is zero has a gradient of zero, whatever it holds: tokens
    that no sequence has may be NaN.
    """
    inverse = _inverse_norm(x)
    along = jnp.einsum("...d,...d->...", x, cotangent, precision=jax.lax.Precision.HIGHEST)
    gradient = inverse * (cotangent - x * (inverse**2 * along[..., None]))
    return (jnp.where(jnp.any(cotangent != 0, axis=-1, keepdims=True), gradient, 0),)


@with_standard_promotion
def _normalise_and_keep(fixed: bool, x: jax.Array) -> tuple[jax.Array, jax.Array]:
    # Without the rule of `_normalise`: forward-mode derivatives of gradients go through this function.
    return _normalised_rows(fixed, x), x


_normalise.defvjp(_normalise_and_keep, _normalised_gradient)


def to_float32_or_wider(x: jax.Array) -> jax.Array:
    """Returns x in at least float32."""
    return x.astype(jnp.promote_types(x.dtype, jnp.float32))


def rank(x: Any) -> int:
    """Returns number of axes; 0 of what has no shape."""
    return len(getattr(x, "shape", ()))
