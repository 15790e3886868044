"""Backward pass of a recurrent network.

    per block, last token first:   states' cotangents, token by token -> cotangents of gates [t, B, G * H]
    then, for the whole block:     dW_ih, dW_hh, biases, dx as matrix products over all its tokens

Only the cotangents of the states need a loop over tokens.
"""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from ejkernel.families.recurrent_network import (
    RecurrentNetwork,
    State,
    accumulator,
    input_and_recurrent_cotangents,
    layers_directions_and_state_size,
    split_gates,
    state_after_token,
)
from ejkernel.types.pullback import Pullback
from ejkernel_xla.recurrent_network.config import TokenBlocks
from ejkernel_xla.recurrent_network.kernels.blocks import Blocks
from ejkernel_xla.recurrent_network.kernels.layer import (
    Direction,
    concatenate_directions,
    keep_state_in_padding,
    precision,
    product,
    time_major,
    valid_tokens,
)

Gradients = dict[str, Any]


def backward(pullback: Pullback, config: TokenBlocks) -> Gradients:
    """Returns gradients of the requested fields of a record.

    Args:
        pullback: Record, gates and states of every token, cotangents of output and final states, and the wanted names.
        config: Tokens per block and an iteration of the loop.

    Returns:
        Each requested gradient, in its field's shape and dtype.
    """
    record = pullback.record
    layers, directions, _ = layers_directions_and_state_size(record)
    layer_grads: list[list[Gradients]] = []
    outputs = time_major(pullback.cotangent[0]).astype(accumulator(record))
    for layer in reversed(range(layers)):
        inputs = _layer_inputs(pullback, layer)
        parts = jnp.split(outputs, directions, axis=-1)
        layer_directions = [Direction.of(record, layer, n) for n in range(directions)]
        grads = [
            _direction_gradients(pullback, at, inputs, part, config)
            for at, part in zip(layer_directions, parts, strict=True)
        ]
        outputs = functools.reduce(jnp.add, [each["inputs"] for each in grads])
        layer_grads.insert(0, grads)
    grads = _collect_gradients(record, layer_grads)
    grads["x"] = time_major(outputs)
    return {name: grads[name].astype(getattr(record, name).dtype) for name in sorted(pullback.grad_fields)}


def _layer_inputs(pullback: Pullback, layer: int) -> jax.Array:
    """Returns what a layer reads, [T, B, inputs]."""
    record = pullback.record
    if layer == 0:
        return concatenate_directions(
            [time_major(record.x)], valid_tokens(record)
        )  # 0 in padding, even if padding holds NaN
    directions = layers_directions_and_state_size(record)[1]
    below = pullback.residuals.hidden[(layer - 1) * directions : layer * directions]
    return concatenate_directions([time_major(hidden) for hidden in below], valid_tokens(record))


def _direction_gradients(
    pullback: Pullback, at: Direction, inputs: jax.Array, outputs: jax.Array, config: TokenBlocks
) -> Gradients:
    """Returns gradients of one direction of a layer, from the cotangent [T, B, H] of what it hands on."""
    record, weight_ih = pullback.record, at.weight_ih.astype(accumulator(pullback.record))
    token = _token_backward_step(at)

    def block(carry: tuple[State, Gradients], parts: tuple[Any, ...]) -> tuple[tuple[State, Gradients], jax.Array]:
        after, sums = carry
        inputs, tokens = parts[0], parts[1:]
        before, to_gates = lax.scan(token, after, tokens, reverse=not at.backwards, unroll=config.unroll)
        to_inputs, to_recurrent = input_and_recurrent_cotangents(record.cell, to_gates)
        # These sums over t * B rows run after the token loop as one product, instead of one outer product per token.
        contributions = {
            "weight_ih": _sum_of_outer_products(record, to_inputs, inputs),
            "weight_hh": _sum_of_outer_products(record, to_recurrent, tokens[1][0]),
            "bias_ih": to_inputs.sum(axis=(0, 1)),
            "bias_hh": to_recurrent.sum(axis=(0, 1)),
        }
        return (before, jax.tree.map(jnp.add, sums, contributions)), product(record, to_inputs, weight_ih)

    blocks = Blocks.of(record, config.block_t, at.backwards)
    gates = time_major(pullback.residuals.gates[at.index])
    tokens = (inputs, gates, _states_before(pullback, at), outputs)
    final = tuple(x[at.index].astype(outputs.dtype) for x in pullback.cotangent[1:])
    parts = (*jax.tree.map(blocks.cut, tokens), blocks.valid(record))
    (first, sums), token_gradients = lax.scan(block, (final, at.zeros()), parts, reverse=not at.backwards)
    return {**sums, "inputs": blocks.merge(token_gradients), "first": first}


def _token_backward_step(at: Direction) -> Callable[[State, tuple[Any, ...]], tuple[State, jax.Array]]:
    """Returns the step of a loop over tokens: cotangents of the state after a token to those of the
    state before it.
    """
    weights, cell = at.weight_hh.astype(accumulator(at.record)), at.record.cell

    def token(after: State, parts: tuple[Any, ...]) -> tuple[State, jax.Array]:
        gates, state, cotangent, is_real = parts
        count = gates.shape[-1] // state[0].shape[-1]
        # JAX differentiates the elementwise part alone. Products with weights are written out, so that the gradients of
        # weights are products over a whole block.
        _, pull = jax.vjp(lambda gates, state: state_after_token(cell, split_gates(gates, count), state), gates, state)
        to_gates, direct_gradient = pull((after[0] + cotangent, *after[1:]))
        before = (
            direct_gradient[0] + product(at.record, input_and_recurrent_cotangents(cell, to_gates)[1], weights),
            *direct_gradient[1:],
        )
        # The gradient of padding is 0, and padding passes the cotangent of the state on unchanged.
        to_gates = to_gates if is_real is None else jnp.where(is_real, to_gates, 0)
        return keep_state_in_padding(is_real, before, after), to_gates

    return token


def _states_before(pullback: Pullback, at: Direction) -> State:
    """Returns the states before every token, [T, B, H]."""
    residuals, states_before = pullback.residuals, []
    for after, first in zip((residuals.hidden, residuals.cell), at.first_state(), strict=False):
        states = time_major(after[at.index])
        pair = (states[1:], first[None]) if at.backwards else (first[None], states[:-1])
        states_before.append(jnp.concatenate(pair))
    return tuple(states_before)


def _sum_of_outer_products(record: RecurrentNetwork, left: jax.Array, right: jax.Array) -> jax.Array:
    """Returns sum over tokens and rows of the products of every two entries, [left, right]."""
    return jnp.einsum("tbg,tbf->gf", left, right.astype(left.dtype), precision=precision(record))


def _collect_gradients(record: RecurrentNetwork, layer_grads: list[list[Gradients]]) -> Gradients:
    """Returns the gradients of a record's fields, from those of every layer's directions."""

    def stack(name: str, layers: list[list[Gradients]]) -> jax.Array:
        return jnp.stack([jnp.stack([each[name] for each in directions]) for directions in layers])

    grads: Gradients = {name: stack(name, layer_grads) for name in ("weight_hh", "bias_ih", "bias_hh")}
    grads["weight_ih"] = stack("weight_ih", layer_grads[:1])[0]
    if len(layer_grads) > 1:
        grads["weight_ih_deep"] = stack("weight_ih", layer_grads[1:])
    first_states = [each["first"] for directions in layer_grads for each in directions]
    for name, states in zip(("initial_hidden", "initial_cell"), zip(*first_states, strict=True), strict=False):
        grads[name] = jnp.stack(states)
    return grads
