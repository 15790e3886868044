"""Conformance cases from rows of a table, for any operation."""

import dataclasses
from collections.abc import Callable, Iterable
from typing import Any, TypeVar

import jax
import jax.numpy as jnp

from ejkernel.ops.model import Case
from ejkernel.types import MaskInfo
from ejkernel.types.pair_functions import PairFunction

Sizes = TypeVar("Sizes")
Row = tuple[str, Sizes, Callable[[jax.Array], dict[str, Any]], tuple[str, ...], tuple[str, ...]]
"""Name, sizes, extra arguments from a key, optional record fields the case is about, further tags."""


def make_cases_of_rows(
    record_type: type, inputs: Callable[[jax.Array, Sizes], dict[str, Any]], rows: Iterable[Row[Sizes]]
) -> tuple[Case, ...]:
    """Returns cases of an operation.

    Args:
        record_type: Its argument record.
        inputs: (PRNG key, sizes) -> the arguments that every case gives.
        rows: The cases; what a row gives itself wins.
    """

    def case_input_maker(
        sizes: Sizes, make_extra_arguments: Callable[[jax.Array], dict[str, Any]]
    ) -> Callable[[jax.Array], Any]:
        def make(key: jax.Array) -> Any:
            input_key, options = jax.random.split(key)
            return record_type(**{**inputs(input_key, sizes), **make_extra_arguments(options)})

        return make

    return tuple(
        tagged_case(name, case_input_maker(sizes, extra), exercises, tags)
        for name, sizes, extra, exercises, tags in rows
    )


ROW_FUNCTIONS_TAG = "row functions"
"""The tag of cases with long rows, of calls that compute rows outside of their kernel, too. They run in
`batch_invariant` blocks alone.
"""


def tagged_case(name: str, make: Callable[[jax.Array], Any], exercises: Iterable[str], tags: Iterable[str]) -> Case:
    """Returns a case that CI runs, unless it is there to be timed, or for `batch_invariant` blocks alone."""
    everywhere = () if {"bench", "bench_cpu", ROW_FUNCTIONS_TAG} & set(tags) else ("ci",)
    return Case(name=name, make=make, tags=frozenset((*everywhere, *tags)), exercises=frozenset(exercises))


def fill_arguments(args: Any, key: jax.Array, make: Callable[[str, Any, jax.Array], Any]) -> Any:
    """Returns concrete arguments of given shapes, for the `make_inputs` of an operation.

    Args:
        args: Argument record with `jax.ShapeDtypeStruct` leaves.
        key: PRNG key.
        make: (name of an argument, its shape, key) -> what is given for it.
    """
    names = [f.name for f in dataclasses.fields(args) if not f.metadata.get("static")]
    keys = dict(zip(names, jax.random.split(key, len(names)), strict=True))
    shapes = {name: getattr(args, name) for name in names}
    values = {name: make(name, x, keys[name]) for name, x in shapes.items() if x is not None}
    return dataclasses.replace(args, **values)


def normal_like(key: jax.Array, shape: Any, factor: float = 1.0) -> jax.Array:
    """Returns normal floats times a factor, of the shape and dtype of `shape`."""
    return (factor * jax.random.normal(key, shape.shape, jnp.float32)).astype(shape.dtype)


def even_cu_seqlens(total: int, shape: Any) -> jax.Array:
    """Returns cumulative lengths of sequences of about the same length."""
    return jnp.linspace(0, total, shape.shape[0]).astype(shape.dtype)


def fill_function(key: jax.Array, function: PairFunction) -> PairFunction:
    """Returns a function of pairs with arrays of the given shapes: normal floats, and integers that are all 0, which
    is a valid index.
    """

    def leaf(key: jax.Array, shape: jax.ShapeDtypeStruct) -> jax.Array:
        is_floating = jnp.issubdtype(shape.dtype, jnp.floating)
        return normal_like(key, shape) if is_floating else jnp.zeros(shape.shape, shape.dtype)

    keys = jax.random.split(key, max(1, len(function.captured)))
    return dataclasses.replace(function, captured=tuple(map(leaf, keys, function.captured)))


def fill_mask_info(shapes: MaskInfo) -> MaskInfo:
    """Returns a mask of given shapes that hides nothing: one segment, and positions that count."""

    def leaf(shape: jax.ShapeDtypeStruct) -> jax.Array:
        if shape.dtype == jnp.bool_:
            return jnp.ones(shape.shape, shape.dtype)
        # Zeros are one segment; positions count along the last axis, and ids that are all alike are not told apart.
        return jnp.zeros(shape.shape, shape.dtype)

    filled = jax.tree.map(leaf, shapes)
    counted = {
        name: jnp.broadcast_to(jnp.arange(positions.shape[-1], dtype=positions.dtype), positions.shape)
        for name in ("q_positions", "kv_positions")
        if (positions := getattr(shapes, name)) is not None
    }
    return dataclasses.replace(filled, **counted)
