"""Inputs for `expert_routing`: the named cases every backend is tested on, and inputs of any given shapes."""

from typing import Any

import jax
import jax.numpy as jnp

from ejkernel.modules.operations.cases.tables import normal_like, tagged
from ejkernel.ops.model import Case

# name, tokens, experts, experts a token, dtype, how far logits are rounded, tags
_Row = tuple[str, int, int, int, Any, float | None, tuple[str, ...]]
_TABLE: tuple[_Row, ...] = (
    ("eight of forty", 67, 40, 8, jnp.float32, None, ()),
    ("bfloat16", 70, 16, 2, jnp.bfloat16, None, ()),
    ("equal logits", 33, 12, 5, jnp.float32, 1.0, ("awkward",)),
    ("all experts", 9, 3, 3, jnp.float32, None, ("awkward",)),
    ("one expert", 5, 1, 1, jnp.float32, None, ("awkward",)),
    ("layer", 8192, 128, 8, jnp.bfloat16, None, ("bench",)),
    ("small layer", 1024, 64, 8, jnp.float32, None, ("bench_cpu",)),
)


def cases(arguments: type) -> tuple[Case, ...]:
    """Returns the named cases as argument records of the given type."""
    return tuple(_case(arguments, row) for row in _TABLE)


def _case(arguments: type, row: _Row) -> Case:
    name, tokens, experts, top_k, dtype, step, tags = row

    def make(key: jax.Array) -> Any:
        logits = jax.random.normal(key, (tokens, experts))
        if step is not None:
            logits = _tied(logits, step)
        return arguments(logits=logits.astype(dtype), top_k=top_k)

    return tagged(name, make, (), tags)


def _tied(logits: jax.Array, step: float) -> jax.Array:
    """Rounded logits, with zeros, infinities and NaNs of both signs in the first rows."""
    rounded = jnp.round(logits / step) * step
    # One is left out, as if it were masked.
    rounded = rounded.at[0, 0].set(-jnp.inf)
    special = jnp.array([0.0, -0.0, jnp.nan, jnp.inf, -0.0, -jnp.nan, -jnp.inf, 0.0])[: logits.shape[1]]
    return rounded.at[1:4, : special.size].set(special)


def make_inputs(args: Any, key: jax.Array) -> Any:
    """Returns concrete arguments of the given shapes: normal logits."""
    return type(args)(logits=normal_like(key, args.logits), top_k=args.top_k)
