"""Calls of `rnn`, `gru` and `lstm` by name, for their tests."""

import numpy as np

from ejkernel.modules import gru, lstm, rnn

FUNCTIONS = {"tanh": rnn, "relu": rnn, "gru": gru, "lstm": lstm}
GATES = {"tanh": 1, "relu": 1, "gru": 3, "lstm": 4}
BIASES, STATES = ("bias_ih", "bias_hh"), ("initial_hidden", "initial_cell")
EVERYTHING = (*BIASES, *STATES)

# rows, tokens, features, layers, directions, hidden size; optional arrays; lengths
CALLS = {
    "one token": ((2, 1, 3, 1, 1, 4), STATES, None),
    "63 tokens": ((1, 63, 2, 1, 1, 3), BIASES, None),
    "129 tokens, both directions": ((2, 129, 3, 1, 2, 2), ("bias_ih",), None),
    "60 units, three layers": ((1, 5, 3, 3, 1, 60), ("bias_hh",), None),
    "lengths": ((4, 21, 3, 1, 1, 3), STATES, [21, 0, 1, 8]),
    "everything": ((4, 21, 3, 2, 2, 3), EVERYTHING, [0, 21, 20, 1]),
    "no rows": ((0, 5, 3, 1, 2, 4), EVERYTHING, None),
}


def make(kind, sizes, optional=(), seed=0, dtype=np.float64):
    """Floating arrays of a call by argument name."""
    (b, t, f, layers, r, h), g, rng = sizes, GATES[kind] * sizes[5], np.random.default_rng(seed)
    shapes = {
        "x": (b, t, f),
        "weight_ih": (r, g, f),
        "weight_hh": (layers, r, g, h),
        "bias_ih": (layers, r, g),
        "bias_hh": (layers, r, g),
        "weight_ih_deep": (layers - 1, r, g, r * h),
        "initial_hidden": (layers * r, b, h),
        "initial_cell": (layers * r, b, h),
    }
    given = ["x", "weight_ih", "weight_hh", *optional, *(["weight_ih_deep"] if layers > 1 else [])]
    kept = [name for name in shapes if name in given and (name != "initial_cell" or kind == "lstm")]
    drawn = {name: rng.normal(size=shapes[name]) for name in shapes}
    scaled = {name: x / x.shape[-1] ** 0.5 if name.startswith("weight") else x for name, x in drawn.items()}
    return {name: scaled[name].astype(dtype) for name in kept}


def run(kind, arrays, lengths=None, **options):
    """The public call on XLA with all arrays by name."""
    arrays = dict(arrays)
    positional = [arrays.pop(name) for name in ("x", "weight_ih", "weight_hh")]
    options |= {"nonlinearity": kind} if FUNCTIONS[kind] is rnn else {}
    return FUNCTIONS[kind](*positional, **arrays, seq_lengths=lengths, platform="xla", **options)
