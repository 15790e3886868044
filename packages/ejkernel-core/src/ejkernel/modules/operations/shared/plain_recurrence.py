"""The argument record, the checks, the lowering and the declaration of the recurrences without a delta rule.

`recurrent_attention` is all of it; `gated_linear_attention` and `lightning_attention` give some of its gates.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from ejkernel.families.linear_recurrence import FAMILY, LinearRecurrence
from ejkernel.modules.operations.cases.recurrence import make_inputs
from ejkernel.modules.operations.shared.conditions import conditions_of_states, conditions_of_trees
from ejkernel.modules.operations.shared.recurrences import (
    TOLERANCE,
    check_and_canonicalise_packing,
    check_floating,
    check_log_gate,
    check_packing,
    check_parents_shape_and_dtype,
    check_segments,
    check_states,
    check_tokens,
    rank,
    to_float32_or_wider,
    tree_fields,
)
from ejkernel.modules.operations.shared.shapes import as_flag, as_number
from ejkernel.ops.model import Case, Op
from ejkernel.types.integers import exact_ids

STATE_AXES = {"initial_state": "b h k v", "cu_seqlens": "n"}
"""Axis letters of states and of the bounds of sequences."""


def canonicalise(args: Any) -> None:
    """Gives a record under construction its canonical values, and checks lengths while they can be seen."""
    scale = args.softmax_scale
    object.__setattr__(args, "softmax_scale", None if scale is None else as_number("softmax_scale", scale))
    for name in ("reverse", "return_state"):
        object.__setattr__(args, name, as_flag(name, getattr(args, name)))
    check_and_canonicalise_packing(args)


class CanonicalCall:
    """Makes an argument record canonical, as its first base."""

    def __post_init__(self) -> None:
        canonicalise(self)


def validate(args: Any) -> None:
    """Raises ValueError for arrays that are wrong on every backend; the record has checked the rest."""
    rows = "" if _has_no_row_axis(args) else "B "
    sizes = {"B": 1, **check_tokens(args, rows)}
    heads = f"{rows}T H"
    check_log_gate("g", args.g, heads, sizes)
    check_floating("gk", args.gk, f"{heads} K", sizes)
    check_floating("gv", args.gv, f"{heads} V", sizes)
    check_floating("g_gamma", args.g_gamma, "B H" if rank(args.g_gamma) == 2 else "H", sizes, broadcast="B")
    if args.cu_seqlens is not None:
        check_packing(args.cu_seqlens, sizes)
    check_segments(args, sizes)
    check_states(args, "H K V", sizes)
    check_parents_shape_and_dtype(args, sizes, f"{rows}T")
    if args.reverse and args.parents is not None:
        raise ValueError("parents: got a value with reverse=True, wants one of the two")


def lower(args: Any) -> LinearRecurrence:
    """Returns the family's record of a call, with gates added up and tokens in forward order."""
    names = ("query", "key", "value", "g", "gk", "gv", "parents")
    tokens: dict[str, Any] = {name: getattr(args, name) for name in names}
    tokens = {name: x if x is None else _with_row_axis(x, args) for name, x in tokens.items()}
    state, bounds, slots = args.initial_state, args.cu_seqlens, args.state_indices
    ids = None if args.seg_ids is None else exact_ids("seg_ids", args.seg_ids)
    if args.reverse:
        tokens = {name: x if x is None else jnp.flip(x, axis=1) for name, x in tokens.items()}
        ids = None if ids is None else jnp.flip(ids, axis=1)
        if bounds is not None:
            bounds = tokens["query"].shape[1] - jnp.flip(bounds)
            slots = None if slots is None else jnp.flip(slots)
            state = state if state is None or slots is not None else jnp.flip(state, axis=0)
    return LinearRecurrence(
        query=tokens["query"],
        key=tokens["key"],
        value=tokens["value"],
        softmax_scale=args.query.shape[-1] ** -0.5 if args.softmax_scale is None else args.softmax_scale,
        decay=_decay_of_key_channels(tokens["g"], args.g_gamma, tokens["gk"]),
        value_decay=tokens["gv"],
        initial_state=state if bounds is None else None,
        cu_seqlens=bounds,
        sequence_state=None if bounds is None else state,
        segment_ids=ids,
        state_slots=slots,
        **tree_fields(args, args.return_state) | ({} if tokens["parents"] is None else {"parents": tokens["parents"]}),
    )


def finish(args: Any, output: tuple[jax.Array, jax.Array]) -> Any:
    """Returns the public result: in the caller's order of time and rank, with the states if asked for."""
    read, state = output
    if args.reverse:
        read = jnp.flip(read, axis=1)
        by_sequence = args.cu_seqlens is not None and args.state_indices is None
        state = jnp.flip(state, axis=0) if by_sequence else state
    if _has_no_row_axis(args):
        read, state = read[0], state[0] if args.return_state and args.parents is not None else state
    return (read, state) if args.return_state else read


def declare_recurrence(
    arguments: type,
    cases: Callable[[type], tuple[Case, ...]],
    *,
    validate: Callable[[Any], object] = validate,
    lower: Callable[[Any], LinearRecurrence] = lower,
    finish: Callable[[Any, Any], Any] = finish,
    **others: Any,
) -> Op:
    """Returns the declaration of a recurrence.

    Args:
        arguments: Its argument record.
        cases: Argument record -> cases.
        validate: As `Op.validate`.
        lower: As `Op.lower`.
        finish: As `Op.finish`.
        **others: Further fields of `Op`.
    """
    conditions = conditions_of_trees(conditions_of_states("query", -3))
    fields: dict[str, Any] = {"conditions": conditions, "make_inputs": make_inputs, **others}
    return Op(
        arguments=arguments,
        family=FAMILY,
        validate=validate,
        lower=lower,
        finish=finish,
        cases=cases(arguments),
        tolerance=TOLERANCE,
        **fields,
    )


def _has_no_row_axis(args: Any) -> bool:
    """Returns whether packed tokens came without a row axis."""
    return args.cu_seqlens is not None and rank(args.query) == 3


def _with_row_axis(x: jax.Array, args: Any) -> jax.Array:
    return x[None] if _has_no_row_axis(args) else x


def _decay_of_key_channels(g: jax.Array | None, g_gamma: jax.Array | None, gk: jax.Array | None) -> jax.Array | None:
    """Returns the sum of the gates of the keys' channels, [B|1, T|1, H, K|1]; None if there are none."""
    terms = []
    if g_gamma is not None:
        terms.append((g_gamma[None] if g_gamma.ndim == 1 else g_gamma)[:, None, :, None])
    if g is not None:
        terms.append(g if g.ndim == 4 else g[..., None])
    if gk is not None:
        terms.append(gk)
    total = None
    for term in terms:
        total = term if total is None else to_float32_or_wider(total) + to_float32_or_wider(term)
    return total
