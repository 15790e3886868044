"""Forward pass of the divergences in Triton."""

from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from ejkernel.arithmetic import LN2
from ejkernel.families.kl_divergence import KLDivergence
from ejkernel_triton.kl_divergence.config import DivergenceTiles
from ejkernel_triton.kl_divergence.spec import make_spec
from ejkernel_triton.launch import ShapeDtype, launch


class DivergenceResiduals(NamedTuple):
    """What the backward pass reads, [T] float32 to base 2, of the whole vocabulary.

    Attributes:
        student_lse: Log-sum-exp of the student's tempered logits.
        teacher_lse: That of the teacher's.
        divergence: The student's divergence from the teacher or the mixture; 0 for `"forward"`.
    """

    student_lse: jax.Array
    teacher_lse: jax.Array
    divergence: jax.Array


def forward(
    record: KLDivergence, config: DivergenceTiles
) -> tuple[tuple[jax.Array, jax.Array], tuple[()], DivergenceResiduals]:
    """Returns the divergences of a record.

    Args:
        record: The canonical arguments.
        config: Tile and warps.

    Returns:
        The divergence and the teacher's entropy, [T] float32 each, of this device's part of the vocabulary; no
        residuals of the family, and those of the kernels.
    """
    from ejkernel_triton.kl_divergence.kernels.kl_statistics import kl_statistics_kernel

    student_lse, teacher_lse, difference, teacher_mean = _launch(kl_statistics_kernel, record, config, (), 4)
    whole_student_lse, whole_teacher_lse = (_lse_over_devices(x, record) for x in (student_lse, teacher_lse))
    student_mass, teacher_mass = jnp.exp2(student_lse - whole_student_lse), jnp.exp2(teacher_lse - whole_teacher_lse)
    divergence = jnp.zeros_like(difference)
    if record.direction == "forward":
        result = _expectation(teacher_mass, difference - whole_teacher_lse + whole_student_lse)
    elif record.direction == "reverse":
        result = _expectation(student_mass, difference - whole_student_lse + whole_teacher_lse)
        divergence = _sum_over_devices(result, record)
    else:
        of_student, of_teacher = _mixture_divergences(record, config, whole_student_lse, whole_teacher_lse)
        result = record.beta * of_teacher + (1 - record.beta) * of_student
        divergence = _sum_over_devices(of_student, record)
    entropy = _expectation(teacher_mass, whole_teacher_lse - teacher_mean)
    factor = jnp.where(record.token_mask, record.temperature**2 * LN2, 0)
    outputs = tuple(jnp.where(record.token_mask, x * factor, 0) for x in (result, entropy))
    return outputs, (), DivergenceResiduals(whole_student_lse, whole_teacher_lse, divergence)  # type: ignore[return-value]


def _expectation(mass: jax.Array, mean: jax.Array) -> jax.Array:
    """Returns `mass * mean`, 0 for a device whose part of the vocabulary has no mass."""
    return jnp.where(mass == 0, 0, mass * mean)


def _mixture_divergences(
    record: KLDivergence, config: DivergenceTiles, student_lse: jax.Array, teacher_lse: jax.Array
) -> Sequence[jax.Array]:
    """Returns the divergences of student and teacher from their mixture, [T] to base 2."""
    from ejkernel_triton.kl_divergence.kernels.mixture_divergence import mixture_divergence_kernel

    return _launch(mixture_divergence_kernel, record, config, (student_lse, teacher_lse), 2)


def _launch(
    kernel: Any, record: KLDivergence, config: DivergenceTiles, arrays: Sequence[jax.Array], num_outputs: int
) -> tuple[jax.Array, ...]:
    """Runs a kernel whose outputs are [T] float32."""
    tokens = record.student.shape[0]
    results = launch(
        kernel,
        (*logit_arrays(record), *(x[None] for x in arrays)),
        (ShapeDtype((1, tokens), jnp.float32),) * num_outputs,
        batch=1,
        grid=tokens,
        num_warps=config.num_warps,
        num_stages=1,
        constants={"spec": make_spec(record, config)},
    )
    return tuple(x[0] for x in results)


def logit_arrays(record: KLDivergence) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Returns logits and mask as the kernels read them."""
    return record.student[None], record.teacher[None], record.token_mask.astype(jnp.int32)[None]


def _sum_over_devices(x: jax.Array, record: KLDivergence) -> jax.Array:
    return x if record.vocab_axis is None else lax.psum(x, record.vocab_axis)


def _lse_over_devices(lse: jax.Array, record: KLDivergence) -> jax.Array:
    """Returns the log-sum-exp to base 2 of the whole vocabulary from those of its parts."""
    if record.vocab_axis is None:
        return lse
    largest = lax.pmax(lse, record.vocab_axis)
    relative = jnp.where(jnp.isneginf(largest), 0, largest)
    return jnp.log2(lax.psum(jnp.exp2(lse - relative), record.vocab_axis)) + relative
