"""`lstm` on an NVIDIA GPU against cuDNN's, which is `jax.experimental.rnn.lstm`; where there is no GPU it says so.

python benchmarks/recurrent_network/lstm_cudnn.py [--quick]
"""

import argparse
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
from jax.experimental import rnn

from ejkernel.modules import lstm

sys.path.append(str(Path(__file__).parents[1]))
import shared.sides

PRECISIONS = {"highest": 2e-4, "tensorfloat32": 2e-2}
"""What matrix products are taken at, and the error that is then not one."""


def cudnn(x, weight_ih, weight_hh, bias_ih, bias_hh, deep, hidden, cell):
    """The same network; cuDNN wants its weights in one array, products before biases."""
    layers, directions, _, size = weight_hh.shape
    places = [(layer, direction) for layer in range(layers) for direction in range(directions)]
    inputs = [weight_ih[r] if n == 0 else deep[n - 1, r] for n, r in places]
    weights = [w for x, at in zip(inputs, places, strict=True) for w in (x.ravel(), weight_hh[at].ravel())]
    biases = [b for at in places for b in (bias_ih[at], bias_hh[at])]
    lengths = jnp.full(x.shape[:1], x.shape[1], jnp.int32)
    packed = jnp.concatenate(weights + biases)
    return rnn.lstm(x, hidden, cell, packed, lengths, x.shape[2], size, layers, 0.0, directions == 2)


def ours(x, weight_ih, weight_hh, bias_ih, bias_hh, deep, hidden, cell):
    deep = deep if deep.size else None
    return lstm(x, weight_ih, weight_hh, bias_ih, bias_hh, deep, hidden, cell, platform="xla")


def network(rows: int, tokens: int, size: int, layers: int, directions: int) -> list[jax.Array]:
    """Its arrays: as many features as units."""
    shapes = {
        "x": (rows, tokens, size),
        "weight_ih": (directions, 4 * size, size),
        "weight_hh": (layers, directions, 4 * size, size),
        "bias_ih": (layers, directions, 4 * size),
        "bias_hh": (layers, directions, 4 * size),
        "deep": (layers - 1, directions, 4 * size, directions * size),
        "hidden": (layers * directions, rows, size),
        "cell": (layers * directions, rows, size),
    }
    keys = jax.random.split(jax.random.key(0), len(shapes))
    made = {name: jax.random.normal(key, shape) for key, (name, shape) in zip(keys, shapes.items(), strict=True)}
    weights = ("weight_ih", "weight_hh", "deep")
    return [x / x.shape[-1] ** 0.5 if name in weights else x for name, x in made.items()]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="small sizes, few repeats")
    quick = parser.parse_args().quick
    if jax.default_backend() != "gpu":
        print("lstm_cudnn.py needs an NVIDIA GPU: nothing was measured")
        return
    large = [(64, 512, 512, 1, 1), (64, 512, 512, 2, 1), (64, 512, 1024, 1, 1), (64, 512, 512, 1, 2)]
    shared.sides.print_table_header("cuDNN")
    for precision, tolerance in PRECISIONS.items():
        for shape in [(8, 32, 64, 2, 2)] if quick else large:
            arrays = network(*shape)
            given = [n for n, x in enumerate(arrays) if x.size]
            rows, tokens, size, layers, directions = shape
            label = f"{rows} x {tokens} x {size}, {layers} deep, {directions} ways, {precision}"
            with jax.default_matmul_precision(precision):
                shared.sides.print_comparison(label, ours, cudnn, arrays, given, 3 if quick else 10, tolerance)


if __name__ == "__main__":
    main()
