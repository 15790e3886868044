"""The recurrent network family: the record its operations lower to, its meaning and its residuals.

Each layer reads the sequence once, or in both directions. With i_t = W_ih x_t + b_ih and
r_t = W_hh h_{t-1} + b_hh, whose G x H entries are the gates in the order given, H each:

    tanh    h_t = tanh(i + r)
    relu    h_t = max(i + r, 0)
    gru     r = sigmoid(i_r + r_r),  z = sigmoid(i_z + r_z),  n = tanh(i_n + r * r_n)      order r, z, n
            h_t = (1 - z) * n + z * h_{t-1}
    lstm    i, f, o = sigmoid(...),  g = tanh(...), each of i + r                         order i, f, g, o
            c_t = f * c_{t-1} + i * g,  h_t = o * tanh(c_t)

These are the orders and formulas of cuDNN and of PyTorch. The next layer reads h_t, of both directions side by side.
Tokens behind a sequence's length leave the states alone and have output 0; the other direction starts at the last
token of each sequence. States and sums are in float32 (float64 for float64 x).

Sources: Elman 1990; Cho et al. 2014, arXiv:1406.1078, with the reset gate behind the product as in cuDNN; Hochreiter &
Schmidhuber 1997 with the forget gate of Gers et al. 2000.
"""

from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from ejkernel.ops.arguments import arguments, static
from ejkernel.ops.model import Family
from ejkernel.planning.requests import PADDING

GATES = {"tanh": 1, "relu": 1, "gru": 3, "lstm": 4}


@arguments
class RecurrentNetwork:
    """Canonical input of one network. B rows, T tokens, F features, L layers, R directions, G gates, H hidden size.

    Attributes:
        x: [B, T, F] floating.
        weight_ih: [R, G * H, F] floating, of the first layer.
        weight_hh: [L, R, G * H, H] floating.
        cell: A key of `GATES`.
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
    """What a forward pass leaves for the backward pass, of every layer and direction, in the accumulator's dtype.

    Attributes:
        gates: [L * R, B, T, ...], `combined` inputs and states of every token; 0 in padding.
        hidden: [L * R, B, T, H], the states after every token.
        cell: [L * R, B, T, H] likewise, for lstm.
    """

    gates: jax.Array
    hidden: jax.Array
    cell: jax.Array | None = None

    @classmethod
    def of(cls, tokens: tuple[jax.Array, ...]) -> "NetworkResiduals":
        """From gates, states and, for lstm, cells."""
        return cls(gates=tokens[0], hidden=tokens[1], cell=tokens[2] if len(tokens) > 2 else None)


State = tuple[jax.Array, ...]
"""(h,), or for lstm (h, c); each [B, H]."""


def accumulator(record: RecurrentNetwork) -> Any:
    """The dtype of states and sums: float32, or float64 for float64 x."""
    return jnp.promote_types(record.x.dtype, jnp.float32)


def shape(record: RecurrentNetwork) -> tuple[int, int, int]:
    """L, R and H."""
    layers, directions, _, hidden = record.weight_hh.shape
    return layers, directions, hidden


def input_weights(record: RecurrentNetwork, layer: int) -> jax.Array:
    """[R, G * H, inputs] of a layer."""
    if layer == 0:
        return record.weight_ih
    if record.weight_ih_deep is None:
        _, directions, rows, hidden = record.weight_hh.shape
        return jnp.zeros((directions, rows, directions * hidden), record.weight_hh.dtype)
    return record.weight_ih_deep[layer - 1]


def first_state(record: RecurrentNetwork, index: int) -> State:
    """The state before the first token of a layer's direction."""
    zeros = jnp.zeros((record.x.shape[0], record.weight_hh.shape[3]), accumulator(record))
    given = (record.initial_hidden, record.initial_cell)[: 2 if record.cell == "lstm" else 1]
    return tuple(zeros if x is None else x[index].astype(zeros.dtype) for x in given)


def real_tokens(record: RecurrentNetwork) -> jax.Array | None:
    """Which tokens a row has, bool [B, T]; None for all."""
    if record.seq_lengths is None:
        return None
    return jnp.arange(record.x.shape[1], dtype=jnp.int32) < record.seq_lengths[:, None]


def combined(cell: str, inputs: jax.Array, recurrent: jax.Array) -> State:
    """What decides about the state after a token, beside the state before it.

    Args:
        cell: A key of `GATES`.
        inputs: W_ih x + b_ih, [..., G * H].
        recurrent: W_hh h + b_hh, [..., G * H].

    Returns:
        Their sum gate by gate, but both parts of gru's third; each [..., H]. Residuals have them in one array.
    """
    count = GATES[cell]
    pairs = list(zip(gates_of(inputs, count), gates_of(recurrent, count), strict=True))
    sums = tuple(x + y for x, y in (pairs[:2] if cell == "gru" else pairs))
    return (*sums, *pairs[2]) if cell == "gru" else sums


def gates_of(side_by_side: jax.Array, count: int) -> State:
    """The gates [..., H] that stand side by side in an array."""
    return tuple(jnp.split(side_by_side, count, axis=-1))


def separated(cell: str, cotangent: jax.Array) -> tuple[jax.Array, jax.Array]:
    """The cotangents of inputs and recurrent parts, from that of what they were `combined` to."""
    if cell != "gru":
        return cotangent, cotangent
    two = cotangent.shape[-1] // 2
    sums, inputs, recurrent = jnp.split(cotangent, (two, two + two // 2), axis=-1)
    return jnp.concatenate((sums, inputs), axis=-1), jnp.concatenate((sums, recurrent), axis=-1)


def after_token(cell: str, gates: State, state: State) -> State:
    """The state after a token, entry by entry.

    Args:
        cell: A key of `GATES`.
        gates: What `combined` gives.
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


def reference(record: RecurrentNetwork) -> tuple[tuple[jax.Array, ...], NetworkResiduals]:
    """The family's meaning, one token of one layer after another; float64 if x is, else float32.

    Returns:
        Output [B, T, R * H] in x's dtype; final states [L * R, B, H], and for lstm final cells, in the accumulator's;
        and the residuals.
    """
    layers, directions, _ = shape(record)
    inputs, real = record.x.astype(accumulator(record)), real_tokens(record)
    tokens: list[State] = []  # gates and states of every layer and direction, [B, T, ...] each
    finals: list[State] = []
    for layer in range(layers):
        found = [_reference_direction(record, layer, direction, inputs) for direction in range(directions)]
        tokens += [each for each, _ in found]
        finals += [last for _, last in found]
        inputs = jnp.concatenate([each[1] for each, _ in found], axis=-1)
        if real is not None:
            inputs = jnp.where(real[..., None], inputs, 0)
    return (inputs.astype(record.x.dtype), *stacked(finals)), NetworkResiduals.of(stacked(tokens))


def stacked(states: list[State]) -> State:
    """The states of several layers and directions, in one array each."""
    return tuple(jnp.stack(each) for each in zip(*states, strict=True))


def _reference_direction(
    record: RecurrentNetwork, layer: int, direction: int, inputs: jax.Array
) -> tuple[State, State]:
    """Gates of every token and states after it [B, T, ...], and the final states [B, H]."""
    dtype, highest = accumulator(record), lax.Precision.HIGHEST
    weight_ih = input_weights(record, layer)[direction].astype(dtype)
    weight_hh = record.weight_hh[layer, direction].astype(dtype)
    biases = [0 if x is None else x[layer, direction].astype(dtype) for x in (record.bias_ih, record.bias_hh)]
    real = real_tokens(record)
    real = jnp.ones(inputs.shape[:2], bool) if real is None else real

    def token(state: State, parts: tuple[jax.Array, jax.Array]) -> tuple[State, State]:
        x, is_real = parts
        projected = jnp.matmul(x, weight_ih.T, precision=highest) + biases[0]
        recurrent = jnp.matmul(state[0], weight_hh.T, precision=highest) + biases[1]
        gates = tuple(jnp.where(is_real[:, None], x, 0) for x in combined(record.cell, projected, recurrent))
        after = after_token(record.cell, gates, state)
        after = tuple(jnp.where(is_real[:, None], new, old) for new, old in zip(after, state, strict=True))
        return after, (jnp.concatenate(gates, axis=-1), *after)

    start = first_state(record, layer * shape(record)[1] + direction)
    tokens = (jnp.moveaxis(inputs, 1, 0), jnp.moveaxis(real, 1, 0))
    last, found = lax.scan(token, start, tokens, reverse=direction == 1)
    return tuple(jnp.moveaxis(x, 0, 1) for x in found), last


def localise(record: RecurrentNetwork, offsets: Mapping[str, jax.Array]) -> RecurrentNetwork:
    """One shard's record as it is: rows know nothing of each other."""
    return record


def axes(record: RecurrentNetwork) -> dict[str, Any]:
    """Axis letters of a record's fields and of its outputs, which end in the cells of a network that has them."""
    states = ("s b u", "s b u") if record.cell == "lstm" else ("s b u",)
    return {
        "x": "b t f",
        "weight_ih": "r g f",
        "weight_hh": "l r g u",
        "weight_ih_deep": "k r g w",
        "bias_ih": "l r g",
        "bias_hh": "l r g",
        "initial_hidden": "s b u",
        "initial_cell": "s b u",
        "seq_lengths": "b",
        "output": ("b t w", *states),
    }


def requests(record: RecurrentNetwork) -> tuple[dict[str, Any], ...]:
    """The owners of a record's entries: the rows, and their padding."""
    (rows, tokens), row = record.x.shape[:2], np.arange(record.x.shape[0])
    lengths = np.full(rows, tokens) if record.seq_lengths is None else np.asarray(record.seq_lengths)
    return ({"b": row, "b t": np.where(np.arange(tokens) < lengths[:, None], row[:, None], PADDING)},)


FAMILY = Family(
    name="recurrent_network",
    record=RecurrentNetwork,
    differentiable=(
        "x",
        "weight_ih",
        "weight_hh",
        "weight_ih_deep",
        "bias_ih",
        "bias_hh",
        "initial_hidden",
        "initial_cell",
    ),
    dtype=lambda record: record.x.dtype,
    head_dims=lambda record: (record.weight_hh.shape[3],),
    axes=axes,
    shardable="b",
    aligned=(),
    localise=localise,
    reference=reference,
    requests=requests,
)
