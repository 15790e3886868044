"""Inputs for `gated_grouped_matmul`: the named cases every backend is tested on, and inputs of any given shapes."""

from typing import Any

import jax
import jax.numpy as jnp

from ejkernel.families import gated_grouped_matmul as family
from ejkernel.modules.operations.cases.tables import normal_like, tagged
from ejkernel.ops.model import Case

# name, tokens, rows (None without indices), contracted, columns, rows of each group, dtype, other options, tags
_Row = tuple[str, int, int | None, int, int, tuple[int, ...], Any, dict[str, Any], tuple[str, ...]]
_GROUPS = (40, 0, 33, 1)
_TABLE: tuple[_Row, ...] = (
    ("gathered", 24, 81, 60, 36, _GROUPS, jnp.float32, {}, ()),
    ("bfloat16", 24, 81, 64, 64, _GROUPS, jnp.bfloat16, {}, ()),
    ("rows as they are", 70, None, 33, 20, (20, 0, 45), jnp.float32, {"activation": "gelu"}, ("awkward",)),
    # No row is left over, so that the output is defined.
    ("precision", 16, 40, 32, 16, (25, 15), jnp.float32, {"precision": "highest", "left_over": "undefined"}, ()),
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
        return arguments(lhs=lhs.astype(dtype), rhs=rhs.astype(dtype), group_sizes=sizes, indices=indices, **options)

    exercises = {*options, *(() if rows is None else ("indices",))} - family.FAMILY.permissions
    return tagged(name, make, tuple(sorted(exercises)), tags)


def make_inputs(args: Any, key: jax.Array) -> Any:
    """Returns concrete arguments of the given shapes: normal floats, tokens at random, rows spread evenly over the
    groups.
    """
    keys = jax.random.split(key, 3)
    tokens, groups = args.lhs.shape[0], args.group_sizes.shape[0]
    rows = tokens if args.indices is None else args.indices.shape[0]
    sizes = jnp.full(groups, rows // groups).at[0].add(rows % groups)
    return type(args)(
        lhs=normal_like(keys[0], args.lhs),
        rhs=normal_like(keys[1], args.rhs, args.lhs.shape[1] ** -0.5),
        group_sizes=sizes.astype(args.group_sizes.dtype),
        indices=None
        if args.indices is None
        else jax.random.randint(keys[2], (rows,), 0, max(1, tokens)).astype(args.indices.dtype),
        activation=args.activation,
        precision=args.precision,
        left_over=args.left_over,
    )
