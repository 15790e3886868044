"""Computes the operands of the causal convolution's kernels before the launch, and the outputs of the first tokens of
sequences.

The kernels take a row as one sequence after zeros. Where it is not, the first W - 1 tokens of each sequence read other
tokens than the W - 1 before them in the row. Those are few, so they are a record of their own, of N rows and W - 1
tokens, which the family's reference computes:

    row           | sequence 0         | sequence 1 |         | sequence 2            | padding
    kernels       . . . - - - - - - - - . . . - - - -         . . . - - - - - - - - - 0 0 0 0
    first tokens  0 1 2                 0 1 2                 0 1 2
"""

import dataclasses
from typing import NamedTuple

import jax
import jax.numpy as jnp

from ejkernel.families.causal_convolution import CausalConvolution, states
from ejkernel_pallas.tpu.causal_convolution.config import TpuConvolution
from ejkernel_pallas.tpu.causal_convolution.spec import ConvolutionSpec
from ejkernel_pallas.tpu.mosaic.vectors import LANES, SUBLANES

MAX_STEP_TOKENS = 8
"""The largest mean number of tokens of a sequence for which slots are updated token by token."""
MAX_SLOTS_PER_SEQUENCE = 8
"""The largest number of slots per sequence for which all slots are copied: a copy of one slot takes eight anyway."""
MAX_UPDATE_VMEM_BYTES = 32 * 2**20
"""VMEM for blocks and scratch memory of the kernel that updates slots."""


class FirstTokens(NamedTuple):
    """The first W - 1 tokens of every sequence.

    Attributes:
        first_tokens_record: A record of N rows, or of B; zeros stand for tokens that a sequence does not have.
        token_index: int32 [N, W - 1], the index of each of these tokens in the packed row; T for a token that does not
            exist.
    """

    first_tokens_record: CausalConvolution
    token_index: jax.Array


def find_first_tokens(record: CausalConvolution) -> FirstTokens:
    """Returns the first tokens of the sequences or the rows of a record."""
    first, tokens = record.weight.shape[1] - 1, record.x.shape[1]
    if record.cu_seqlens is None:
        x = record.x[:, :first]
        token = jnp.broadcast_to(jnp.arange(x.shape[1], dtype=jnp.int32), x.shape[:2])
    else:
        bounds = jnp.clip(record.cu_seqlens.astype(jnp.int32), 0, tokens)
        token = bounds[:-1, None] + jnp.arange(first, dtype=jnp.int32)
        token = jnp.where(token < bounds[1:, None], token, tokens)
        x = jnp.take(record.x[0], token, axis=0, mode="fill", fill_value=0)
    before = states(record)
    return FirstTokens(
        dataclasses.replace(record, x=x, initial_state=before, cu_seqlens=None, sequence_state=None), token
    )


def replace_first_tokens(
    first_tokens: FirstTokens, is_packed: bool, x: jax.Array, first_token_rows: jax.Array
) -> jax.Array:
    """Returns [B, T, C] with the rows of first tokens replaced."""
    if not is_packed:
        return x.at[:, : first_token_rows.shape[1]].set(first_token_rows)
    return x.at[0, first_tokens.token_index].set(first_token_rows, mode="drop")


def add_to_first_tokens(
    first_tokens: FirstTokens, is_packed: bool, x: jax.Array, first_token_rows: jax.Array
) -> jax.Array:
    """Returns [B, T, C] with rows added to the rows of first tokens."""
    if not is_packed:
        return x.at[:, : first_token_rows.shape[1]].add(first_token_rows)
    return x.at[0, first_tokens.token_index].add(first_token_rows, mode="drop")


def scalar_tables(record: CausalConvolution, spec: ConvolutionSpec) -> dict[str, jax.Array]:
    """Returns the arrays that the kernels read as scalars.

    Returns:
        `sequence_bounds`, int32 [N + 1]: the cumulative lengths, or [0, T] without packing.
        `first_token_sequence_ranges`, int32 [2 * blocks]: the first sequence with one of its first W - 1 tokens in each
        block, and then the sequence after the last such sequence of each block.
    """
    tokens = record.x.shape[1]
    if record.cu_seqlens is None:
        return {
            "sequence_bounds": jnp.asarray([0, tokens], jnp.int32),
            "first_token_sequence_ranges": jnp.zeros(2 * spec.blocks_per_row, jnp.int32),
        }
    bounds = jnp.clip(record.cu_seqlens.astype(jnp.int32), 0, tokens)
    begin = jnp.arange(spec.blocks_per_row, dtype=jnp.int32) * spec.block_t
    first = jnp.searchsorted(bounds[:-1] + spec.filter_width - 1, begin, side="right")
    after = jnp.searchsorted(bounds[:-1], begin + spec.block_t, side="left")
    return {"sequence_bounds": bounds, "first_token_sequence_ranges": jnp.concatenate([first, after]).astype(jnp.int32)}


class SlotStates(NamedTuple):
    """Packed sequences whose states are in slots.

    Attributes:
        slots: [S, C, W - 1].
        slot_of_sequence: int [N].
        cu_seqlens: int [N + 1].
    """

    slots: jax.Array
    slot_of_sequence: jax.Array
    cu_seqlens: jax.Array


def slot_states(record: CausalConvolution) -> SlotStates | None:
    """Returns the states of a record in slots; None where it has no slots."""
    slots, slot_of_sequence, bounds = record.sequence_state, record.state_slots, record.cu_seqlens
    if slots is None or slot_of_sequence is None or bounds is None:
        return None
    return SlotStates(slots, slot_of_sequence, bounds)


def update_block_channels(record: CausalConvolution, config: TpuConvolution) -> int:
    """Returns the channels per grid step of the kernel that updates slots; 0 for a record that it does not serve.

    It computes token by token, and copies all slots, so it serves steps of few tokens whose sequences have many of the
    slots.
    """
    states = slot_states(record)
    if states is None:
        return 0
    (_, tokens, channels), (slots, _, num_state_tokens) = record.x.shape, states.slots.shape
    sequences = states.slot_of_sequence.shape[0]
    if tokens > MAX_STEP_TOKENS * sequences or slots > MAX_SLOTS_PER_SEQUENCE * sequences:
        return 0
    # Two blocks of the inputs and of the outputs, and copies in float32.
    bytes_per_channel = num_state_tokens * slots * (4 * states.slots.dtype.itemsize + 4)
    bytes_per_channel += tokens * (4 * record.x.dtype.itemsize + 8)
    most = min(config.block_c, SUBLANES * LANES, MAX_UPDATE_VMEM_BYTES // bytes_per_channel)
    if channels <= most:
        return channels
    # Interpreted, an array that is updated in place has whole blocks.
    return next((n for n in range(most // LANES * LANES, 0, -LANES) if channels % n == 0), 0)


def slot_tables(states: SlotStates, tokens: int) -> dict[str, jax.Array]:
    """Returns what the kernel that updates slots reads as scalars: `sequence_bounds`, int32 [N + 1], and
    `slot_of_sequence`, int32 [N], -1 for a sequence without a slot.
    """
    index = states.slot_of_sequence
    return {
        "sequence_bounds": jnp.clip(states.cu_seqlens.astype(jnp.int32), 0, tokens),
        "slot_of_sequence": jnp.where((index >= 0) & (index < states.slots.shape[0]), index, -1).astype(jnp.int32),
    }


def weights_by_row(record: CausalConvolution, spec: ConvolutionSpec) -> jax.Array:
    """Returns `weights_and_bias` as float32 [W + 1, tiles, 8, 128]: the channels of a tile in rows, and then zeros."""
    rows = weights_and_bias(record, spec)
    rows = rows.reshape(rows.shape[0], -1, spec.block_c)
    rows = jnp.pad(rows, ((0, 0), (0, 0), (0, SUBLANES * LANES - spec.block_c)))
    return rows.reshape(*rows.shape[:2], SUBLANES, LANES)


def weights_and_bias(record: CausalConvolution, spec: ConvolutionSpec) -> jax.Array:
    """Returns the weights and then the bias, float32 [W + 1, C]. Row k is multiplied with the token k positions
    earlier.
    """
    bias = jnp.zeros(record.weight.shape[0], jnp.float32) if record.bias is None else record.bias.astype(jnp.float32)
    rows = jnp.concatenate([record.weight.astype(jnp.float32).T[::-1], bias[None]])
    return rows * 0.5 if spec.halves_convolution_sums else rows
