"""The shared code of RWKV: checks of arguments, calls as plain recurrences, and the declaration."""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from ejkernel.families.linear_recurrence import LinearRecurrence
from ejkernel.modules.operations.cases.rwkv import make_inputs
from ejkernel.modules.operations.shared import plain_recurrence, recurrences
from ejkernel.modules.operations.shared.conditions import conditions_of_states
from ejkernel.modules.operations.shared.recurrences import check_floating, check_packing, check_states, rank
from ejkernel.modules.operations.shared.shapes import as_flag, as_number, check_cumulative_lengths
from ejkernel.ops.model import Case, Op


def canonicalise(args: Any) -> None:
    """Gives a record under construction its canonical values, and checks lengths while they can be seen."""
    scale = args.softmax_scale
    object.__setattr__(args, "softmax_scale", None if scale is None else as_number("softmax_scale", scale))
    for name in ("reverse", "return_state"):
        object.__setattr__(args, name, as_flag(name, getattr(args, name)))
    if args.cu_seqlens is not None and rank(args.r) in (3, 4):
        check_cumulative_lengths("cu_seqlens", args.cu_seqlens, 1, args.r.shape[-3])


class CanonicalCall:
    """Makes an argument record canonical, as its first base."""

    def __post_init__(self) -> None:
        canonicalise(self)


def check_tokens(args: Any, further_arguments: tuple[str, ...] = ()) -> dict[str, int]:
    """Checks the tokens, gates and states of a call, and returns the sizes of their axes.

    Args:
        args: Record with r, k, v, w, cu_seqlens, initial_state and state_indices.
        further_arguments: Further arguments of the shape of r.

    Raises:
        ValueError: One of them is wrong.
    """
    rows = "" if args.cu_seqlens is not None and rank(args.r) == 3 else "B "
    sizes = {"B": 1, **recurrences.check_tokens(args, rows, names=("r", "k", "v"))}
    for name in ("w", *further_arguments):
        if getattr(args, name) is None:
            raise ValueError(f"{name}: got None, wants [{', '.join(f'{rows}T H K'.split())}]")
        check_floating(name, getattr(args, name), f"{rows}T H K", sizes)
    if args.cu_seqlens is not None:
        check_packing(args.cu_seqlens, sizes)
    check_states(args, "H K V", sizes)
    return sizes


@dataclasses.dataclass(frozen=True, kw_only=True)
class RecurrentCall:
    """A call by the names that `plain_recurrence` reads, which are those of `recurrent_attention`."""

    query: jax.Array
    key: jax.Array
    value: jax.Array
    gk: jax.Array
    initial_state: jax.Array | None
    cu_seqlens: jax.Array | None
    state_indices: jax.Array | None
    softmax_scale: float | None
    reverse: bool
    return_state: bool
    g: None = None
    gv: None = None
    g_gamma: None = None
    seg_ids: None = None
    parents: None = None


def as_recurrent_call(args: Any) -> RecurrentCall:
    """Returns the call without what is special to RWKV: the same tokens, gates and states."""
    names = ("softmax_scale", "initial_state", "cu_seqlens", "state_indices", "reverse", "return_state")
    return RecurrentCall(
        query=args.r, key=args.k, value=args.v, gk=args.w, **{name: getattr(args, name) for name in names}
    )


def low_rank_record(args: Any, write_vectors: jax.Array, read_vectors: jax.Array) -> LinearRecurrence:
    """Returns the family's record of a call with a low-rank term, whose vectors have the shape of r."""
    record = plain_recurrence.lower(as_recurrent_call(args))
    write_vectors, read_vectors = (x.reshape(record.query.shape) for x in (write_vectors, read_vectors))
    if args.reverse:
        write_vectors, read_vectors = (jnp.flip(x, axis=1) for x in (write_vectors, read_vectors))
    return dataclasses.replace(record, low_rank_write=write_vectors, low_rank_read=read_vectors)


def finish(args: Any, output: tuple[jax.Array, jax.Array]) -> Any:
    """Returns the public result: in the caller's order of time and rank, with the states if asked for."""
    return plain_recurrence.finish(as_recurrent_call(args), output)


def declare_rwkv_recurrence(
    arguments: type,
    cases: Callable[[type], tuple[Case, ...]],
    *,
    validate: Callable[[Any], object],
    lower: Callable[[Any], LinearRecurrence],
    finish: Callable[[Any, Any], Any] = finish,
) -> Op:
    """Returns the declaration of a recurrence of RWKV, whose tokens are `r`; see `plain_recurrence.operation`."""
    return plain_recurrence.declare_recurrence(
        arguments,
        cases,
        validate=validate,
        lower=lower,
        finish=finish,
        conditions=conditions_of_states("r", -3),
        make_inputs=make_inputs,
    )
