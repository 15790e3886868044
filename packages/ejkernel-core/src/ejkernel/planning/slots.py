"""States of requests in slots, as servers keep them: read before a packed call of a recurrence, stored after it.

An index outside of the slots, such as -1, means none: the request starts from zeros and its state is not kept. An empty
request leaves all slots as they are.
"""

import jax
import jax.numpy as jnp


def _has_slot_and_tokens(slots: jax.Array, indices: jax.Array, starts: jax.Array) -> jax.Array:
    """Returns which requests have a slot and tokens, bool [N]."""
    return (indices >= 0) & (indices < slots.shape[0]) & (jnp.diff(starts) > 0)


def read_slots(slots: jax.Array, indices: jax.Array, starts: jax.Array) -> jax.Array:
    """Returns the states [N, ...] before the requests, in at least float32; zeros for requests without tokens too.

    Args:
        slots: [slots, ...] floating.
        indices: [N] int.
        starts: [N + 1] int, cumulative lengths.
    """
    states = jnp.take(slots, indices, axis=0, mode="clip")
    states = states.astype(jnp.promote_types(slots.dtype, jnp.float32))
    # Selected and not multiplied by 0, so that NaN in other slots reaches no request.
    return jnp.where(_has_slot_and_tokens(slots, indices, starts).reshape(-1, *(1,) * (slots.ndim - 1)), states, 0)


def write_slots(slots: jax.Array, indices: jax.Array, starts: jax.Array, states: jax.Array) -> jax.Array:
    """Returns the slots with the states [N, ...] of the requests that had tokens, `starts` [N + 1], and have a slot."""
    index = jnp.where(
        _has_slot_and_tokens(slots, indices, starts), indices, slots.shape[0]
    )  # after the last slot: dropped
    return slots.at[index].set(states.astype(slots.dtype), mode="drop")


def gradients_of_write(
    slots: jax.Array, indices: jax.Array, starts: jax.Array, states: jax.Array, cotangent: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """Returns the gradients of the slots and of the states that `write_slots` got, whose values do not matter."""
    _, pull = jax.vjp(lambda slots, states: write_slots(slots, indices, starts, states), slots, states)
    return pull(cotangent)


def gradient_of_read(slots: jax.Array, indices: jax.Array, starts: jax.Array, cotangent: jax.Array) -> jax.Array:
    """Returns the gradient of the slots that `read_slots` got, whose values do not matter."""
    _, pull = jax.vjp(lambda slots: read_slots(slots, indices, starts), slots)
    return pull(cotangent.astype(jnp.promote_types(slots.dtype, jnp.float32)))[0]
