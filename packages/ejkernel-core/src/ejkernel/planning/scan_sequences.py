"""Kernels of the selective scan that take rows only, for packed sequences and states in slots too.

    @with_rows
    def forward(record, config): ...             # never sees `cu_seqlens` nor `state_slots`

Around such a kernel, packed sequences become one row with their states in it (`ejkernel.planning.packed_scan`), and
states are read out of the slots before it and stored into them behind it.
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from ejkernel.families.selective_scan import SelectiveScan
from ejkernel.ops.arguments import array_fields
from ejkernel.ops.pullback import Pullback
from ejkernel.planning.packed_scan import as_row, from_row

HANDLES = frozenset({"cu_seqlens", "state_slots"})
"""Optional fields that a kernel honours with the decorators."""

Forward = Callable[[SelectiveScan, Any], Any]
Backward = Callable[[Pullback, Any], dict[str, jax.Array]]


def with_rows(forward: Forward) -> Forward:
    """The forward function for packed sequences, of one for rows."""

    @functools.wraps(forward)
    def run(record: SelectiveScan, config: Any) -> Any:
        if record.cu_seqlens is None:
            return forward(record, config)
        (output, _), *rest = forward(as_row(record), config)
        return from_row(record, output), *rest

    return run


def with_row_gradients(backward: Backward) -> Backward:
    """The backward function for packed sequences, of one for rows."""

    @functools.wraps(backward)
    def run(pullback: Pullback, config: Any) -> dict[str, jax.Array]:
        record: SelectiveScan = pullback.record
        if record.cu_seqlens is None:
            return backward(pullback, config)
        names = sorted(set(array_fields(record)) - HANDLES)
        given = {name: getattr(record, name) for name in names}

        def row(given: dict[str, jax.Array]) -> dict[str, jax.Array]:
            made = as_row(dataclasses.replace(record, **given))
            return {name: getattr(made, name) for name in names if name != "initial_state"}

        def stored(held: jax.Array | None, output: jax.Array) -> tuple[jax.Array, jax.Array]:
            return from_row(dataclasses.replace(record, initial_state=held), output)

        packed, pull_row = jax.vjp(row, given)
        # Linear: the values that it is differentiated at do not matter, and XLA drops them.
        _, pull_stored = jax.vjp(stored, record.initial_state, jnp.zeros_like(packed["x"]))
        kept, cotangent = pull_stored(pullback.cotangent)
        final = jnp.zeros((1, *record.decay.shape), cotangent.dtype)
        inner = dataclasses.replace(
            pullback,
            record=as_row(record),
            output=None,
            cotangent=(cotangent, final),
            wanted=frozenset(packed),
        )
        (gradients,) = pull_row(backward(inner, config))
        if record.initial_state is not None and record.state_slots is not None:
            gradients["initial_state"] = gradients["initial_state"] + kept
        return {name: gradients[name] for name in sorted(pullback.wanted)}

    return run


def of_rows(choose: Callable[..., Any]) -> Callable[..., Any]:
    """A function of a record's shapes that chooses a configuration: given what the kernel is given."""

    @functools.wraps(choose)
    def run(record: SelectiveScan, *rest: Any) -> Any:
        return choose(record if record.cu_seqlens is None else jax.eval_shape(as_row, record), *rest)

    return run
