"""Inputs for the operations of RWKV-6 and RWKV-7: the named cases, and inputs of any given shapes."""

import dataclasses
import functools
from collections.abc import Iterable
from typing import Any

import jax
import jax.numpy as jnp

from ejkernel.modules.operations.cases.recurrence import bounds, in_slots, log_gate, normal
from ejkernel.modules.operations.cases.tables import even_bounds, fill, normal_like, tagged
from ejkernel.ops.model import Case


@dataclasses.dataclass(frozen=True, kw_only=True)
class Call:
    """A case of an operation.

    Attributes:
        name: Unique within the operation.
        exercises: Optional record fields that the case is about.
        tags: Further tags.
        b: Rows.
        t: Tokens.
        h: Heads of r.
        g: Heads of k and v.
        k: Key channels.
        v: Value channels.
        dtype: Of r, k and v.
        form: `"rows"`, `"packed"` or `"slots"`.
        state: Whether there are states before the first tokens.
        options: Further arguments.
    """

    name: str
    exercises: tuple[str, ...] = ()
    tags: tuple[str, ...] = ()
    b: int = 2
    t: int = 11
    h: int = 4
    g: int = 4
    k: int = 8
    v: int = 8
    dtype: Any = jnp.float32
    form: str = "rows"
    state: bool = False
    options: tuple[tuple[str, Any], ...] = ()


_STATE = (("return_state", True),)
_PACKED_FIELDS = ("cu_seqlens", "sequence_state")
_CALLS = (
    Call(name="one token with a state", exercises=("initial_state",), tags=("awkward",), t=1, state=True),
    Call(name="grouped, states", exercises=("decay", "initial_state"), g=2, v=12, state=True, options=_STATE),
    Call(name="bfloat16", exercises=("decay",), dtype=jnp.bfloat16, v=6),
    Call(
        name="reversed",
        exercises=("initial_state",),
        t=9,
        k=6,
        state=True,
        options=(("reverse", True), ("softmax_scale", 1.0)),
    ),
    Call(name="packed", exercises=_PACKED_FIELDS, b=1, form="packed", state=True, options=_STATE),
    Call(name="slots", exercises=(*_PACKED_FIELDS, "state_slots"), b=1, t=6, form="slots", options=_STATE),
    Call(name="model", tags=("bench",), b=1, t=4096, h=16, g=16, k=64, v=64),
    Call(name="small model", tags=("bench_cpu",), b=1, t=512, h=4, g=4, k=64, v=64),
)


def rwkv6(arguments: type) -> tuple[Case, ...]:
    """Returns cases of `rwkv6`."""
    return _make_cases(arguments, _CALLS, lambda key, call: {"u": normal(key, (call.h, call.k))})


def rwkv7(arguments: type) -> tuple[Case, ...]:
    """Returns cases of `rwkv7`."""
    return _make_cases(
        arguments, _with_low_rank(), lambda key, call: dict(zip("ab", _unit_vectors(key, call), strict=True))
    )


def rwkv7_mul(arguments: type) -> tuple[Case, ...]:
    """Returns cases of `rwkv7_mul`."""

    def more(key: jax.Array, call: Call) -> dict[str, Any]:
        direction, other = _unit_vectors(key, call)
        return {"kk": direction, "a": jax.nn.sigmoid(other)}

    return _make_cases(arguments, _with_low_rank(), more)


def _with_low_rank() -> tuple[Call, ...]:
    fields = ("low_rank_write", "low_rank_read")
    return tuple(call if call.tags else dataclasses.replace(call, exercises=call.exercises + fields) for call in _CALLS)


def _unit_vectors(key: jax.Array, call: Call) -> list[jax.Array]:
    """Returns two arrays of vectors of length one, so that states do not grow."""
    vectors = (normal(k, (call.b, call.t, call.h, call.k)) for k in jax.random.split(key))
    return [(x / jnp.linalg.norm(x, axis=-1, keepdims=True)).astype(call.dtype) for x in vectors]


def _make_cases(arguments: type, calls: Iterable[Call], more: Any) -> tuple[Case, ...]:
    """Returns calls as cases, whose arguments that only this operation has are `more(key, call)`."""

    def make(call: Call, key: jax.Array) -> Any:
        keys = jax.random.split(key)
        return arguments(**_token_inputs(keys[0], call), **more(keys[1], call), **dict(call.options))

    return tuple(tagged(call.name, functools.partial(make, call), call.exercises, call.tags) for call in calls)


def _token_inputs(key: jax.Array, call: Call) -> dict[str, Any]:
    """Returns tokens, gates, states, lengths and slots of a call."""
    r, k, v, w, state = jax.random.split(key, 5)
    lead = (call.b, call.t)
    arrays: dict[str, Any] = {
        "r": normal(r, (*lead, call.h, call.k), call.dtype),
        "k": normal(k, (*lead, call.g, call.k), call.dtype),
        "v": normal(v, (*lead, call.g, call.v), call.dtype),
        "w": log_gate(w, (*lead, call.h, call.k)),
    }
    shape = (call.h, call.k, call.v)
    if call.form == "slots":  # one sequence has no slot, and one no tokens
        starts, indices = jnp.array([0, 1, 1, 4, 5], jnp.int32), jnp.array([5, 3, 3, -1], jnp.int32)
        slots = in_slots(state, (6, *shape), (5, 3))
        return arrays | {"initial_state": slots, "cu_seqlens": starts, "state_indices": indices}
    if call.form == "packed":
        arrays["cu_seqlens"] = bounds()
    if call.state:
        rows = call.b if call.form == "rows" else arrays["cu_seqlens"].shape[0] - 1
        arrays["initial_state"] = normal(state, (rows, *shape))
    return arrays


def make_inputs(args: Any, key: jax.Array) -> Any:
    """Returns concrete arguments of the given shapes, valid as a call: weak gates, short keys, even lengths."""
    return fill(args, key, functools.partial(_make_argument, args))


def _make_argument(args: Any, name: str, shape: Any, key: jax.Array) -> jax.Array:
    if name == "cu_seqlens":
        return even_bounds(args.r.shape[-3], shape)
    if name == "state_indices":
        return jnp.arange(shape.shape[0], dtype=shape.dtype)
    if name == "w":
        return -0.1 * jax.random.uniform(key, shape.shape).astype(shape.dtype)
    return normal_like(key, shape, 1.0 if name in ("r", "v", "initial_state") else shape.shape[-1] ** -0.5)
