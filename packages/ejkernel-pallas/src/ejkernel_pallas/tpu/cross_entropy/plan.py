"""The arrays that the kernels read: whole blocks of tokens, and numbers of tokens as columns."""

from typing import Any

import jax
import jax.numpy as jnp

from ejkernel.families.cross_entropy import CrossEntropy
from ejkernel_pallas.tpu.cross_entropy.spec import LossSpec
from ejkernel_pallas.tpu.mosaic.launch import Operand


def input_states(record: CrossEntropy, spec: LossSpec) -> jax.Array:
    """Returns the hidden states in whole blocks; 0 for tokens of weight 0, which may hold NaN, and past the last."""
    return pad_tokens(jnp.where((record.weights != 0)[:, None], record.inputs, 0), spec)


def pad_tokens(array: jax.Array, spec: LossSpec) -> jax.Array:
    """Returns an array whose first axis is tokens with zeros up to whole blocks."""
    padding = spec.num_token_blocks * spec.block_t - array.shape[0]
    return jnp.pad(array, [(0, padding)] + [(0, 0)] * (array.ndim - 1))


def input_operand(states: Any, spec: LossSpec) -> Operand:
    """Returns the operand of a block of hidden states; steps are (token block, entry block)."""
    return Operand(states, (spec.block_t, states.shape[1]), lambda *step: (step[0], 0))


def head_operand(head: Any, spec: LossSpec) -> Operand:
    """Returns the operand of a block of the matrix."""
    return Operand(head, (head.shape[0], spec.block_v), lambda *step: (0, step[1]))


def column_operand(numbers: jax.Array, spec: LossSpec) -> Operand:
    """Returns the operand of a number per token, as a column."""
    return Operand(pad_tokens(numbers, spec)[:, None], (spec.block_t, 1), lambda *step: (step[0], 0))


def working_bytes(states: Operand, head: Operand, spec: LossSpec) -> int:
    """Returns the bytes of VMEM for a tile of logits and what is computed of it, and for the parts in bfloat16 into
    which products split blocks of float32.
    """
    splits = 4 * (states.block_bytes + head.block_bytes) if states.array.dtype.itemsize > 2 else 0
    return 4 * spec.block_t * spec.block_v * 4 + splits
