"""Recurrences whose tokens are split over devices, out of the kernels for the tokens of one device.

Both passes have the same three steps:

    forward      summary of the shard  ->  all-gather, fold  ->  kernel with the state that enters
    backward     the same of the       ->  all-gather, fold  ->  backward kernel with the gradient of the
                 outputs' cotangent                              state that leaves

The kernel of each device gets the right state and the right gradient, and so returns the outputs and all gradients of
its tokens. A summary has to cost little next to the kernel, and no device can begin before it has those of others.
"""

import dataclasses
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.custom_derivatives import SymbolicZero

from ejkernel.planning import token_shards
from ejkernel.planning.token_shards import PackedBorders, TokenShards, Transitions
from ejkernel.promotion import with_standard_promotion
from ejkernel.types.arguments import array_fields
from ejkernel.types.residual_trees import ResidualTrees

TOKENS_PER_SUM = 128
"""Tokens that one `lax.cumsum` adds up."""

Results = tuple[jax.Array, jax.Array]
Run = Callable[[Any], Results]


class BorderTokens(NamedTuple):
    """The tokens of a shard that its borders concern.

    Attributes:
        leading: bool [B, T], the tokens that continue the state which enters the shard, if one does.
        trailing: bool [B, T], the tokens of the sequence or segment that goes on after the shard.
        spans_shard: bool [B], whether these are the same sequence or segment, which then spans the shard.
        ends: [B, 2] int32, the ids of the first and the last real token; -1 without one. None without segment ids.
        packed: The packed sequences at the borders; None of rows.
    """

    leading: jax.Array
    trailing: jax.Array
    spans_shard: jax.Array
    ends: jax.Array | None = None
    packed: PackedBorders | None = None


def packed_border_tokens(packed: PackedBorders, shards: TokenShards) -> BorderTokens:
    """Returns the tokens of packed sequences that the borders of this device's shard concern."""
    entered = packed.enters[shards.index()]
    spans_shard = entered & packed.passes & (packed.entering_sequence == packed.run)
    leading, running = (packed.ids == packed.entering_sequence) & entered, (packed.ids == packed.run) & packed.passes
    return BorderTokens(leading, running, spans_shard[None], packed=packed)


class ShardSummary(NamedTuple):
    """The summary of a shard.

    Attributes:
        factor: [B, ...], the factor of the trailing tokens on the state before them; that on the state that enters, if
            that state spans the shard.
        added: [B, ...], the state that leaves where zeros enter.
    """

    factor: jax.Array
    added: jax.Array


@dataclasses.dataclass(frozen=True, kw_only=True)
class SplitRecurrence:
    """The functions of a family of recurrences.

    Attributes:
        borders: (Record, shards) -> `BorderTokens`.
        enters: (`BorderTokens.ends` of all shards, [P, B, 2]) -> bool [P, B], whether a segment crosses the border
            before each shard; None if no record has segment ids.
        summary: (`run`, record, borders) -> `ShardSummary`.
        gradient: (`run`, record, borders, cotangent of the outputs, that of the state after the leading tokens or None)
            -> the gradient of the state that enters, for which that of the state that leaves is zeros.
        matrices: Record -> whether the factors of summaries are matrices.
        states: Record -> the initial states, in the accumulator's dtype: [B, ...], or [N, ...] of packed sequences.
        name: Record -> the name of their field.
    """

    borders: Callable[[Any, TokenShards], BorderTokens]
    summary: Callable[[Run, Any, BorderTokens], ShardSummary]
    gradient: Callable[[Run, Any, BorderTokens, jax.Array, jax.Array | None], jax.Array]
    matrices: Callable[[Any], bool]
    states: Callable[[Any], jax.Array]
    name: Callable[[Any], str]
    enters: Callable[[jax.Array], jax.Array] | None = None


class _ForwardExchange(NamedTuple):
    """What a device knows after the exchange of the forward pass.

    Attributes:
        record: The record as its kernel gets it.
        borders: Those of its shard.
        transitions: Those of all shards.
        entering: [B, ...], the state that enters its shard.
        final: [B, ...], the state that leaves the last shard.
    """

    record: Any
    borders: BorderTokens
    transitions: Transitions
    entering: jax.Array
    final: jax.Array


def run_on_token_shard(
    rule: SplitRecurrence, run: Run, record: Any, shards: TokenShards
) -> tuple[jax.Array, jax.Array]:
    """Returns the outputs of a device's tokens and the final states of all rows or packed sequences.

    Args:
        rule: The family's functions.
        run: Computes a record of one device, and can be differentiated.
        record: The record of this device's tokens, with plain states, and `cu_seqlens` of the whole row.
        shards: How tokens are split.
    """

    @jax.custom_vjp
    def call(record: Any) -> tuple[jax.Array, jax.Array]:
        exchanged = _exchange_states(rule, run, record, shards)
        read, final = run(exchanged.record)
        return read, _final_states_of_call(shards, exchanged, final)

    def forward(marked: Any) -> tuple[Any, Any]:
        record = jax.tree.map(lambda x: x.value, marked, is_leaf=_has_perturbed_mark)
        exchanged = _exchange_states(rule, run, record, shards)
        main = exchanged.record
        fields = {name: getattr(main, name) for name in _differentiated_fields(rule, marked, exchanged.borders)}
        (read, final), pull = jax.vjp(lambda fields: run(dataclasses.replace(main, **fields)), fields)
        final = _final_states_of_call(shards, exchanged, final)
        return (read, final), trees.pack((record, exchanged, pull))

    def backward(packed: list[jax.Array], cotangent: Any) -> tuple[Any]:
        return _backward(rule, run, shards, trees.unpack(packed), cotangent)

    trees = ResidualTrees()
    call.defvjp(with_standard_promotion(forward), with_standard_promotion(backward), symbolic_zeros=True)
    return call(record)


def states_of_rows(
    run: Run,
    record: Any,
    output_cotangent: jax.Array | None = None,
    final_states_cotangent: jax.Array | None = None,
) -> jax.Array | None:
    """Returns the states after rows, or the gradient of the states before them, as `Implementation.row_states` says.

    Args:
        run: Computes a record of one device.
        record: Rows that are not packed.
        output_cotangent: Cotangent of their outputs, for the gradient; None for the states.
        final_states_cotangent: Cotangent of the states after them; None for zeros.

    Returns:
        The states, or None if no kernel computes them without outputs.
    """
    row_states = getattr(run, "row_states", None)
    return None if row_states is None else row_states(record, output_cotangent, final_states_cotangent)


def with_initial_states(rule: SplitRecurrence, record: Any, states: jax.Array | None = None) -> Any:
    """Returns a device's record as its kernel gets it: with initial states, zeros where none are given."""
    states = rule.states(record) if states is None else states
    return dataclasses.replace(record, **{rule.name(record): states})


def _exchange_states(rule: SplitRecurrence, run: Run, record: Any, shards: TokenShards) -> _ForwardExchange:
    """Returns the record of this device's kernel, with the states that enter its shard."""
    matrices, borders = rule.matrices(record), rule.borders(record, shards)
    packed = borders.packed
    if packed is not None:
        record = dataclasses.replace(record, cu_seqlens=packed.cu_seqlens)
    states = rule.states(record)
    if packed is not None and getattr(record, rule.name(record)) is not None:
        states = jnp.where(
            _is_entering_sequence(packed, shards, states), 0, states
        )  # it was the state before an earlier shard
        record = with_initial_states(rule, record, states)
    summary = rule.summary(run, record, borders)
    factors, added = shards.gather((summary.factor, summary.added))
    if packed is not None:
        spans_shard, enters = shards.gather(borders.spans_shard), packed.enters[:, None]
    elif rule.enters is not None and borders.ends is not None:
        spans_shard, ends = shards.gather((borders.spans_shard, borders.ends))
        enters = rule.enters(ends)
    else:  # rows span all shards
        spans_shard = enters = jnp.ones(factors.shape[:2], bool)
    first = states if packed is None else jnp.zeros_like(summary.added)
    transitions = Transitions(factors, spans_shard, enters)
    entering, final = token_shards.carried_states(transitions, added, first, matrices)
    entering = entering[shards.index()]
    begin = entering if packed is None else jnp.where(_is_entering_sequence(packed, shards, states), entering, states)
    return _ForwardExchange(with_initial_states(rule, record, begin), borders, transitions, entering, final)


def _final_states_of_call(shards: TokenShards, exchanged: _ForwardExchange, final: jax.Array) -> jax.Array:
    """Returns the final states of the whole call, from those of this device's kernel."""
    packed = exchanged.borders.packed
    if packed is None:
        return exchanged.final
    return shards.sum(jnp.where(token_shards.broadcast_flags(packed.ends, final), final, 0))


def _backward(rule: SplitRecurrence, run: Run, shards: TokenShards, saved: Any, cotangent: Any) -> tuple[Any]:
    """Returns the gradients of a device's record, from those of its outputs and of the final states of the call."""
    record, exchanged, pull = saved
    output_cotangent, final_states_cotangent = cotangent
    if isinstance(output_cotangent, SymbolicZero):
        read: Any = output_cotangent.aval
        output_cotangent = jnp.zeros(read.shape, read.dtype)
    # Every device returned the same final states; `shard_map` divides their cotangent among the devices.
    final_states_cotangent = (
        None if isinstance(final_states_cotangent, SymbolicZero) else shards.sum(final_states_cotangent)
    )
    leaving, first = _exchange_gradients(rule, run, shards, exchanged, output_cotangent, final_states_cotangent)
    (gradients,) = pull((output_cotangent, leaving))
    name, packed = rule.name(record), exchanged.borders.packed
    if getattr(record, name) is not None and packed is None:
        gradients[name] = jnp.where(shards.index() == 0, first, 0).astype(getattr(record, name).dtype)
    elif name in gradients and packed is not None:
        states = gradients[name]
        gradients[name] = jnp.where(_is_entering_sequence(packed, shards, states), 0, states).astype(
            getattr(record, name).dtype
        )
    return (dataclasses.replace(record, **{field: gradients.get(field) for field in array_fields(record)}),)


def _exchange_gradients(
    rule: SplitRecurrence,
    run: Run,
    shards: TokenShards,
    exchanged: _ForwardExchange,
    output_cotangent: jax.Array,
    final_states_cotangent: jax.Array | None,
) -> tuple[jax.Array, jax.Array]:
    """Returns the gradients of the final states of this device's kernel, and of the state that enters the first shard.

    Args:
        rule: The family's functions.
        run: Computes a record of one device.
        shards: How tokens are split.
        exchanged: What the forward pass left.
        output_cotangent: Cotangent of this device's outputs.
        final_states_cotangent: Cotangent of the final states of the call; None for zeros.
    """
    record, packed = exchanged.record, exchanged.borders.packed
    ends, ended = None, None
    if packed is not None and final_states_cotangent is not None:
        ends = jnp.where(token_shards.broadcast_flags(packed.ends, final_states_cotangent), final_states_cotangent, 0)
        # Where the sequence that enters also ends here, its final state depends on the state that enters.
        ended = ends[packed.entering_sequence][None]
    added = rule.gradient(run, record, exchanged.borders, output_cotangent, ended)
    last = jnp.zeros_like(added) if packed is not None or final_states_cotangent is None else final_states_cotangent
    leaving, first = token_shards.carried_gradients(
        exchanged.transitions, shards.gather(added), last, rule.matrices(record)
    )
    leaving = leaving[shards.index()]
    if packed is not None:
        states = rule.states(record)
        leaving = jnp.where(_one_hot(packed.run, states) & packed.passes, leaving, 0)
        leaving = leaving if ends is None else leaving + ends
    return leaving, first


def _is_entering_sequence(packed: PackedBorders, shards: TokenShards, states: jax.Array) -> jax.Array:
    """Returns which of the states [N, ...] is that of the sequence that enters a shard, as bool [N, 1, ...]."""
    return _one_hot(packed.entering_sequence, states) & packed.enters[shards.index()]


def _one_hot(index: jax.Array, states: jax.Array) -> jax.Array:
    return token_shards.broadcast_flags(jnp.arange(states.shape[0]) == index, states)


def _differentiated_fields(rule: SplitRecurrence, marked: Any, borders: BorderTokens) -> list[str]:
    """Returns the fields that the kernel is differentiated with respect to. The gradient of the state that enters the
    shards of rows comes with the exchange.
    """
    marks = jax.tree.map(
        lambda x: x.perturbed and jnp.issubdtype(x.value.dtype, jnp.inexact), marked, is_leaf=_has_perturbed_mark
    )
    names = [name for name, perturbed in array_fields(marks).items() if perturbed]
    return [name for name in names if borders.packed is not None or name != rule.name(marked)]


def _has_perturbed_mark(value: Any) -> bool:
    return hasattr(value, "perturbed")


def cumulative_sums(x: jax.Array, *, reverse: bool = False) -> jax.Array:
    """Returns the cumulative sums along the tokens of [B, T, ...], in pieces.

    On a GPU `lax.cumsum` adds up a window for each token, so its work grows with the square of the axis: a forward pass
    of `gated_linear_attention` over 65,536 tokens a device took 2.5 s on an H200.
    """
    tokens = x.shape[1]
    if tokens <= TOKENS_PER_SUM:
        return lax.cumsum(x, axis=1, reverse=reverse)
    x = jnp.pad(x, ((0, 0), (0, -tokens % TOKENS_PER_SUM), *((0, 0) for _ in x.shape[2:])))
    pieces = x.reshape(x.shape[0], -1, TOKENS_PER_SUM, *x.shape[2:])
    # The sums of other pieces are shifted, not differences: those of infinite gates would be NaN.
    others = jnp.sum(pieces, axis=2)
    others = jnp.roll(others, -1 if reverse else 1, axis=1).at[:, -1 if reverse else 0].set(0)
    sums = lax.cumsum(pieces, axis=2, reverse=reverse) + cumulative_sums(others, reverse=reverse)[:, :, None]
    return sums.reshape(x.shape)[:, :tokens]
