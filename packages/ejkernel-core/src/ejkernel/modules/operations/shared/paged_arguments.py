"""The shared code of the operations over paged caches: canonical arguments, checks of caches and lengths, and
arguments that set fields of the configuration.
"""

import dataclasses
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
from jax import lax

from ejkernel.families.paged_attention.pages import LAYOUTS
from ejkernel.modules.operations.shared.shapes import (
    as_number,
    as_window,
    check_dtype,
    check_not_empty,
    check_shape,
    got,
)
from ejkernel.ops.params import BaseOperationConfig

Config = TypeVar("Config", bound=BaseOperationConfig)

AXIS_BY_LAYOUT_LETTER = {"p": "P", "s": "S", "h": "Hk"}


def cache_axes(kv_layout: str) -> dict[str, str]:
    """Returns the axis letters of `key_cache` and `value_cache` in a layout."""
    letters = " ".join(kv_layout.replace("h", "g"))
    return {"key_cache": letters, "value_cache": letters.replace("d", "v")}


def set_canonical_fields(record: Any, **values: Any) -> None:
    """Gives fields of a record that is being made their canonical values."""
    for name, value in values.items():
        object.__setattr__(record, name, value)


def as_score_scale(name: str, scale: Any) -> float | None:
    """Returns a factor on the scores; None for the default."""
    return None if scale is None else as_number(name, scale)


def as_soft_cap(name: str, cap: Any) -> float | None:
    """Returns a soft cap > 0; None for none."""
    return None if cap is None else as_number(name, cap, greater_than=0)


def as_cache_window(name: str, window: Any) -> tuple[int | None, int | None] | None:
    """Returns the sliding window of an operation with a cache as (left, right), inclusive.

    Args:
        name: Argument name for the message.
        window: `w >= 1` for the newest w keys, the query's own among them, or (left, right), each >= 0 or None.

    Raises:
        ValueError: The window is not of an accepted form.
    """
    pair = as_window(name, window)
    if window is None or isinstance(window, tuple):
        return pair
    # No limit on how old a key may be still leaves out the keys after the query.
    return (None if pair is None or pair[0] is None else pair[0] - 1, 0)


def accept_mask_value(name: str, value: Any) -> float | None:
    """Returns the score of masked keys: any so low that they weigh nothing, which is what they weigh here.

    Raises:
        ValueError: Masked keys would be attended to.
    """
    if value is None or (isinstance(value, float) and value == -float("inf")):
        return None
    if as_number(name, value) > -1e4:
        raise ValueError(f"{name}: got {value}, wants at most -10000, with which masked keys have weight 0")
    return None


def as_count(name: str, value: Any, minimum: int = 1) -> int | None:
    """Returns a Python int of at least `minimum`, or None.

    Raises:
        ValueError: The value is neither None nor an int of at least `minimum`.
    """
    if value is not None and (isinstance(value, bool) or not isinstance(value, int) or value < minimum):
        raise ValueError(f"{name}: got {got(value)}, wants an int >= {minimum}, or None")
    return value


def as_choice(name: str, value: Any, choices: tuple[Any, ...]) -> Any:
    """Returns one of several values.

    Raises:
        ValueError: The value is not among `choices`.
    """
    if value not in choices:
        raise ValueError(f"{name}: got {got(value)}, wants one of {', '.join(map(repr, choices))}")
    return value


def as_kv_layout(value: Any, query: Any, cache: Any, usual_layout: str) -> str:
    """Returns the order of the axes of a cache whose keys and values are apart.

    Args:
        value: The argument `kv_layout`; None takes the order that the shapes allow.
        query: Array [..., H, D].
        cache: The argument `key_cache`.
        usual_layout: The order that an error is about where the shapes allow none.

    Raises:
        ValueError: There is no such order; or it is None, and the shapes allow several.
    """
    if value is not None:
        return as_choice("kv_layout", value, (*LAYOUTS[:3], None))
    fitting = {
        layout: heads for layout in LAYOUTS[:3] if (heads := _kv_heads_in_layout(layout, query, cache)) is not None
    }
    if len(fitting) > 1:
        axes = {
            layout: ", ".join(AXIS_BY_LAYOUT_LETTER.get(letter, letter.upper()) for letter in layout)
            for layout in fitting
        }
        readings = " or ".join(
            f"[{axes[layout]}] with {heads} KV heads ({layout!r})" for layout, heads in fitting.items()
        )
        shape = tuple(cache.shape)
        raise ValueError(
            f"kv_layout: got None with key_cache of shape {shape}, which may be {readings}; say which it is"
        )
    return next(iter(fitting), usual_layout)


def _kv_heads_in_layout(layout: str, query: Any, cache: Any) -> int | None:
    """Returns the KV heads of a cache if it is of a layout; None where it cannot be."""
    shape, wants = getattr(cache, "shape", ()), getattr(query, "shape", ())
    if len(shape) != 4 or len(wants) < 2 or shape[-1] != wants[-1]:
        return None
    heads = shape[layout.index("h")]
    known = isinstance(heads, int) and isinstance(wants[-2], int)
    return heads if known and heads > 0 and wants[-2] % heads == 0 else None


def check_query(name: str, query: Any, axes: str, sizes: dict[str, int]) -> None:
    """Checks a query with axes that end in `H D`.

    Raises:
        ValueError: The shape or the dtype of the query is wrong.
    """
    check_shape(name, query, axes, sizes)
    check_not_empty(name, query, axes, "H D")
    check_dtype(name, query, jnp.floating, "a floating dtype")


def check_caches(
    query: str, caches: dict[str, Any], layout: str, sizes: dict[str, int], layout_argument: str = ""
) -> None:
    """Checks the key and the value cache against the query's sizes.

    Args:
        query: Name of the query argument.
        caches: Key and value cache by argument name.
        layout: Order of their axes.
        sizes: Known sizes, H and D among them.
        layout_argument: Name of the argument that chooses the layout; empty if there is none.

    Raises:
        ValueError: A cache has a wrong shape or dtype. If the cache may have another layout, the message names the
            layout argument.
    """
    hint = f" (as {layout_argument}={layout!r} says)" if layout_argument else ""
    axes = " ".join(AXIS_BY_LAYOUT_LETTER[letter] for letter in layout[:-1])
    for (name, cache), last in zip(caches.items(), ("D", "Dv"), strict=True):
        try:
            check_shape(name, cache, f"{axes} {last}", sizes)
        except ValueError as error:
            raise ValueError(f"{error}{hint}") from None
        check_dtype(name, cache, jnp.floating, "a floating dtype")
    (key, keys), (value, values) = caches.items()
    if keys.dtype != values.dtype:
        raise ValueError(f"{value}: got dtype {values.dtype}, wants {key}'s {keys.dtype}")
    check_not_empty(key, keys, f"{axes} D", "S Hk")
    check_head_groups(key, keys, query, sizes, hint)


def check_head_groups(key: str, keys: Any, query: str, sizes: dict[str, int], hint: str = "") -> None:
    """Checks that query heads divide into groups of one KV head.

    Raises:
        ValueError: The number of query heads is not a multiple of the number of KV heads.
    """
    if sizes["H"] % sizes["Hk"]:
        shape = tuple(keys.shape)
        raise ValueError(
            f"{key}: got shape {shape} with {sizes['Hk']} heads{hint}, wants a divisor of the {sizes['H']} of {query}"
        )


def check_integer_array(name: str, array: Any, axes: str, sizes: dict[str, int]) -> None:
    """Checks an array of integers.

    Raises:
        ValueError: The array has another shape or no integer dtype.
    """
    check_shape(name, array, axes, sizes)
    check_dtype(name, array, jnp.integer, "an integer dtype")


def check_page_tables(name: str, tables: Any, sizes: dict[str, int]) -> None:
    """Checks tables of N sequences, [N, K] or flat [N * K].

    Raises:
        ValueError: The tables have another shape or no integer dtype.
    """
    if len(getattr(tables, "shape", ())) == 2:
        check_integer_array(name, tables, "N K", sizes)
        return
    check_integer_array(name, tables, "N*K", sizes)
    if sizes["N*K"] % sizes["N"]:
        raise ValueError(f"{name}: got shape ({sizes['N*K']},), wants [N, K] or [N * K] for N={sizes['N']} sequences")


def table_axes(args: Any) -> dict[str, str]:
    """Returns axis letters of tables in rows, for operations whose tables may be flat too."""
    return {"block_tables": "r k"} if len(getattr(args.block_tables, "shape", ())) == 2 else {}


def check_packed_sequences(lengths: str, tables: str, starts: str, args: Any, sizes: dict[str, int]) -> None:
    """Checks the lengths [N], tables [N, pages] and cumulative query lengths [N + 1] of packed sequences.

    Raises:
        ValueError: One is wrong.
    """
    check_integer_array(lengths, getattr(args, lengths), "N", sizes)
    check_integer_array(tables, getattr(args, tables), "N pages", sizes)
    check_integer_array(starts, getattr(args, starts), "N+1", {"N+1": sizes["N"] + 1})


def check_per_head(name: str, array: Any, sizes: dict[str, int]) -> None:
    """Checks an optional array with one number per query head.

    Raises:
        ValueError: The array has another shape or dtype.
    """
    if array is not None:
        check_shape(name, array, "H", dict(sizes))
        check_dtype(name, array, jnp.floating, "a floating dtype")


def per_head(array: jax.Array | None, query: jax.Array) -> jax.Array | None:
    """Returns an array of one value per head, in the dtype that scores are accumulated in."""
    return None if array is None else array.astype(jnp.promote_types(query.dtype, jnp.float32))


def rounded_as_cache(queries: jax.Array, scale: float | None, dtype: Any) -> jax.Array:
    """Returns queries divided by `scale` and rounded as a cache's dtype represents them, in their own dtype."""
    if scale is None:
        return queries
    # A division in the queries' 16 bits would round twice, and often to another number than the nearest.
    scaled = queries.astype(jnp.promote_types(queries.dtype, jnp.float32)) / scale
    if dtype == jnp.int8:
        scaled = jnp.clip(jnp.round(scaled), -128, 127)
    # XLA may remove a conversion to a narrower dtype and back.
    return lax.optimization_barrier(scaled.astype(dtype)).astype(queries.dtype)


def with_tuning_arguments(config: type[Config], cfg: Config | None, **fields: Any) -> Config | None:
    """Returns `cfg` with the fields that the call's tuning arguments set. If no tuning argument is set, returns `cfg`
    unchanged.

    Raises:
        ValueError: An argument and `cfg` ask for different things.
    """
    fields = {name: value for name, value in fields.items() if value is not None}
    for name, value in fields.items():
        chosen = getattr(cfg, name, None)
        if chosen is not None and chosen != value:
            raise ValueError(f"{name}: got {value!r}, wants cfg's {chosen!r}, or only one of the two")
    return dataclasses.replace(cfg or config(), **fields) if fields else cfg
