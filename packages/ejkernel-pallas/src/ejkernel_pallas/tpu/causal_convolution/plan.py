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
from ejkernel_pallas.tpu.causal_convolution.spec import ConvolutionSpec


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


def weights_and_bias(record: CausalConvolution, spec: ConvolutionSpec) -> jax.Array:
    """Returns the weights and then the bias, float32 [W + 1, C]. Row k is multiplied with the token k positions
    earlier.
    """
    bias = jnp.zeros(record.weight.shape[0], jnp.float32) if record.bias is None else record.bias.astype(jnp.float32)
    rows = jnp.concatenate([record.weight.astype(jnp.float32).T[::-1], bias[None]])
    return rows * 0.5 if spec.halves_convolution_sums else rows
