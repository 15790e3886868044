"""Recurrences whose tokens are split over devices: which sequences cross the borders, and the states that cross them.

A recurrence is affine in its state: device d leaves `A_d s + S_d` where the state s enters its shard. Each device
computes its summary (A_d, S_d), one all-gather exchanges the summaries, and every device folds those of the devices
before it into the state that enters its own shard:

    tokens      | shard 0              | shard 1              | shard 2              |
    sequences   | 0           | 1                    | 2 | 3                         |
    enters                             ^ state of 1           ^ state of 3
    summary       S_0                    S_1                    not used

The gradient of a state that enters is affine in that of the next one, `A_d^T g + Z_d`. A backward pass exchanges Z_d
in the same way and folds from the last device to the first.
"""

import dataclasses
import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from ejkernel.planning import packing

MAX_UNROLLED_SHARDS = 8
"""Shards of a fold that become straight code."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class TokenShards:
    """Tokens split over mesh axes, as the function on each device sees them.

    Attributes:
        axes: Names of the mesh axes, the slowest first.
        sizes: Their sizes.
        tokens: Tokens of each shard.
    """

    axes: tuple[str, ...]
    sizes: tuple[int, ...]
    tokens: int

    @property
    def count(self) -> int:
        """Returns the number of shards."""
        return math.prod(self.sizes)

    def index(self) -> jax.Array:
        """Returns which shard this device has, int32."""
        index = jnp.int32(0)
        for axis, size in zip(self.axes, self.sizes, strict=True):
            index = index * size + lax.axis_index(axis)
        return index

    def gather(self, tree: Any) -> Any:
        """Returns the arrays of all devices, each with a new first axis of length `count`."""
        return jax.tree.map(lambda x: lax.all_gather(x, self.axes), tree)

    def sum(self, tree: Any) -> Any:
        """Returns the sums of arrays over all devices."""
        return lax.psum(tree, self.axes)


class PackedBorders(NamedTuple):
    """The packed sequences at the borders of one device's shard.

    Attributes:
        cu_seqlens: [N + 1] int32, cumulative lengths of the tokens that sequences have in this shard.
        ids: [1, T] int32, the sequence of each token; -1 for padding.
        enters: bool [P], whether a sequence crosses the border before each shard.
        entering_sequence: int32, the sequence that enters this shard.
        passes: bool, whether a sequence crosses the border after this shard.
        run: int32, the sequence that crosses the border after this shard.
        ends: bool [N], whether the last token of a sequence is in this shard. Each sequence ends in one shard, empty
            ones too.
    """

    cu_seqlens: jax.Array
    ids: jax.Array
    enters: jax.Array
    entering_sequence: jax.Array
    passes: jax.Array
    run: jax.Array
    ends: jax.Array


def packed_borders(cu_seqlens: jax.Array, shards: TokenShards) -> PackedBorders:
    """Returns the packed sequences at the borders of this device's shard.

    Args:
        cu_seqlens: [N + 1] int, cumulative lengths in the whole row.
        shards: How its tokens are split.
    """
    bounds, index = cu_seqlens.astype(jnp.int32), shards.index()
    first = jnp.arange(shards.count + 1, dtype=jnp.int32) * shards.tokens
    # Sequence n crosses a border where it begins before it and ends after it; the counts skip empty sequences.
    before = jnp.sum(bounds < first[:, None], axis=1, dtype=jnp.int32)
    crossing = jnp.clip(before - 1, 0, bounds.shape[0] - 2)
    crosses = (before > 0) & (bounds[crossing] < first) & (first < bounds[crossing + 1])
    local = jnp.clip(bounds - first[index], 0, shards.tokens)
    last_shard = jnp.clip((bounds[1:] - 1) // shards.tokens, 0, shards.count - 1)
    return PackedBorders(
        cu_seqlens=local,
        ids=packing.packed_ids(local, shards.tokens)[0],
        enters=crosses[:-1],
        entering_sequence=crossing[index],
        passes=crosses[index + 1],
        run=crossing[index + 1],
        ends=last_shard == index,
    )


class Transitions(NamedTuple):
    """What the fold knows of the shards; P shards, B rows.

    Attributes:
        factor: [P, B, ...], the factor on the state that enters: an array that broadcasts to it, or [P, B, H, K, K]
            matrices.
        spans_shard: bool [P, B], whether the state that enters a shard also leaves it; else it is forgotten in between.
        enters: bool [P, B], whether the state that leaves the shard before enters a shard.
    """

    factor: jax.Array
    spans_shard: jax.Array
    enters: jax.Array


def carried_states(
    transitions: Transitions, added: jax.Array, first: jax.Array, matrices: bool
) -> tuple[jax.Array, jax.Array]:
    """Returns the states that enter the shards, [P, B, ...], and the one that leaves the last, [B, ...].

    Args:
        transitions: What shards do to the state that enters.
        added: [P, B, ...], the state that each shard leaves where zeros enter it.
        first: [B, ...], the state that enters the first shard.
        matrices: Whether the factors are matrices.
    """

    def fold_shard(state: jax.Array, step: tuple[Transitions, jax.Array]) -> tuple[jax.Array, jax.Array]:
        transition, added = step
        state = _select_rows(transition.enters, state)
        # Selected after the product: an infinite factor on the zeros that enter would be NaN.
        kept = _select_rows(
            transition.spans_shard & transition.enters, apply_factor(transition.factor, state, matrices)
        )
        return kept + added, state

    last, states = lax.scan(fold_shard, first, (transitions, added), unroll=_unrolled_shards(added))
    return states, last


def carried_gradients(
    transitions: Transitions, added: jax.Array, last_state_gradient: jax.Array, matrices: bool
) -> tuple[jax.Array, jax.Array]:
    """Returns the gradients of the states that leave the shards, [P, B, ...], and of the one that enters the first.

    Args:
        transitions: What shards do to the state that enters.
        added: [P, B, ...], what the outputs of each shard give the gradient of the state that enters it.
        last_state_gradient: [B, ...], the gradient of the state that leaves the last shard.
        matrices: Whether the factors are matrices.
    """

    def fold_shard(gradient: jax.Array, step: tuple[Transitions, jax.Array]) -> tuple[jax.Array, jax.Array]:
        transition, added = step
        kept = _select_rows(transition.spans_shard, _apply_transposed_factor(transition.factor, gradient, matrices))
        return _select_rows(transition.enters, kept + added), gradient

    first, gradients = lax.scan(
        fold_shard, last_state_gradient, (transitions, added), reverse=True, unroll=_unrolled_shards(added)
    )
    return gradients, first


def _unrolled_shards(added: jax.Array) -> int:
    """Returns the shards of a fold that are unrolled: a GPU begins an iteration later than it computes one."""
    return min(added.shape[0], MAX_UNROLLED_SHARDS)


def _apply_transposed_factor(factor: jax.Array, gradient: jax.Array, matrices: bool) -> jax.Array:
    """Returns the gradient of a state from that of its product with a factor."""
    return apply_factor(factor.swapaxes(-1, -2) if matrices else factor, gradient, matrices)


def apply_factor(factor: jax.Array, state: jax.Array, matrices: bool) -> jax.Array:
    """Returns the product of a factor, or of [..., K, K] matrices, and a state."""
    return jnp.matmul(factor, state, precision=lax.Precision.HIGHEST) if matrices else factor * state


def _select_rows(condition: jax.Array, state: jax.Array) -> jax.Array:
    """Returns the states of the rows for which a condition holds, and zeros for others."""
    return jnp.where(broadcast_flags(condition, state), state, 0)


def broadcast_flags(flags: jax.Array, states: jax.Array) -> jax.Array:
    """Returns the flags [B] of states [B, ...] as [B, 1, ...], which broadcasts to them."""
    return flags.reshape(-1, *(1,) * (states.ndim - 1))
