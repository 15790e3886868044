"""Recurrent networks on a CPU against `lax.scan` over the tokens.

python benchmarks/recurrent_network/recurrent_network_cpu.py [--quick]
"""

import functools
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
from jax import lax

from ejkernel.modules import gru, lstm, rnn

sys.path.append(str(Path(__file__).parents[1]))
import shared.sides


def elman(x, state, w, u, b):
    hidden = jnp.tanh(x @ w.T + b + state @ u.T)
    return hidden, hidden


def gated(x, state, w, u, b):
    inputs, recurrent = jnp.split(x @ w.T + b, 3, axis=-1), jnp.split(state @ u.T, 3, axis=-1)
    reset, update = (jax.nn.sigmoid(inputs[n] + recurrent[n]) for n in (0, 1))
    hidden = (1 - update) * jnp.tanh(inputs[2] + reset * recurrent[2]) + update * state
    return hidden, hidden


def long_short(x, state, w, u, b):
    hidden, cell = state
    i, f, g, o = jnp.split(x @ w.T + b + hidden @ u.T, 4, axis=-1)
    cell = jax.nn.sigmoid(f) * cell + jax.nn.sigmoid(i) * jnp.tanh(g)
    hidden = jax.nn.sigmoid(o) * jnp.tanh(cell)
    return (hidden, cell), hidden


CELLS = {"rnn": (rnn, elman, 1), "gru": (gru, gated, 3), "lstm": (lstm, long_short, 4)}


def scan(cell, x, first, weight_hh, bias, deep=None):
    """Layer by layer and token by token, as anyone would write it; one direction."""
    tokens, zeros = jnp.swapaxes(x, 0, 1), jnp.zeros((x.shape[0], weight_hh.shape[-1]))
    start = (zeros, zeros) if cell is long_short else zeros
    for layer in range(weight_hh.shape[0]):
        weights = first[0] if layer == 0 else deep[layer - 1, 0]
        step = functools.partial(_step, cell, weights, weight_hh[layer, 0], bias[layer, 0])
        _, tokens = lax.scan(step, start, tokens)
    return jnp.swapaxes(tokens, 0, 1)


def _step(cell, w, u, b, state, x):
    return cell(x, state, w, u, b)


def main() -> None:
    options = shared.sides.parse_options(__doc__.splitlines()[0])
    sizes = [(8, 32, 64, 1)] if options.quick else [(32, 256, 256, 1), (1, 1024, 512, 1), (64, 64, 512, 2)]
    shared.sides.print_table_header("lax.scan")
    for name, (ours, cell, gates) in CELLS.items():
        for rows, tokens, hidden, layers in sizes:
            keys, scale = jax.random.split(jax.random.key(0), 5), hidden**-0.5
            x = jax.random.normal(keys[0], (rows, tokens, hidden))
            first = scale * jax.random.normal(keys[1], (1, gates * hidden, hidden))
            again = scale * jax.random.normal(keys[2], (layers, 1, gates * hidden, hidden))
            bias = jax.random.normal(keys[3], (layers, 1, gates * hidden))
            deep = scale * jax.random.normal(keys[4], (layers - 1, 1, gates * hidden, hidden))
            arrays = (x, first, again, bias, *([deep] if layers > 1 else []))
            call = lambda x, w, u, b, deep=None, ours=ours: ours(x, w, u, b, None, deep)[0]  # noqa: E731
            size = f"{name}, {rows} x {tokens} x {hidden}, {layers} deep"
            repeats = 3 if options.quick else 5
            shared.sides.print_comparison(
                size, call, functools.partial(scan, cell), arrays, range(len(arrays)), repeats
            )


if __name__ == "__main__":
    main()
