"""The summaries of a shard of tokens whose factors on a state are matrices, or whose channels have gates of their own.

The kernel computes them, of pieces of tokens as rows of one call. With a delta rule or a low-rank term:

    state before a piece    | zeros [K, V] | identity [K, K] |
    values of its tokens    | values [V]   | zeros [K]       |
    state after it          | what it adds | its factor      |

The pieces at the border of a shard come first. Gates of most layers forget within them, and then no other tokens matter
to the state that crosses the border, or to its gradient. No branch scans pieces one after the other, so that XLA can
decide within a CUDA graph.
"""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from ejkernel.arithmetic import cdiv
from ejkernel.families.linear_recurrence.record import (
    TOKEN_FIELDS,
    LinearRecurrence,
    accumulator,
    has_matrix_transition,
    num_state_heads,
    states,
)
from ejkernel.families.split_recurrence import Run, states_of_rows
from ejkernel.planning.token_shards import apply_factor, broadcast_flags

TOKENS_PER_PIECE = 2048
"""The most tokens of a piece."""

PIECES_AT_BORDER = 2
"""The pieces that are tried as the summary of a shard."""

FactorAndState = tuple[jax.Array, jax.Array]
"""The factor of tokens on the state before them, and the state that they add; or the same of gradients."""


def summary_of_pieces(run: Run, record: LinearRecurrence, trailing: jax.Array) -> FactorAndState:
    """Returns the factor [B, H, K, K] of the trailing tokens, or of gates alone [B, H, K|1, V|1], and the state
    [B, H, K, V] that they add.
    """
    tokens, near = record.query.shape[1], PIECES_AT_BORDER * TOKENS_PER_PIECE
    of_pieces = _factor_and_state if has_matrix_transition(record) else _gated_factor_and_state

    def summarise(first: int) -> FactorAndState:
        return of_pieces(run, slice_tokens(record, first, tokens, trailing))

    if tokens <= near:
        return summarise(0)
    continues = jnp.any(trailing[:, :-near], axis=1)
    return _near_if_forgotten(summarise(tokens - near), continues, lambda: summarise(0))


def gradient_of_pieces(
    run: Run,
    record: LinearRecurrence,
    leading: jax.Array,
    output_cotangent: jax.Array,
    ended_state_cotangent: jax.Array | None,
) -> FactorAndState:
    """Returns the transposed factor of the leading tokens, and the gradient [B, H, K, V] of the state before them,
    where that of the state after them is zeros. The factor is zeros if the gradient already has what it gives.
    """
    tokens, near = record.query.shape[1], PIECES_AT_BORDER * TOKENS_PER_PIECE
    cotangent = jnp.where(leading[..., None, None], output_cotangent, 0)
    of_pieces = _factor_and_gradient_by_columns if has_matrix_transition(record) else _gated_factor_and_gradient

    def summarise(end: int) -> FactorAndState | None:
        return of_pieces(run, slice_tokens(record, 0, end, leading), cotangent[:, :end])

    def scan_all() -> FactorAndState:
        whole = slice_tokens(record, 0, tokens, leading)
        gradient = _initial_state_gradient(run, whole, cotangent, ended_state_cotangent)
        channels = gradient.shape[2]
        return jnp.zeros((*gradient.shape[:2], channels, channels), gradient.dtype), gradient

    found = summarise(min(tokens, near))
    if tokens <= near:
        return scan_all() if found is None else found
    continues = jnp.any(leading[:, near:], axis=1)
    if found is None:
        found = _factor_and_gradient_by_rows(run, slice_tokens(record, 0, near, leading), cotangent[:, :near])
        return _near_if_forgotten(found, continues, scan_all)
    return _near_if_forgotten(found, continues, lambda: summarise(tokens) or scan_all())


def _near_if_forgotten(
    near: FactorAndState, continues: jax.Array, summarise_all: Callable[[], FactorAndState]
) -> FactorAndState:
    """Returns what tokens at a border give if nothing is left of a state after them, else what all tokens do.

    Args:
        near: What the tokens at the border give.
        continues: bool [B], whether tokens past them belong to the same sequence.
        summarise_all: Returns what all tokens give.
    """
    factor, state = near
    return lax.cond(is_forgotten(factor, continues), lambda: (zeros_where(continues, factor), state), summarise_all)


def _factor_and_state(run: Run, record: LinearRecurrence) -> FactorAndState:
    """Returns the factor of all tokens of a record of rows, and the state that they add."""
    rows, pieces = record.query.shape[0], cdiv(record.query.shape[1], TOKENS_PER_PIECE)
    split = _with_columns_of_factor(_split_into_pieces(record, pieces))
    begin = jnp.broadcast_to(_identity_columns(record), states(split).shape)
    final = run(dataclasses.replace(split, initial_state=begin))[1].astype(begin.dtype)
    return _join_pieces(final.reshape(rows, pieces, *final.shape[1:]), record.value.shape[3])


def _with_columns_of_factor(record: LinearRecurrence) -> LinearRecurrence:
    """Returns a record with K more value channels, to which its tokens write zeros. Value channels have no gates here:
    no record with a matrix as its factor has them.
    """
    value = jnp.pad(record.value, ((0, 0), (0, 0), (0, 0), (0, record.query.shape[3])))
    return dataclasses.replace(record, value=value)


def _identity_columns(record: LinearRecurrence) -> jax.Array:
    """Returns a state [K, V + K] of zeros, then the identity."""
    return jnp.pad(jnp.eye(record.query.shape[3], dtype=accumulator(record)), ((0, 0), (record.value.shape[3], 0)))


def _join_pieces(final: jax.Array, columns: int, *, reverse: bool = False) -> FactorAndState:
    """Returns the factor and the state of all pieces, from those of each: of pairs, then of pairs of pairs.

    Args:
        final: [B, pieces, H, K, V + K], what each piece adds to a state, and its factor.
        columns: V.
        reverse: Whether pieces follow each other from the last one to the first.
    """
    final = jnp.flip(final, 1) if reverse else final
    while final.shape[1] > 1:
        pairs = final.shape[1] // 2
        earlier, later, left = final[:, : 2 * pairs : 2], final[:, 1 : 2 * pairs : 2], final[:, 2 * pairs :]
        product = apply_factor(later[..., columns:], earlier, matrices=True)
        final = jnp.concatenate([product.at[..., :columns].add(later[..., :columns]), left], axis=1)
    return final[:, 0, ..., columns:], final[:, 0, ..., :columns]


def _factor_and_gradient_by_columns(
    run: Run, record: LinearRecurrence, output_cotangent: jax.Array
) -> FactorAndState | None:
    """Returns the transposed factor of all tokens of a record of rows, and the gradient of the state before them; None
    if no kernel computes it with more columns.
    """
    (rows, tokens, _, columns), channels = output_cotangent.shape, record.query.shape[3]
    pieces = cdiv(tokens, TOKENS_PER_PIECE)
    split = _with_columns_of_factor(_split_into_pieces(record, pieces))
    cotangent = jnp.pad(_split_axis_into_pieces(output_cotangent, pieces), ((0, 0), (0, 0), (0, 0), (0, channels)))
    final = jnp.broadcast_to(_identity_columns(record), states(split).shape)
    found = states_of_rows(run, split, cotangent, final)
    if found is None:
        return None
    return _join_pieces(found.reshape(rows, pieces, *found.shape[1:]), columns, reverse=True)


def _factor_and_gradient_by_rows(run: Run, record: LinearRecurrence, output_cotangent: jax.Array) -> FactorAndState:
    """Returns the same by gradients of the kernel, with as many columns as it has. Each piece is a row with the
    cotangent of its outputs, and rows without one, of which the gradient of the state after them is V columns of the
    identity.
    """
    (rows, tokens, heads, columns), channels = output_cotangent.shape, record.query.shape[3]
    pieces, blocks = cdiv(tokens, TOKENS_PER_PIECE), cdiv(channels, columns)
    split = _split_into_pieces(record, pieces)
    copies = {name: jnp.tile(x, (1 + blocks, 1, 1, 1)[: x.ndim]) for name, x in _fields_of_tokens(split).items()}
    repeated = dataclasses.replace(split, **copies)
    cotangent = _split_axis_into_pieces(output_cotangent, pieces)
    cotangent = jnp.pad(cotangent, ((0, blocks * rows * pieces), (0, 0), (0, 0), (0, 0)))
    identity = jnp.eye(channels, blocks * columns, dtype=accumulator(record)).reshape(channels, blocks, columns)
    identity = jnp.pad(identity, ((0, 0), (1, 0), (0, 0))).swapaxes(0, 1)[:, None, None]
    final = jnp.broadcast_to(identity, (1 + blocks, rows * pieces, heads, channels, columns))
    found = _initial_state_gradient(run, repeated, cotangent, final.reshape(-1, heads, channels, columns))
    found = found.reshape(1 + blocks, rows, pieces, heads, channels, columns)
    found = jnp.moveaxis(found, 0, 4).reshape(rows, pieces, heads, channels, (1 + blocks) * columns)
    return _join_pieces(found[..., : columns + channels], columns, reverse=True)


def _gated_factor_and_state(run: Run, record: LinearRecurrence) -> FactorAndState:
    """Returns the factor of all tokens of a record of rows with gates alone, and the state that they add."""
    split = _split_into_pieces(record, cdiv(record.query.shape[1], TOKENS_PER_PIECE))
    return _join_gated_pieces(record, split, run(split)[1])


def _gated_factor_and_gradient(run: Run, record: LinearRecurrence, output_cotangent: jax.Array) -> FactorAndState:
    """Returns the same of the gradient of the state before them."""
    pieces = cdiv(record.query.shape[1], TOKENS_PER_PIECE)
    split = _split_into_pieces(record, pieces)
    gradient = _initial_state_gradient(run, split, _split_axis_into_pieces(output_cotangent, pieces), None)
    return _join_gated_pieces(record, split, gradient, reverse=True)


def _join_gated_pieces(
    record: LinearRecurrence, split: LinearRecurrence, added: jax.Array, *, reverse: bool = False
) -> FactorAndState:
    """Returns the factor and the state of all pieces, each state times the gates of the pieces that follow it."""
    rows, pieces = record.query.shape[0], cdiv(record.query.shape[1], TOKENS_PER_PIECE)
    decay, added = log_decay(split), added.astype(accumulator(record))
    decay, added = (x.reshape(rows, pieces, *x.shape[1:]) for x in (decay, added))
    shifted = jnp.roll(decay, 1 if reverse else -1, axis=1).at[:, 0 if reverse else -1].set(0)
    following = lax.cumsum(shifted, axis=1, reverse=not reverse)
    return jnp.exp(jnp.sum(decay, axis=1)), jnp.sum(added * jnp.exp(following), axis=1)


def log_decay(record: LinearRecurrence) -> jax.Array:
    """Returns the sum of the log gates of all tokens, [B, H, K|1, V|1]; zeros without gates."""
    shape = (record.query.shape[0], num_state_heads(record), 1, 1)
    total = jnp.zeros(shape, accumulator(record))
    if record.decay is not None:
        total = total + jnp.sum(record.decay.astype(total.dtype), axis=1)[..., None]
    if record.value_decay is not None:
        total = total + jnp.sum(record.value_decay.astype(total.dtype), axis=1)[..., None, :]
    return total


def _initial_state_gradient(
    run: Run, record: LinearRecurrence, output_cotangent: jax.Array, final_cotangent: jax.Array | None
) -> jax.Array:
    """Returns the gradient of the states before the rows of a record."""
    begin = jnp.zeros_like(states(record))

    def results_from(begin: jax.Array) -> tuple[jax.Array, jax.Array]:
        return run(dataclasses.replace(record, initial_state=begin))

    (read, final), pull = jax.vjp(results_from, begin)
    final_cotangent = jnp.zeros_like(final) if final_cotangent is None else final_cotangent.astype(final.dtype)
    return pull((output_cotangent.astype(read.dtype), final_cotangent))[0]


def is_forgotten(factor: jax.Array, continues: jax.Array) -> jax.Array:
    """Returns whether the tokens past those of a factor [B, ...] do not matter, bool.

    Args:
        factor: The factor of tokens at a border.
        continues: bool [B], whether tokens past them belong to the same sequence.
    """
    largest = jnp.max(jnp.abs(factor), axis=tuple(range(1, factor.ndim)))  # NaN is not forgotten
    return jnp.all((largest < jnp.finfo(factor.dtype).tiny) | ~continues)


def zeros_where(condition: jax.Array, factor: jax.Array) -> jax.Array:
    """Returns a factor [B, ...], and zeros for rows for which a condition holds."""
    return jnp.where(broadcast_flags(condition, factor), 0, factor)


def _fields_of_tokens(record: LinearRecurrence) -> dict[str, jax.Array]:
    """Returns the arrays of a record that have an entry for every token, by name."""
    fields = {name: getattr(record, name) for name in TOKEN_FIELDS if name != "skip"}
    return {name: x for name, x in fields.items() if x is not None}


def slice_tokens(record: LinearRecurrence, first: int, end: int, chosen: jax.Array) -> LinearRecurrence:
    """Returns a record of rows with the tokens from `first` to `end`, zeros if not chosen: these change no state."""
    chosen = chosen[:, first:end]

    def slice_field(x: jax.Array) -> jax.Array:
        x = x if x.shape[1] == 1 else x[:, first:end]
        return jnp.where(chosen.reshape(*chosen.shape, *(1,) * (x.ndim - 2)), x, 0)

    sliced: dict[str, Any] = {name: slice_field(x) for name, x in _fields_of_tokens(record).items()}
    no_sequences = dict.fromkeys(("skip", "initial_state", "cu_seqlens", "sequence_state", "segment_ids"))
    return dataclasses.replace(record, **sliced, **no_sequences)


def _split_into_pieces(record: LinearRecurrence, pieces: int) -> LinearRecurrence:
    """Returns a record whose rows are the pieces of a record's rows."""
    split: dict[str, Any] = {name: _split_axis_into_pieces(x, pieces) for name, x in _fields_of_tokens(record).items()}
    return dataclasses.replace(record, **split)


def _split_axis_into_pieces(x: jax.Array, pieces: int) -> jax.Array:
    """Returns the tokens of [B, T, ...] as [B * pieces, tokens of a piece, ...], filled up with zeros."""
    x = jnp.pad(x, ((0, 0), (0, -x.shape[1] % pieces), *((0, 0) for _ in x.shape[2:])))
    return x.reshape(-1, x.shape[1] // pieces, *x.shape[2:])
