"""The causal convolution with its tokens split over devices: each shard continues the last tokens of those before it.

The devices exchange their last W - 1 tokens, or all of shorter shards; one after the other, after those of the initial
state, these hold the tokens before each shard:

    tokens      | shard 0        | shard 1        | shard 2        |
    exchanged   state   |last    |       |last    |       |last    |
    before shard 1       <------->
"""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from ejkernel.families.causal_convolution.record import CausalConvolution, states
from ejkernel.families.causal_convolution.slot_states import with_plain_states, with_stored_states
from ejkernel.planning.token_shards import PackedBorders, TokenShards, packed_borders

Run = Callable[[Any], tuple[jax.Array, jax.Array]]


def run_on_token_shard(run: Run, record: CausalConvolution, shards: TokenShards) -> tuple[jax.Array, jax.Array]:
    """Returns the outputs of a device's tokens and the final states of the call.

    Args:
        run: Computes the record of one device.
        record: The record of this device's tokens.
        shards: How tokens are split.
    """
    original, record = record, with_plain_states(record)
    before, final = _states_at_shard_borders(record, shards)
    if record.cu_seqlens is None:
        read, _ = run(dataclasses.replace(record, initial_state=before))
        return read, final
    packed = packed_borders(record.cu_seqlens, shards)
    entering = _states_entering_sequences(record, before, packed, record.cu_seqlens, shards)
    read, final = run(dataclasses.replace(record, cu_seqlens=packed.cu_seqlens, sequence_state=entering))
    return read, with_stored_states(original, shards.sum(jnp.where(packed.ends[:, None, None], final, 0)))


def record_for_explain(record: CausalConvolution) -> CausalConvolution:
    """Returns a device's record with the shapes that its kernel gets, for `explain`; its states have other values."""
    record, name = with_plain_states(record), "initial_state" if record.cu_seqlens is None else "sequence_state"
    return dataclasses.replace(record, **{name: states(record)})


def _states_at_shard_borders(record: CausalConvolution, shards: TokenShards) -> tuple[jax.Array, jax.Array]:
    """Returns the W - 1 tokens before this device's shard and those before the end of the row, [B, C, W - 1]."""
    held, tokens = record.weight.shape[1] - 1, record.x.shape[1]
    sent = min(held, tokens)
    gathered = shards.gather(jnp.swapaxes(record.x[:, tokens - sent :], 1, 2))
    rows, channels = gathered.shape[1:3]
    last = jnp.moveaxis(gathered, 0, 2).reshape(rows, channels, shards.count * sent)
    first = states(record) if record.cu_seqlens is None else jnp.zeros((rows, channels, held), record.x.dtype)
    tokens_in_order = jnp.concatenate([first, last], axis=2)
    before = lax.dynamic_slice_in_dim(tokens_in_order, shards.index() * sent, held, axis=2)
    return before, tokens_in_order[:, :, shards.count * sent :]


def _states_entering_sequences(
    record: CausalConvolution, before: jax.Array, packed: PackedBorders, cu_seqlens: jax.Array, shards: TokenShards
) -> jax.Array:
    """Returns the tokens before the first ones that each packed sequence has in this shard, [N, C, W - 1]."""
    held, state = before.shape[2], states(record)
    # Columns of `before` from the first token of the sequence on are its tokens; those before are of its state.
    begin = cu_seqlens[packed.entering_sequence].astype(jnp.int32)
    position = shards.index() * shards.tokens - held + jnp.arange(held, dtype=jnp.int32) - begin
    earlier = jnp.take(state[packed.entering_sequence], jnp.clip(position + held, 0, max(0, held - 1)), axis=1)
    entering = jnp.where(position >= 0, before[0], earlier)
    lead = (jnp.arange(state.shape[0]) == packed.entering_sequence) & packed.enters[shards.index()]
    return jnp.where(lead[:, None, None], entering, state)
