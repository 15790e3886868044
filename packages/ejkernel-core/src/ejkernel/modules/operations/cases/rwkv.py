"""Inputs for the operations of RWKV-6 and RWKV-7: the named cases, and inputs of any given shapes."""

import dataclasses
import functools
from collections.abc import Iterable
from typing import Any

import jax
import jax.numpy as jnp

from ejkernel.modules.operations.cases.recurrence import log_gate, normal, packed_cu_seqlens, states_in_slots
from ejkernel.modules.operations.cases.tables import (
    ROW_FUNCTIONS_TAG,
    even_cu_seqlens,
    fill_arguments,
    normal_like,
    tagged_case,
)
from ejkernel.ops.model import Case


@dataclasses.dataclass(frozen=True, kw_only=True)
class CaseSpec:
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
        state_layout: `"rows"`, `"packed"` or `"slots"`.
        has_initial_state: Whether there are states before the first tokens.
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
    state_layout: str = "rows"
    has_initial_state: bool = False
    options: tuple[tuple[str, Any], ...] = ()


_RETURN_STATE = (("return_state", True),)
_PACKED_FIELDS = ("cu_seqlens", "sequence_state")
_CASE_SPECS = (
    CaseSpec(
        name="one token with a state", exercises=("initial_state",), tags=("awkward",), t=1, has_initial_state=True
    ),
    CaseSpec(
        name="grouped, states",
        exercises=("decay", "initial_state"),
        g=2,
        v=12,
        has_initial_state=True,
        options=_RETURN_STATE,
    ),
    CaseSpec(name="bfloat16", exercises=("decay",), dtype=jnp.bfloat16, v=6),
    CaseSpec(
        name="reversed",
        exercises=("initial_state",),
        t=9,
        k=6,
        has_initial_state=True,
        options=(("reverse", True), ("softmax_scale", 1.0)),
    ),
    CaseSpec(
        name="packed",
        exercises=_PACKED_FIELDS,
        b=1,
        state_layout="packed",
        has_initial_state=True,
        options=_RETURN_STATE,
    ),
    CaseSpec(
        name="slots", exercises=(*_PACKED_FIELDS, "state_slots"), b=1, t=6, state_layout="slots", options=_RETURN_STATE
    ),
    CaseSpec(name="model", tags=("bench",), b=1, t=4096, h=16, g=16, k=64, v=64),
    CaseSpec(name="small model", tags=("bench_cpu",), b=1, t=512, h=4, g=4, k=64, v=64),
    CaseSpec(
        name="long heads",
        tags=(ROW_FUNCTIONS_TAG,),
        b=3,
        t=9,
        h=2,
        g=2,
        k=64,
        v=16,
        has_initial_state=True,
        options=_RETURN_STATE,
    ),
)


def rwkv6_cases(record_type: type) -> tuple[Case, ...]:
    """Returns cases of `rwkv6_cases`."""
    return _make_cases(record_type, _CASE_SPECS, lambda key, call: {"u": normal(key, (call.h, call.k))})


def rwkv7_cases(record_type: type) -> tuple[Case, ...]:
    """Returns cases of `rwkv7_cases`."""
    return _make_cases(
        record_type,
        _case_specs_with_low_rank_fields(),
        lambda key, call: dict(zip("ab", _unit_vectors(key, call), strict=True)),
    )


def rwkv7_mul_cases(record_type: type) -> tuple[Case, ...]:
    """Returns cases of `rwkv7_mul_cases`."""

    def further_arguments(key: jax.Array, call: CaseSpec) -> dict[str, Any]:
        direction, other = _unit_vectors(key, call)
        return {"kk": direction, "a": jax.nn.sigmoid(other)}

    return _make_cases(record_type, _case_specs_with_low_rank_fields(), further_arguments)


def _case_specs_with_low_rank_fields() -> tuple[CaseSpec, ...]:
    fields = ("low_rank_write", "low_rank_read")
    return tuple(
        call if call.tags else dataclasses.replace(call, exercises=call.exercises + fields) for call in _CASE_SPECS
    )


def _unit_vectors(key: jax.Array, case_spec: CaseSpec) -> list[jax.Array]:
    """Returns two arrays of vectors of length one, so that states do not grow."""
    vectors = (normal(k, (case_spec.b, case_spec.t, case_spec.h, case_spec.k)) for k in jax.random.split(key))
    return [(x / jnp.linalg.norm(x, axis=-1, keepdims=True)).astype(case_spec.dtype) for x in vectors]


def _make_cases(record_type: type, case_specs: Iterable[CaseSpec], make_further_arguments: Any) -> tuple[Case, ...]:
    """Returns calls as cases, whose arguments that only this operation has are `further_arguments(key, call)`."""

    def make(call: CaseSpec, key: jax.Array) -> Any:
        keys = jax.random.split(key)
        return record_type(
            **_token_inputs(keys[0], call), **make_further_arguments(keys[1], call), **dict(call.options)
        )

    return tuple(
        tagged_case(call.name, functools.partial(make, call), call.exercises, call.tags) for call in case_specs
    )


def _token_inputs(key: jax.Array, case_spec: CaseSpec) -> dict[str, Any]:
    """Returns tokens, gates, states, lengths and slots of a call."""
    r, k, v, w, state = jax.random.split(key, 5)
    lead = (case_spec.b, case_spec.t)
    arrays: dict[str, Any] = {
        "r": normal(r, (*lead, case_spec.h, case_spec.k), case_spec.dtype),
        "k": normal(k, (*lead, case_spec.g, case_spec.k), case_spec.dtype),
        "v": normal(v, (*lead, case_spec.g, case_spec.v), case_spec.dtype),
        "w": log_gate(w, (*lead, case_spec.h, case_spec.k)),
    }
    shape = (case_spec.h, case_spec.k, case_spec.v)
    if case_spec.state_layout == "slots":  # one sequence has no slot, and one no tokens
        starts, indices = jnp.array([0, 1, 1, 4, 5], jnp.int32), jnp.array([5, 3, 3, -1], jnp.int32)
        slots = states_in_slots(state, (6, *shape), (5, 3))
        return arrays | {"initial_state": slots, "cu_seqlens": starts, "state_indices": indices}
    if case_spec.state_layout == "packed":
        arrays["cu_seqlens"] = packed_cu_seqlens()
    if case_spec.has_initial_state:
        rows = case_spec.b if case_spec.state_layout == "rows" else arrays["cu_seqlens"].shape[0] - 1
        arrays["initial_state"] = normal(state, (rows, *shape))
    return arrays


def make_inputs(args: Any, key: jax.Array) -> Any:
    """Returns concrete arguments of the given shapes, valid as a call: weak gates, short keys, even lengths."""
    return fill_arguments(args, key, functools.partial(_make_argument, args))


def _make_argument(args: Any, name: str, shape: Any, key: jax.Array) -> jax.Array:
    if name == "cu_seqlens":
        return even_cu_seqlens(args.r.shape[-3], shape)
    if name == "state_indices":
        return jnp.arange(shape.shape[0], dtype=shape.dtype)
    if name == "w":
        return -0.1 * jax.random.uniform(key, shape.shape).astype(shape.dtype)
    return normal_like(key, shape, 1.0 if name in ("r", "v", "initial_state") else shape.shape[-1] ** -0.5)
