"""The shared code of the cross-entropy's kernels: their refs, and a tile of logits and of its gradient."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from ejkernel.planning.precision import product_precision
from ejkernel_pallas.tpu.cross_entropy.spec import LossSpec
from ejkernel_pallas.tpu.mosaic.launch import Ref


@dataclasses.dataclass(frozen=True, kw_only=True)
class LossRefs:
    """Refs of all kernels; a field that is None is not needed.

    Attributes:
        states: [block_t, D].
        head: [D, block_v].
        targets: int32 [block_t, 1].
        lse: float32 [block_t, 1].
        softmax_factor: float32 [block_t, 1].
        target_factor: float32 [block_t, 1].
        statistics: float32 [block_t, 128] of `linear_statistics`.
        gradient: [block_t, D] of the hidden states, or [D, block_v] of the matrix.
        largest: Scratch, float32 [block_t, 128]: the largest logit of each lane.
        entry: Scratch, int32 [block_t, 128]: its first entry.
        total: Scratch, float32 [block_t, 128]: sum of exponentials relative to the largest logit of the lane.
        expected: Scratch, float32 [block_t, 128]: sum of targets times logits.
        acc: Scratch, float32 of the gradient's block.
    """

    states: Ref
    head: Ref
    targets: Ref
    lse: Ref = None
    softmax_factor: Ref = None
    target_factor: Ref = None
    statistics: Ref = None
    gradient: Ref = None
    largest: Ref = None
    entry: Ref = None
    total: Ref = None
    expected: Ref = None
    acc: Ref = None


def product(left: jax.Array, right: jax.Array, contracted_axes: tuple[int, int]) -> jax.Array:
    """Returns a product in float32."""
    left_axis, right_axis = contracted_axes
    return lax.dot_general(
        left,
        right,
        (((left_axis,), (right_axis,)), ((), ())),
        precision=product_precision(left.dtype),
        preferred_element_type=jnp.float32,
    )


def entries_of_block(block: Any, spec: LossSpec) -> jax.Array:
    """Returns the entries of a block's columns, int32 [block_t, block_v]."""
    return block * spec.block_v + lax.broadcasted_iota(jnp.int32, (spec.block_t, spec.block_v), 1)


def capped_logits(refs: LossRefs, spec: LossSpec) -> jax.Array:
    """Returns a tile of logits with the soft cap."""
    values = product(refs.states[...], refs.head[...], (1, 0))
    return values if spec.soft_cap is None else spec.soft_cap * jnp.tanh(values / spec.soft_cap)


def logit_gradient(refs: LossRefs, block: Any, spec: LossSpec) -> jax.Array:
    """Returns the gradient of a tile of logits in the dtype of hidden states; 0 past the last entry."""
    values, entries = capped_logits(refs, spec), entries_of_block(block, spec)
    targets = jnp.where(entries == refs.targets[...], spec.target_part, 0.0) + spec.even_part
    gradient = jnp.exp(values - refs.lse[...]) * refs.softmax_factor[...] - targets * refs.target_factor[...]
    if spec.soft_cap is not None:
        gradient = gradient * (1 - (values / spec.soft_cap) ** 2)
    if spec.num_entries % spec.block_v:
        gradient = jnp.where(entries < spec.num_entries, gradient, 0)
    return gradient.astype(refs.states.dtype)
