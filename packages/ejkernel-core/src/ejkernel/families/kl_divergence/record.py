"""The argument record of the divergence of two distributions over a vocabulary."""

from typing import Any

import jax
import jax.numpy as jnp

from ejkernel.types.arguments import arguments, static

DIRECTIONS = ("forward", "reverse", "jsd")


@arguments
class KLDivergence:
    """Canonical input of one divergence. T tokens, V entries of the vocabulary.

    Attributes:
        student: [T, V] floating logits.
        teacher: [T, V] floating logits.
        token_mask: [T] bool, whether a token counts. Others may hold anything.
        direction: `"forward"`, `"reverse"` or `"jsd"`.
        temperature: Both logits are divided by it.
        beta: The teacher's part of the mixture in `"jsd"`, above 0 and below 1.
        vocab_axis: The mesh axis over which the vocabulary is split; None where it is whole.
    """

    student: jax.Array
    teacher: jax.Array
    token_mask: jax.Array
    direction: str = static()
    temperature: float = static()
    beta: float = static()
    vocab_axis: str | None = static()


def accumulator(record: KLDivergence) -> Any:
    """Returns the dtype of logits and sums: float32, or float64 where one of the logits is."""
    return jnp.promote_types(jnp.promote_types(record.student.dtype, record.teacher.dtype), jnp.float32)
