"""Kernel functions of the gated delta rule that model libraries import from their private modules."""

from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Integer

from ejkernel.modules.operations.gated_delta_rule import gated_delta_rule
from ejkernel.modules.operations.ragged_gated_delta_rule import ragged_gated_delta_rule

StateSlots = Float[Array, "slots h k v"]
TokenValues = Float[Array, "t h v"]


def ragged_gated_delta_rule_decode(
    query: Float[Array, "t h k"],
    key: Float[Array, "t h k"],
    value: TokenValues,
    beta: Float[Array, "t h"],
    decay: Float[Array, "t h"] | None,
    recurrent_state: StateSlots,
    state_indices: Integer[Array, " t"],
    use_qk_l2norm: bool = True,
) -> tuple[TokenValues, StateSlots]:
    """Returns one decoding step: token t continues the state of slot `state_indices[t]`.

    Where several tokens name a slot, the first is stored there: the others are padding. The arguments are those of
    `ejkernel.modules.ragged_gated_delta_rule`.
    """
    count = query.shape[0]
    earlier = state_indices[None, :] == state_indices[:, None]
    repeated = jnp.tril(earlier, -1).any(axis=1)
    slots = jnp.where(repeated, -1, state_indices)
    starts = jnp.arange(count + 1, dtype=jnp.int32)
    arrays = query, key, value, beta, decay, recurrent_state, starts, slots
    return ragged_gated_delta_rule(*arrays, use_qk_l2norm=use_qk_l2norm)


def ragged_gated_delta_rule_prefill(
    query: Float[Array, "t h k"],
    key: Float[Array, "t h k"],
    value: TokenValues,
    beta: Float[Array, "t h"],
    decay: Float[Array, "t h"] | None,
    recurrent_state: StateSlots,
    query_start_loc: Integer[Array, " n+1"],
    state_indices: Integer[Array, " n"],
    chunk_size: int = 64,
    use_qk_l2norm: bool = True,
    compute_dtype: Any = None,
) -> tuple[StateSlots, TokenValues]:
    """Returns packed requests, with the slots first; `compute_dtype` changes nothing, for sums are float32."""
    arrays = query, key, value, beta, decay, recurrent_state, query_start_loc, state_indices
    output, slots = ragged_gated_delta_rule(*arrays, chunk_size=chunk_size, use_qk_l2norm=use_qk_l2norm)
    return slots, output


def gated_delta_rule_step(
    query: Float[Array, "b h 1 k"],
    key: Float[Array, "b h 1 k"],
    value: Float[Array, "b h 1 v"],
    beta: Float[Array, "b h 1"],
    decay: Float[Array, "b h 1"] | None,
    recurrent_state: Float[Array, "b h k v"],
    use_qk_l2norm: bool = True,
) -> tuple[Float[Array, "b h 1 v"], Float[Array, "b h k v"]]:
    """Returns one token of each row, with the heads before the token axis."""
    query, key, value, beta = (jnp.swapaxes(x, 1, 2) for x in (query, key, value, beta))
    decay = None if decay is None else jnp.swapaxes(decay, 1, 2)
    states: dict[str, Any] = {"initial_state": recurrent_state, "return_state": True}
    output, state = gated_delta_rule(query, key, value, beta, decay, use_qk_l2norm=use_qk_l2norm, **states)
    return jnp.swapaxes(output, 1, 2), state.astype(recurrent_state.dtype)


def l2norm(x: jax.Array, axis: int = -1, eps: float = 1e-6) -> jax.Array:
    """Returns x divided by its length along an axis."""
    squares = jnp.sum(jnp.square(x.astype(jnp.float32)), axis=axis, keepdims=True)
    return (x * jax.lax.rsqrt(squares + eps)).astype(x.dtype)


# The names under which they are imported.
_decode_path = ragged_gated_delta_rule_decode
_ragged_gdr_chunked_prefill = ragged_gated_delta_rule_prefill
_single_step_gdr_fwd = gated_delta_rule_step
_l2norm = l2norm
