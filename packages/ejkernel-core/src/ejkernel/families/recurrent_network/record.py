"""Defines the argument record of recurrent networks, and functions of the record alone."""

from typing import Any

import jax
import jax.numpy as jnp

from ejkernel.types.arguments import arguments, static

GATES_PER_CELL = {"tanh": 1, "relu": 1, "gru": 3, "lstm": 4}


@arguments
class RecurrentNetwork:
    """Canonical input of one network. B rows, T tokens, F features, L layers, R directions, G gates, H hidden size.

    Attributes:
        x: [B, T, F] floating.
        weight_ih: [R, G * H, F] floating, of the first layer.
        weight_hh: [L, R, G * H, H] floating.
        cell: A key of `GATES_PER_CELL`.
        weight_ih_deep: [L - 1, R, G * H, R * H] floating, of the other layers; None is zeros.
        bias_ih: [L, R, G * H] floating; None is zeros.
        bias_hh: [L, R, G * H] floating; None is zeros.
        initial_hidden: [L * R, B, H] floating, directions next to each other; None is zeros.
        initial_cell: [L * R, B, H] floating, for lstm; None is zeros.
        seq_lengths: [B] int32, tokens of each row; None is T.
    """

    x: jax.Array
    weight_ih: jax.Array
    weight_hh: jax.Array
    cell: str = static()
    weight_ih_deep: jax.Array | None = None
    bias_ih: jax.Array | None = None
    bias_hh: jax.Array | None = None
    initial_hidden: jax.Array | None = None
    initial_cell: jax.Array | None = None
    seq_lengths: jax.Array | None = None


@arguments
class NetworkResiduals:
    """The residuals of a forward pass, for every layer and direction, in the accumulator's dtype.

    Attributes:
        gates: [L * R, B, T, ...], `combine_gate_inputs` inputs and states of every token; 0 in padding.
        hidden: [L * R, B, T, H], the states after every token.
        cell: [L * R, B, T, H], the cells after every token, only for lstm.
    """

    gates: jax.Array
    hidden: jax.Array
    cell: jax.Array | None = None

    @classmethod
    def of(cls, tokens: tuple[jax.Array, ...]) -> "NetworkResiduals":
        """Returns the residuals with these gates, states and, for lstm, cells."""
        return cls(gates=tokens[0], hidden=tokens[1], cell=tokens[2] if len(tokens) > 2 else None)


State = tuple[jax.Array, ...]
"""(h,), or for lstm (h, c); each [B, H]."""


def accumulator(record: RecurrentNetwork) -> Any:
    """Returns the dtype of states and sums: float32, or float64 for float64 x."""
    return jnp.promote_types(record.x.dtype, jnp.float32)


def layers_directions_and_state_size(record: RecurrentNetwork) -> tuple[int, int, int]:
    """Returns L, R and H: layers, directions and hidden size."""
    layers, directions, _, hidden = record.weight_hh.shape
    return layers, directions, hidden


def input_weights(record: RecurrentNetwork, layer: int) -> jax.Array:
    """Returns the weights of a layer's inputs, [R, G * H, inputs]."""
    if layer == 0:
        return record.weight_ih
    if record.weight_ih_deep is None:
        _, directions, rows, hidden = record.weight_hh.shape
        return jnp.zeros((directions, rows, directions * hidden), record.weight_hh.dtype)
    return record.weight_ih_deep[layer - 1]


def first_state(record: RecurrentNetwork, index: int) -> State:
    """Returns the state before the first token of a layer's direction."""
    zeros = jnp.zeros((record.x.shape[0], record.weight_hh.shape[3]), accumulator(record))
    initial = (record.initial_hidden, record.initial_cell)[: 2 if record.cell == "lstm" else 1]
    return tuple(zeros if x is None else x[index].astype(zeros.dtype) for x in initial)


def real_tokens(record: RecurrentNetwork) -> jax.Array | None:
    """Returns which tokens a row has, bool [B, T]; None for all."""
    if record.seq_lengths is None:
        return None
    return jnp.arange(record.x.shape[1], dtype=jnp.int32) < record.seq_lengths[:, None]


def combine_gate_inputs(cell: str, inputs: jax.Array, recurrent_projection: jax.Array) -> State:
    """Returns the gates of a token before their nonlinearities; with the previous state they determine the next
    state.

    Args:
        cell: A key of `GATES_PER_CELL`.
        inputs: W_ih x + b_ih, [..., G * H].
        recurrent_projection: W_hh h + b_hh, [..., G * H].

    Returns:
        Their sum gate by gate, but both parts of gru's third; each [..., H]. Residuals have them in one array.
    """
    count = GATES_PER_CELL[cell]
    pairs = list(zip(split_gates(inputs, count), split_gates(recurrent_projection, count), strict=True))
    sums = tuple(x + y for x, y in (pairs[:2] if cell == "gru" else pairs))
    return (*sums, *pairs[2]) if cell == "gru" else sums


def split_gates(concatenated_gates: jax.Array, count: int) -> State:
    """Returns the gates [..., H] that stand side by side in an array."""
    return tuple(jnp.split(concatenated_gates, count, axis=-1))


def input_and_recurrent_cotangents(cell: str, cotangent: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Returns the cotangents of inputs and recurrent parts, from that of what they were `combine_gate_inputs` to."""
    if cell != "gru":
        return cotangent, cotangent
    two = cotangent.shape[-1] // 2
    sums, inputs, recurrent = jnp.split(cotangent, (two, two + two // 2), axis=-1)
    return jnp.concatenate((sums, inputs), axis=-1), jnp.concatenate((sums, recurrent), axis=-1)


def state_after_token(cell: str, gates: State, state: State) -> State:
    """Returns the state after a token, entry by entry.

    Args:
        cell: A key of `GATES_PER_CELL`.
        gates: What `combine_gate_inputs` gives.
        state: The state before it.
    """
    if cell == "gru":
        r, z, inputs, recurrent = gates
        z = jax.nn.sigmoid(z)
        return ((1 - z) * jnp.tanh(inputs + jax.nn.sigmoid(r) * recurrent) + z * state[0],)
    if cell == "lstm":
        i, f, g, o = gates
        memory = jax.nn.sigmoid(f) * state[1] + jax.nn.sigmoid(i) * jnp.tanh(g)
        return jax.nn.sigmoid(o) * jnp.tanh(memory), memory
    return (jnp.tanh(gates[0]) if cell == "tanh" else jnp.maximum(gates[0], 0),)


def stack_states(states: list[State]) -> State:
    """Returns the states of several layers and directions, in one array each."""
    return tuple(jnp.stack(each) for each in zip(*states, strict=True))
