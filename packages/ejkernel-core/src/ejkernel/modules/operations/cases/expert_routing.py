"""Inputs for `expert_routing`: the named cases every backend is tested on, and inputs of any given shapes."""

from typing import Any

import jax
import jax.numpy as jnp

from ejkernel.modules.operations.cases.tables import ROW_FUNCTIONS_TAG, fill_arguments, normal_like, tagged_case
from ejkernel.ops.model import Case

# name, tokens, experts, experts per token, dtype, how far logits are rounded, tags
_Row = tuple[str, int, int, int, Any, float | None, tuple[str, ...]]
_CASE_TABLE: tuple[_Row, ...] = (
    ("eight of forty", 67, 40, 8, jnp.float32, None, ()),
    ("bfloat16", 70, 16, 2, jnp.bfloat16, None, ()),
    ("equal logits", 33, 12, 5, jnp.float32, 1.0, ("awkward",)),
    ("all experts", 9, 3, 3, jnp.float32, None, ("awkward",)),
    ("one expert", 5, 1, 1, jnp.float32, None, ("awkward",)),
    ("layer", 8192, 128, 8, jnp.bfloat16, None, ("bench",)),
    ("small layer", 1024, 64, 8, jnp.float32, None, ("bench_cpu",)),
)


def cases(record_type: type) -> tuple[Case, ...]:
    """Returns the named cases as argument records of the given type."""
    return (
        *(_make_case(record_type, row) for row in _CASE_TABLE),
        *(_scored_case(record_type, *row) for row in _SCORED_CASE_OPTIONS.items()),
        *(
            _scored_case(record_type, f"{name}, many experts", options, 128, (ROW_FUNCTIONS_TAG,))
            for name, options in _SCORED_CASE_OPTIONS.items()
        ),
    )


_SCORED_CASE_OPTIONS: dict[str, dict[str, Any]] = {
    "softmax scores": {"scores": "softmax", "normalise": True},
    "biased sigmoid scores of groups": {
        "scores": "sigmoid",
        "n_groups": 4,
        "top_groups": 2,
        "normalise": True,
        "scale": 2.5,
    },
}


def _scored_case(
    record_type: type, name: str, options: dict[str, Any], experts: int = 16, tags: tuple[str, ...] = ()
) -> Case:
    """Returns a call that returns weights."""

    def make(key: jax.Array) -> Any:
        bias = jnp.linspace(-0.5, 0.5, experts) if "n_groups" in options else None
        return record_type(logits=jax.random.normal(key, (21, experts)), selection_bias=bias, top_k=3, **options)

    return tagged_case(name, make, (), tags)


def _make_case(record_type: type, row: _Row) -> Case:
    name, tokens, experts, top_k, dtype, step, tags = row

    def make(key: jax.Array) -> Any:
        logits = jax.random.normal(key, (tokens, experts))
        if step is not None:
            logits = _tied_logits(logits, step)
        return record_type(logits=logits.astype(dtype), top_k=top_k)

    return tagged_case(name, make, (), tags)


def _tied_logits(logits: jax.Array, rounding_step: float) -> jax.Array:
    """Returns rounded logits, with zeros, infinities and NaNs of both signs in the first rows."""
    rounded_logits = jnp.round(logits / rounding_step) * rounding_step
    # One is left out, as if it were masked.
    rounded_logits = rounded_logits.at[0, 0].set(-jnp.inf)
    special_values = jnp.array([0.0, -0.0, jnp.nan, jnp.inf, -0.0, -jnp.nan, -jnp.inf, 0.0])[: logits.shape[1]]
    return rounded_logits.at[1:4, : special_values.size].set(special_values)


def make_inputs(args: Any, key: jax.Array) -> Any:
    """Returns concrete arguments of the given shapes: normal logits."""
    return fill_arguments(args, key, lambda name, shape, key: normal_like(key, shape))
