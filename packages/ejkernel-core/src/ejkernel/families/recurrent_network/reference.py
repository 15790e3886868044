"""Defines what recurrent networks compute, in plain jnp.

Each layer reads the sequence once, or in both directions. With i_t = W_ih x_t + b_ih and
r_t = W_hh h_{t-1} + b_hh, whose G x H entries are the gates in the order given, H each:

    tanh    h_t = tanh(i + r)
    relu    h_t = max(i + r, 0)
    gru     r = sigmoid(i_r + r_r),  z = sigmoid(i_z + r_z),  n = tanh(i_n + r * r_n)      order r, z, n
            h_t = (1 - z) * n + z * h_{t-1}
    lstm    i, f, o = sigmoid(...),  g = tanh(...), each of i + r                         order i, f, g, o
            c_t = f * c_{t-1} + i * g,  h_t = o * tanh(c_t)

These are the orders and formulas of cuDNN and of PyTorch. The next layer reads h_t, of both directions side by side.
Tokens after a sequence's length leave the states alone and have output 0; the other direction starts at the last
token of each sequence. States and sums are in float32 (float64 for float64 x).

Sources: Elman 1990; Cho et al. 2014, arXiv:1406.1078, with the reset gate after the product as in cuDNN; Hochreiter &
Schmidhuber 1997 with the forget gate of Gers et al. 2000.
"""

import jax
import jax.numpy as jnp
from jax import lax

from ejkernel.families.recurrent_network.record import (
    NetworkResiduals,
    RecurrentNetwork,
    State,
    accumulator,
    combine_gate_inputs,
    first_state,
    input_weights,
    layers_directions_and_state_size,
    real_tokens,
    stack_states,
    state_after_token,
)


def reference(record: RecurrentNetwork) -> tuple[tuple[jax.Array, ...], NetworkResiduals]:
    """Computes the result of the family, one token of one layer after another; in float64 if `x` is float64, else in
    float32.

    Returns:
        Output [B, T, R * H] in x's dtype; final states [L * R, B, H], and for lstm final cells, in the accumulator's;
        and the residuals.
    """
    layers, directions, _ = layers_directions_and_state_size(record)
    inputs, real = record.x.astype(accumulator(record)), real_tokens(record)
    tokens: list[State] = []  # gates and states of every layer and direction, [B, T, ...] each
    finals: list[State] = []
    for layer in range(layers):
        runs = [_reference_direction(record, layer, direction, inputs) for direction in range(directions)]
        tokens += [each for each, _ in runs]
        finals += [last for _, last in runs]
        inputs = jnp.concatenate([each[1] for each, _ in runs], axis=-1)
        if real is not None:
            inputs = jnp.where(real[..., None], inputs, 0)
    return (inputs.astype(record.x.dtype), *stack_states(finals)), NetworkResiduals.of(stack_states(tokens))


def _reference_direction(
    record: RecurrentNetwork, layer: int, direction: int, inputs: jax.Array
) -> tuple[State, State]:
    """Returns gates of every token and states after it [B, T, ...], and the final states [B, H]."""
    dtype, highest = accumulator(record), lax.Precision.HIGHEST
    weight_ih = input_weights(record, layer)[direction].astype(dtype)
    weight_hh = record.weight_hh[layer, direction].astype(dtype)
    biases = [0 if x is None else x[layer, direction].astype(dtype) for x in (record.bias_ih, record.bias_hh)]
    real = real_tokens(record)
    real = jnp.ones(inputs.shape[:2], bool) if real is None else real

    def run_token(state: State, parts: tuple[jax.Array, jax.Array]) -> tuple[State, State]:
        x, is_real = parts
        projected = jnp.matmul(x, weight_ih.T, precision=highest) + biases[0]
        recurrent = jnp.matmul(state[0], weight_hh.T, precision=highest) + biases[1]
        gates = tuple(jnp.where(is_real[:, None], x, 0) for x in combine_gate_inputs(record.cell, projected, recurrent))
        after = state_after_token(record.cell, gates, state)
        after = tuple(jnp.where(is_real[:, None], new, old) for new, old in zip(after, state, strict=True))
        return after, (jnp.concatenate(gates, axis=-1), *after)

    start = first_state(record, layer * layers_directions_and_state_size(record)[1] + direction)
    tokens = (jnp.moveaxis(inputs, 1, 0), jnp.moveaxis(real, 1, 0))
    last, stacked = lax.scan(run_token, start, tokens, reverse=direction == 1)
    return tuple(jnp.moveaxis(x, 0, 1) for x in stacked), last
