"""Backward pass of a recurrent network.

The states after every token are known, so what the tokens got from inputs and states is computed again for all tokens
at once, and so are all gradients of weights. Only the cotangents of the states go through the tokens one by one.
"""

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from ejkernel.families.recurrent_network import RecurrentNetwork, State, accumulator, after_token, shape
from ejkernel.ops.pullback import Pullback
from ejkernel_xla.recurrent_network.layer import Direction, joined, kept, precision, product, real, time_major

Gradients = dict[str, Any]


def backward(pullback: Pullback, config: Any) -> Gradients:
    """Gradients of the wanted fields of a record.

    Args:
        pullback: Record, states after every token, cotangents of output and final states, and the wanted names.
        config: The operation's configuration; reads `unroll`.

    Returns:
        Each wanted gradient, in its field's shape and dtype.
    """
    record = pullback.record
    layers, directions, _ = shape(record)
    found: list[list[Gradients]] = []
    outputs = time_major(pullback.cotangent[0]).astype(accumulator(record))
    for layer in reversed(range(layers)):
        inputs = _inputs(pullback, layer)
        parts = jnp.split(outputs, directions, axis=-1)
        places = [Direction(record=record, layer=layer, direction=n) for n in range(directions)]
        grads = [_direction(pullback, at, inputs, part, config) for at, part in zip(places, parts, strict=True)]
        outputs = sum(each["inputs"] for each in grads)
        found.insert(0, grads)
    grads = _assemble(record, found)
    grads["x"] = time_major(outputs)
    return {name: grads[name].astype(getattr(record, name).dtype) for name in sorted(pullback.wanted)}


def _inputs(pullback: Pullback, layer: int) -> jax.Array:
    """What a layer reads, [T, B, inputs]."""
    record = pullback.record
    if layer == 0:
        return time_major(record.x)
    directions = shape(record)[1]
    below = pullback.residuals.hidden[(layer - 1) * directions : layer * directions]
    return joined([time_major(hidden) for hidden in below], real(record))


def _direction(pullback: Pullback, at: Direction, inputs: jax.Array, outputs: jax.Array, config: Any) -> Gradients:
    """Gradients of one direction of a layer, from the cotangent [T, B, H] of what it hands on."""
    record, before = pullback.record, _states_before(pullback, at)
    projected, recurrent = at.from_inputs(inputs), at.from_state(before[0])
    weights = at.weight_hh.astype(accumulator(record))

    def token(behind: State, parts: tuple[Any, ...]) -> tuple[State, tuple[jax.Array, jax.Array]]:
        projected, recurrent, state, cotangent, is_real = parts
        _, pull = jax.vjp(lambda *values: after_token(record.cell, *values), projected, recurrent, state)
        to_inputs, to_recurrent, direct = pull((behind[0] + cotangent, *behind[1:]))
        ahead = (direct[0] + product(record, to_recurrent, weights), *direct[1:])
        if is_real is not None:
            to_inputs, to_recurrent = (jnp.where(is_real, x, 0) for x in (to_inputs, to_recurrent))
        return kept(is_real, ahead, behind), (to_inputs, to_recurrent)

    final = tuple(x[at.index].astype(outputs.dtype) for x in pullback.cotangent[1:])
    tokens = (projected, recurrent, before, outputs, real(record))
    first, (to_inputs, to_recurrent) = lax.scan(
        token, final, tokens, reverse=not at.backwards, unroll=config.unroll or 1
    )
    return {
        "inputs": product(record, to_inputs, at.weight_ih.astype(to_inputs.dtype)),
        "weight_ih": _outer(record, to_inputs, inputs),
        "weight_hh": _outer(record, to_recurrent, before[0]),
        "bias_ih": to_inputs.sum(axis=(0, 1)),
        "bias_hh": to_recurrent.sum(axis=(0, 1)),
        "first": first,
    }


def _states_before(pullback: Pullback, at: Direction) -> State:
    """The states before every token, [T, B, H]."""
    residuals, found = pullback.residuals, []
    for after, first in zip((residuals.hidden, residuals.cell), at.first_state(), strict=False):
        states = time_major(after[at.index])
        pair = (states[1:], first[None]) if at.backwards else (first[None], states[:-1])
        found.append(jnp.concatenate(pair))
    return tuple(found)


def _outer(record: RecurrentNetwork, left: jax.Array, right: jax.Array) -> jax.Array:
    """Sum over tokens and rows of the products of every two entries, [left, right]."""
    return jnp.einsum("tbg,tbf->gf", left, right.astype(left.dtype), precision=precision(record))


def _assemble(record: RecurrentNetwork, found: list[list[Gradients]]) -> Gradients:
    """The gradients of a record's fields, from those of every layer's directions."""

    def stack(name: str, layers: list[list[Gradients]]) -> jax.Array:
        return jnp.stack([jnp.stack([each[name] for each in directions]) for directions in layers])

    grads: Gradients = {name: stack(name, found) for name in ("weight_hh", "bias_ih", "bias_hh")}
    grads["weight_ih"] = stack("weight_ih", found[:1])[0]
    if len(found) > 1:
        grads["weight_ih_deep"] = stack("weight_ih", found[1:])
    firsts = [each["first"] for directions in found for each in directions]
    for name, states in zip(("initial_hidden", "initial_cell"), zip(*firsts, strict=True), strict=False):
        grads[name] = jnp.stack(states)
    return grads
