"""Forward pass of a recurrent network, layer by layer."""

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from ejkernel.families.recurrent_network import (
    NetworkResiduals,
    RecurrentNetwork,
    State,
    axes,
    combine_gate_inputs,
    layers_directions_and_state_size,
    stack_states,
    state_after_token,
)
from ejkernel.planning.fixed_tiles import TILE_ROWS, scan_fixed
from ejkernel_xla.fixed_tiles import forward_in_tiles
from ejkernel_xla.recurrent_network.config import TokenBlocks
from ejkernel_xla.recurrent_network.kernels.blocks import Blocks
from ejkernel_xla.recurrent_network.kernels.layer import (
    Direction,
    concatenate_directions,
    keep_state_in_padding,
    time_major,
    valid_tokens,
)


def forward(record: RecurrentNetwork, config: TokenBlocks) -> tuple[tuple[jax.Array, ...], NetworkResiduals]:
    """Returns output and final states of a record.

    Args:
        record: The canonical arguments.
        config: Tokens per block and an iteration of the loop.

    Returns:
        Output [B, T, R * H] in x's dtype; final states [L * R, B, H], and for lstm final cells, in the accumulator's;
        and the gates of every token and the states after it.
    """
    if not config.batch_invariant or not record.x.size:
        return _forward_of_rows(record, config)
    states = 2 if record.cell == "lstm" else 1
    out_axes = ((0, *(1,) * states), 1)
    return forward_in_tiles(
        lambda tile: _forward_of_rows(tile, config), record, axes(record), "b", block=TILE_ROWS, out_axes=out_axes
    )


def _forward_of_rows(record: RecurrentNetwork, config: TokenBlocks) -> tuple[tuple[jax.Array, ...], NetworkResiduals]:
    """Returns `forward` of rows that are computed together."""
    layers, directions, _ = layers_directions_and_state_size(record)
    inputs, tokens = time_major(record.x), valid_tokens(record)
    layer_states: list[State] = []  # gates and states
    finals: list[State] = []
    for layer in range(layers):
        runs = [_run(Direction.of(record, layer, n), inputs, config) for n in range(directions)]
        finals += [last for last, _ in runs]
        layer_states += [tuple(map(time_major, each)) for _, each in runs]
        inputs = concatenate_directions([each[1] for _, each in runs], tokens)
    output = time_major(inputs).astype(record.x.dtype)
    return (output, *stack_states(finals)), NetworkResiduals.of(stack_states(layer_states))


def _run(at: Direction, inputs: jax.Array, config: TokenBlocks) -> tuple[State, State]:
    """Returns the final states [B, H], and the gates of every token and the states after it [T, B, ...].

    The loop carries each token's projected inputs from the iteration before: XLA's CPU backend does not vectorise a
    loop body that is fused with a slice of a longer array.
    """

    def token(
        carry: tuple[State, jax.Array], parts: tuple[jax.Array, jax.Array | None]
    ) -> tuple[tuple[State, jax.Array], State]:
        (state, projected), (following, is_real) = carry, parts
        gates = combine_gate_inputs(at.record.cell, projected, at.state_projection(state[0]))
        # 0 in padding: the backward pass reads them, and must find no NaN.
        gates = gates if is_real is None else tuple(jnp.where(is_real, x, 0) for x in gates)
        after = keep_state_in_padding(is_real, state_after_token(at.record.cell, gates, state), state)
        return (after, following), (jnp.concatenate(gates, axis=-1), *after)

    def block(state: State, parts: tuple[jax.Array, jax.Array | None]) -> tuple[State, State]:
        inputs, is_real = parts
        # W_ih x of a whole block is one product. The loop over tokens computes only W_hh h, which needs the state.
        projected = at.input_projection(inputs)
        first = projected[-1 if at.backwards else 0]
        following = jnp.roll(projected, 1 if at.backwards else -1, axis=0)
        tokens = (following, is_real)
        (state, _), per_token = lax.scan(token, (state, first), tokens, reverse=at.backwards, unroll=config.unroll)
        return state, per_token

    blocks = Blocks.of(at.record, config.block_t, at.backwards)
    parts = (blocks.cut(inputs), blocks.valid(at.record))
    if config.batch_invariant:
        final, per_token = scan_fixed(block, at.first_state(), _in_reading_order(at, parts), blocks.count)
        per_token = _in_reading_order(at, per_token)
    else:
        final, per_token = lax.scan(block, at.first_state(), parts, reverse=at.backwards)
    return final, tuple(map(blocks.merge, per_token))


def _in_reading_order(at: Direction, arrays: Any) -> Any:
    """Returns arrays with the blocks on axis 0 in the order in which they are read, or back."""
    return jax.tree.map(lambda x: jnp.flip(x, 0), arrays) if at.backwards else arrays
