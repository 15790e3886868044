"""Forward pass of a recurrent network, layer by layer."""

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from ejkernel.families.recurrent_network import NetworkResiduals, RecurrentNetwork, State, after_token, shape, stacked
from ejkernel_xla.recurrent_network.layer import Direction, joined, kept, real, time_major


def forward(record: RecurrentNetwork, config: Any) -> tuple[tuple[jax.Array, ...], NetworkResiduals]:
    """Output and final states of a record.

    Args:
        record: The canonical arguments.
        config: The operation's configuration; reads `unroll`.

    Returns:
        Output [B, T, R * H] in x's dtype; final states [L * R, B, H], and for lstm final cells, in the accumulator's;
        and the states after every token.
    """
    layers, directions, _ = shape(record)
    inputs, tokens = time_major(record.x), real(record)
    states: list[State] = []
    finals: list[State] = []
    for layer in range(layers):
        runs = [
            _run(Direction(record=record, layer=layer, direction=n), inputs, tokens, config) for n in range(directions)
        ]
        finals += [last for last, _ in runs]
        states += [tuple(map(time_major, each)) for _, each in runs]
        inputs = joined([each[0] for _, each in runs], tokens)
    output = time_major(inputs).astype(record.x.dtype)
    return (output, *stacked(finals)), NetworkResiduals.of(stacked(states))


def _run(at: Direction, inputs: jax.Array, tokens: jax.Array | None, config: Any) -> tuple[State, State]:
    """The final states [B, H], and those after every token [T, B, H]."""

    def token(state: State, parts: tuple[jax.Array, jax.Array | None]) -> tuple[State, State]:
        projected, is_real = parts
        after = after_token(at.record.cell, projected, at.from_state(state[0]), state)
        after = kept(is_real, after, state)
        return after, after

    projected = jnp.asarray(at.from_inputs(inputs))
    return lax.scan(token, at.first_state(), (projected, tokens), reverse=at.backwards, unroll=config.unroll or 1)
