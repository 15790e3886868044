"""Inputs for `gated_grouped_matmul`: the named cases every backend is tested on, and inputs of any given shapes."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp

from ejkernel.families import gated_grouped_matmul as family
from ejkernel.modules.operations.cases.tables import normal_like, tagged
from ejkernel.ops.model import Case
from ejkernel.types.arguments import optional_fields

# name, tokens, rows (None without indices), contracted, columns, rows of each group, dtype, other options, tags
_Row = tuple[str, int, int | None, int, int, tuple[int, ...], Any, dict[str, Any], tuple[str, ...]]
_GROUPS = (40, 0, 33, 1)
_TABLE: tuple[_Row, ...] = (
    ("gathered", 24, 81, 60, 36, _GROUPS, jnp.float32, {}, ()),
    ("bfloat16", 24, 81, 64, 64, _GROUPS, jnp.bfloat16, {}, ()),
    ("rows as they are", 70, None, 33, 20, (20, 0, 45), jnp.float32, {"activation": "gelu"}, ("awkward",)),
    # No row is left over, so that the output is defined.
    ("precision", 16, 40, 32, 16, (25, 15), jnp.float32, {"precision": "highest", "left_over": "undefined"}, ()),
    (
        "biased, interleaved, limited",
        24,
        81,
        60,
        36,
        _GROUPS,
        jnp.float32,
        {"rhs_bias": 0.5, "interleaved": True, "alpha": 1.702, "beta": 1.0, "limit": 0.8},
        (),
    ),
    ("columns first", 24, 81, 20, 36, _GROUPS, jnp.float32, {"transpose_rhs": True}, ()),
    ("no gate", 24, 81, 20, 36, _GROUPS, jnp.float32, {"gated": False, "activation": "relu2"}, ("awkward",)),
    ("layer", 8192, 65536, 2048, 768, (512,) * 128, jnp.bfloat16, {}, ("bench",)),
    ("small layer", 256, 1024, 256, 128, (64,) * 16, jnp.float32, {}, ("bench_cpu",)),
)


def cases(arguments: type) -> tuple[Case, ...]:
    """Returns the named cases as argument records of the given type."""
    return tuple(_case(arguments, row) for row in _TABLE)


def _case(arguments: type, row: _Row) -> Case:
    name, tokens, rows, contracted, columns, groups, dtype, options, tags = row

    def make(key: jax.Array) -> Any:
        keys = jax.random.split(key, 3)
        lhs = jax.random.normal(keys[0], (tokens, contracted))
        rhs = jax.random.normal(keys[1], (len(groups), contracted, 2 * columns)) * contracted**-0.5
        # Some name no token.
        indices = None if rows is None else jax.random.randint(keys[2], (rows,), -1, tokens + 1, jnp.int32)
        sizes = jnp.array(groups, jnp.int32)
        kwargs = dict(options)
        if "rhs_bias" in kwargs:
            kwargs["rhs_bias"] = kwargs["rhs_bias"] * jax.random.normal(keys[2], (len(groups), 1, 2 * columns))
        if "transpose_rhs" in kwargs:
            rhs = rhs.swapaxes(1, 2)
        return arguments(lhs=lhs.astype(dtype), rhs=rhs.astype(dtype), group_sizes=sizes, indices=indices, **kwargs)

    exercises = {*options, *(() if rows is None else ("indices",))} & optional_fields(family.FAMILY.record).keys()
    return tagged(name, make, tuple(sorted(exercises)), tags)


def make_inputs(args: Any, key: jax.Array) -> Any:
    """Returns concrete arguments of the given shapes: normal floats, tokens at random, rows spread evenly over the
    groups.
    """
    keys = jax.random.split(key, 3)
    tokens, groups = args.lhs.shape[0], args.group_sizes.shape[0]
    rows = tokens if args.indices is None else args.indices.shape[0]
    sizes = jnp.full(groups, rows // groups).at[0].add(rows % groups)
    fields = {
        "lhs": normal_like(keys[0], args.lhs),
        "rhs": normal_like(keys[1], args.rhs, args.lhs.shape[1] ** -0.5),
        "group_sizes": sizes.astype(args.group_sizes.dtype),
    }
    if args.indices is not None:
        fields["indices"] = jax.random.randint(keys[2], (rows,), 0, max(1, tokens)).astype(args.indices.dtype)
    if args.rhs_bias is not None:
        fields["rhs_bias"] = normal_like(keys[2], args.rhs_bias)
    return dataclasses.replace(args, **fields)
