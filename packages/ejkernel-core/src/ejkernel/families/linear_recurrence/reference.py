"""Defines what the chunked linear recurrence computes, in plain jnp.

Every head of every row (or packed sequence) carries a state S of shape [K, V]. For each token t, in order:

    y_t = S^T low_rank_read_t                                          with the low-rank term: read before decay
    S   = S * exp(decay_t)[:, None] * exp(value_decay_t)[None, :]      log-space gates
    S   = S + low_rank_write_t y_t^T                                   with the low-rank term
    u_t = dt_t * v_t                                                   without beta; dt is 1 if not given
    u_t = beta_t * (v_t - S^T k_t)                                     with beta (the delta rule)
    S   = S + k_t u_t^T
    o_t = softmax_scale * S^T q_t + skip * v_t                         read after write; skip is 0 if not given

So the order is: decay, write, read. A gate of -inf forgets. Tokens with a negative segment id, and tokens of no packed
sequence, leave the state alone and have output 0.

With `parents` the tokens of a row or sequence are a tree, and "the state" above is that after the token's parent: an
output depends on the token's ancestors alone.

Sources: Katharopoulos et al. 2020 (linear attention); Yang et al. 2023, arXiv:2312.06635 (gated linear attention);
Qin et al. 2024, arXiv:2401.04658 (constant decay); Dao & Gu 2024, arXiv:2405.21060 (state space duality);
Yang et al. 2024, arXiv:2412.06464 (gated delta rule); Kimi Team 2025, arXiv:2510.26692 (decay per channel in it);
Peng et al. 2025, arXiv:2503.14456 (diagonal plus low rank).
"""

import jax
import jax.numpy as jnp
from jax import lax

from ejkernel.families.linear_recurrence.record import (
    TOKEN_FIELDS,
    LinearRecurrence,
    accumulator,
    num_state_heads,
    real_and_segment_start_tokens,
    states,
    to_recorded_state_layout,
    with_plain_states,
)
from ejkernel.planning import packing, trees


def reference(record: LinearRecurrence) -> tuple[tuple[jax.Array, jax.Array], tuple[()]]:
    """Computes the result of the family, one token at a time; in float64 if `query` is float64, else in float32.

    Returns:
        Output [B, T, H, V] in the query's dtype and final states, [B, H, K, V] or [N, H, K, V], in the accumulator's;
        those of a record with slots are its slots, those of one with transposed states are transposed, and those of
        one with trees are the states after every token, [B, T, H, K, V], if it keeps them. There are no residuals.
    """
    original, record = record, with_plain_states(record)
    if record.parents is not None:
        return _reference_of_trees(original, record, record.parents)
    packed = record.cu_seqlens is not None

    def step(table: jax.Array, token: dict[str, jax.Array]) -> tuple[jax.Array, jax.Array]:
        old = table[token["row"]][None] if packed else table
        new, output = _token_step(old, token, record.softmax_scale)
        new = jnp.where(token["real"][:, None, None, None], new, old)
        return (table.at[token["row"]].set(new[0]) if packed else new), output

    final, outputs = lax.scan(step, states(record), _token_inputs(record))
    return (jnp.moveaxis(outputs, 0, 1).astype(record.query.dtype), to_recorded_state_layout(original, final)), ()


def _reference_of_trees(
    caller_record: LinearRecurrence, record: LinearRecurrence, parents: jax.Array
) -> tuple[tuple[jax.Array, jax.Array], tuple[()]]:
    """Returns outputs and final states of a record with trees; a step has one token of every row."""
    (rows, length), first = record.query.shape[:2], states(record)
    all_trees = trees.token_trees(parents, record.cu_seqlens)
    parent_tokens, owners = (x.reshape(rows, length) for x in (all_trees.parents, all_trees.requests))
    all_states = jnp.zeros((rows * length, *first.shape[1:]), first.dtype)

    def step(all_states: jax.Array, token: dict[str, jax.Array]) -> tuple[jax.Array, jax.Array]:
        root = (token["parent"] < 0)[:, None, None, None]
        old = jnp.where(root, first[jnp.maximum(token["owner"], 0)], all_states[jnp.maximum(token["parent"], 0)])
        new, output = _token_step(old, token, record.softmax_scale)
        new = jnp.where(token["real"][:, None, None, None], new, 0)
        return all_states.at[token["index"]].set(new), output

    index = jnp.arange(rows * length).reshape(rows, length)
    tokens = {name: x for name, x in _token_inputs(record).items() if name != "row"}
    tokens |= {"parent": parent_tokens.T, "owner": owners.T, "index": index.T}
    all_states, outputs = lax.scan(step, all_states, tokens)
    final = all_states.reshape(rows, length, *all_states.shape[1:]) if record.keeps_token_states else first
    read = jnp.moveaxis(outputs, 0, 1).astype(record.query.dtype)
    return (read, to_recorded_state_layout(caller_record, final)), ()


def _token_step(state: jax.Array, token: dict[str, jax.Array], scale: float) -> tuple[jax.Array, jax.Array]:
    """Returns one step: states [B, H, K, V] after it, and its output [B, H, V]."""
    highest = lax.Precision.HIGHEST
    state = jnp.where(token["starts_from_zero"][:, None, None, None], 0, state)
    before = state
    if "decay" in token:
        state = state * jnp.exp(token["decay"])[..., :, None]
    if "value_decay" in token:
        state = state * jnp.exp(token["value_decay"])[..., None, :]
    if "low_rank_read" in token and "low_rank_write" in token:
        known = jnp.einsum("bhkv,bhk->bhv", before, token["low_rank_read"], precision=highest)
        state = state + token["low_rank_write"][..., :, None] * known[..., None, :]
    write = token["value"] * token["dt"][..., None] if "dt" in token else token["value"]
    if "beta" in token:
        known = jnp.einsum("bhkv,bhk->bhv", state, token["key"], precision=highest)
        write = token["beta"][..., None] * (write - known)
    state = state + token["key"][..., :, None] * write[..., None, :]
    output = scale * jnp.einsum("bhkv,bhk->bhv", state, token["query"], precision=highest)
    if "skip" in token:
        output = output + token["skip"][..., None] * token["value"]
    return state, jnp.where(token["real"][:, None, None], output, 0)


def _token_inputs(record: LinearRecurrence) -> dict[str, jax.Array]:
    """Returns what each token brings, each [T, B, ...] with all heads."""
    (rows, length), heads, dtype = record.query.shape[:2], num_state_heads(record), accumulator(record)
    fields = {name: getattr(record, name) for name in TOKEN_FIELDS}
    tokens = {name: x.astype(dtype) for name, x in fields.items() if x is not None}
    tokens = {name: jnp.repeat(x, heads // x.shape[2], axis=2) for name, x in tokens.items()}
    tokens = {name: jnp.broadcast_to(x, (rows, length, *x.shape[2:])) for name, x in tokens.items()}
    real, starts_from_zero = jnp.ones((rows, length), bool), jnp.zeros((rows, length), bool)
    if record.segment_ids is not None:
        real, starts_from_zero = real_and_segment_start_tokens(record.segment_ids)
    tokens = {**tokens, "real": real, "starts_from_zero": starts_from_zero}
    if record.cu_seqlens is not None:
        ids, _ = packing.packed_ids(record.cu_seqlens, length)
        tokens |= {"real": real & (ids >= 0), "row": jnp.maximum(ids, 0)}
    tokens = {name: jnp.moveaxis(x, 1, 0) for name, x in tokens.items()}
    return tokens if record.cu_seqlens is None else {**tokens, "row": tokens["row"][:, 0]}
