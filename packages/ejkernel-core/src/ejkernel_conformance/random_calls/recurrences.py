"""Programs of recurrences and convolutions.

Slots without a request are poisoned, and so are padding tokens, where the outputs of these are 0.
"""

from collections.abc import Callable
from typing import Any

import numpy as np

from ejkernel_conformance.random_calls.draws import (
    Arrays,
    Drawn,
    Rng,
    bounds,
    dtype,
    given,
    heads,
    log_gates,
    normal,
    pick,
    poison,
    segment_ids,
    some,
    tokens,
    uniform,
)

CHANNELS = (8, 16, 32, 64, 64, 128, 128, 128)
SLOTS = 6
FORMS = ("rows", "rows", "packed", "slots")


class Sequences:
    """How the tokens of a call are cut: in rows, packed, or packed with states in slots, of steps or longer."""

    def __init__(self, rng: Rng, most: int = 150, forms: tuple[str, ...] = FORMS) -> None:
        self.form = pick(rng, forms)
        self.b = int(rng.integers(1, 4)) if self.form == "rows" else 1
        self.count = self.b if self.form == "rows" else int(rng.integers(1, SLOTS))
        steps = self.form == "slots" and some(rng, 0.5)
        self.t = self.count * int(rng.integers(1, 5)) if steps else tokens(rng, most)
        self.state = self.form == "slots" or some(rng, 0.5)

    def arrays(self, rng: Rng, state: tuple[int, ...], kind: Any = np.float32, name: str = "initial_state") -> Arrays:
        """Bounds, states and slots of a call."""
        found: Arrays = {}
        if self.form != "rows":
            found["cu_seqlens"] = bounds(rng, self.count, self.t)
        if self.form == "slots":
            indices = rng.permutation(SLOTS)[: self.count].astype(np.int32)
            empty = np.diff(found["cu_seqlens"]) == 0
            used = indices[~empty]
            unread = ~np.isin(np.arange(SLOTS), used)
            indices[rng.random(self.count) < 0.1] = -1
            found |= {"state_indices": indices, name: poison(normal(rng, (SLOTS, *state), kind), unread, np.inf)}
        elif self.state:
            found[name] = normal(rng, (self.count, *state), kind)
        return found

    def spoiled(self, arrays: Arrays, names: tuple[str, ...]) -> Arrays:
        """Returns the arrays with tokens after the last sequence poisoned."""
        if self.form == "rows":
            return arrays
        unread = np.arange(self.t)[None] >= arrays["cu_seqlens"][-1]
        return arrays | {name: poison(arrays[name], unread) for name in names if name in arrays}


def _qkv(rng: Rng, z: Sequences, h: int, g: int, k: int, v: int, kind: Any) -> Arrays:
    shapes = {"query": (z.b, z.t, h, k), "key": (z.b, z.t, g, k), "value": (z.b, z.t, g, v)}
    return {name: normal(rng, shape, kind, k**-0.5 if name == "key" else 1.0) for name, shape in shapes.items()}


def _head_sizes(rng: Rng) -> tuple[int, int, int, int]:
    k = pick(rng, CHANNELS)
    return (*heads(rng), k, k if some(rng, 0.7) else pick(rng, CHANNELS))


QKV = ("query", "key", "value")


def gated(rng: Rng, names: tuple[str, ...] = ("g",)) -> Drawn:
    """Draws a call of `gated_linear_attention`, or of `recurrent_attention` with other gates."""
    z, (h, g, k, v), kind = Sequences(rng), _head_sizes(rng), dtype(rng)
    gates = [name for name in names if some(rng, 0.6)]
    by_channel, reverse = some(rng, 0.4), z.form == "rows" and some(rng, 0.2)
    width = {"g": (z.b, z.t, h, k) if by_channel else (z.b, z.t, h), "gk": (z.b, z.t, h, k), "gv": (z.b, z.t, h, v)}

    def values(rng: Rng) -> Arrays:
        arrays = _qkv(rng, z, h, g, k, v, kind) | z.arrays(rng, (h, k, v))
        arrays |= {name: log_gates(rng, width[name]) for name in gates}
        return z.spoiled(arrays, (*QKV, *gates))

    return Drawn(values, given(return_state=True, reverse=True if reverse else None))


def recurrent(rng: Rng) -> Drawn:
    """Draws a call of `recurrent_attention`."""
    return gated(rng, ("g", "gk", "gv"))


def lightning(rng: Rng) -> Drawn:
    """Draws a call of `lightning_attention`."""
    z, (h, g, k, v), kind = Sequences(rng), _head_sizes(rng), dtype(rng)
    layers = int(rng.integers(1, 8))

    def values(rng: Rng) -> Arrays:
        return z.spoiled(_qkv(rng, z, h, g, k, v, kind) | z.arrays(rng, (h, k, v)), QKV)

    return Drawn(values, {"layer_idx": int(rng.integers(0, layers + 1)), "num_layers": layers, "return_state": True})


def _rwkv(rng: Rng, more: Callable[[Rng, tuple[int, ...]], Arrays]) -> Drawn:
    z, (h, g, k, v), kind = Sequences(rng), _head_sizes(rng), dtype(rng)
    reverse = z.form == "rows" and some(rng, 0.2)

    def values(rng: Rng) -> Arrays:
        tokens = _qkv(rng, z, h, g, k, v, kind)
        arrays = {name[0].replace("q", "r"): x for name, x in tokens.items()} | z.arrays(rng, (h, k, v))
        arrays |= {"w": log_gates(rng, (z.b, z.t, h, k))} | more(rng, (z.b, z.t, h, k))
        return z.spoiled(arrays, ("r", "k", "v", "w", "a", "b", "kk"))

    return Drawn(values, given(return_state=True, reverse=True if reverse else None))


def rwkv4(rng: Rng) -> Drawn:
    """Draws a call of `rwkv4`."""
    b, t, c, kind = int(rng.integers(1, 4)), tokens(rng, 150), pick(rng, (5, 16, 100)), dtype(rng)
    state, strength = some(rng, 0.5), pick(rng, (1.0, 30.0))

    def values(rng: Rng) -> Arrays:
        arrays: Arrays = {name: normal(rng, (c,)) for name in "wu"}
        arrays |= {"k": normal(rng, (b, t, c), kind, strength), "v": normal(rng, (b, t, c), kind)}
        if state:
            arrays["state"] = np.concatenate([0.5 + uniform(rng, (b, 2, c)), normal(rng, (b, 1, c))], axis=1)
        return arrays

    return Drawn(values, {"return_state": True})


def rwkv6(rng: Rng) -> Drawn:
    """Draws a call of `rwkv6`."""
    return _rwkv(rng, lambda rng, shape: {"u": normal(rng, shape[2:])})


def _directions(rng: Rng, shape: tuple[int, ...]) -> Any:
    """Returns vectors of length one, with which states do not grow."""
    vectors = normal(rng, shape)
    return vectors / np.maximum(np.linalg.norm(vectors, axis=-1, keepdims=True), 1e-6)


def rwkv7(rng: Rng) -> Drawn:
    """Draws a call of `rwkv7`."""
    return _rwkv(rng, lambda rng, shape: {name: _directions(rng, shape) for name in "ab"})


def rwkv7_mul(rng: Rng) -> Drawn:
    """Draws a call of `rwkv7_mul`."""
    return _rwkv(rng, lambda rng, shape: {"kk": _directions(rng, shape), "a": uniform(rng, shape)})


def _delta(rng: Rng, segments: bool) -> Drawn:
    z, (h, g, k, v), kind = Sequences(rng, forms=("rows",)), _head_sizes(rng), dtype(rng)
    decay, segments = pick(rng, ("none", "head", "channel")), segments and some(rng, 0.4)

    def values(rng: Rng) -> Arrays:
        arrays = _qkv(rng, z, h, g, k, v, kind) | z.arrays(rng, (h, k, v))
        arrays["beta"] = uniform(rng, (z.b, z.t, h))
        if decay != "none":
            arrays["decay"] = log_gates(rng, (z.b, z.t, h) if decay == "head" else (z.b, z.t, h, k))
        if segments:
            ids = segment_ids(rng, z.b, z.t)
            arrays |= {"seg_ids": ids, **{name: poison(arrays[name], ids < 0) for name in QKV}}
        return arrays

    return Drawn(values, {"use_qk_l2norm": True, "return_state": True})


def gated_delta(rng: Rng) -> Drawn:
    """Draws a call of `gated_delta_rule`."""
    return _delta(rng, segments=True)


def kernel_delta(rng: Rng) -> Drawn:
    """Draws a call of `kernel_delta_attention`."""
    return _delta(rng, segments=False)


def ragged_delta(rng: Rng) -> Drawn:
    """Draws a call of `ragged_gated_delta_rule`."""
    z, (h, g, k, v), kind = Sequences(rng, forms=("slots",)), _head_sizes(rng), dtype(rng)
    decay = pick(rng, ("none", "head", "channel"))

    def values(rng: Rng) -> Arrays:
        arrays = _qkv(rng, z, h, g, k, v, kind) | {"beta": uniform(rng, (1, z.t, h))}
        shape = {"none": None, "head": (1, z.t, h), "channel": (1, z.t, h, k)}[decay]
        arrays |= {} if shape is None else {"decay": log_gates(rng, shape)}
        arrays = z.spoiled(arrays | z.arrays(rng, (h, k, v), kind, "recurrent_state"), (*QKV, "beta", "decay"))
        arrays["query_start_loc"] = arrays.pop("cu_seqlens")
        return {name: x[0] if name in (*QKV, "beta", "decay") else x for name, x in arrays.items()}

    return Drawn(values, {"decay": None} if decay == "none" else {})


def state_space_v2(rng: Rng) -> Drawn:
    """Draws a call of `state_space_v2`."""
    z, (h, g), kind = Sequences(rng), heads(rng), dtype(rng)
    p, e, gate = pick(rng, CHANNELS), pick(rng, CHANNELS), some(rng, 0.3)

    def values(rng: Rng) -> Arrays:
        arrays = z.arrays(rng, (h, p, e))
        arrays |= {"x": normal(rng, (z.b, z.t, h, p), kind), "A": -np.exp(normal(rng, (h,))), "D": normal(rng, (h,))}
        arrays |= {name: normal(rng, (z.b, z.t, g, e), kind, e**-0.5) for name in "BC"}
        arrays["dt"] = 0.3 * np.log1p(np.exp(normal(rng, (z.b, z.t, h)))).astype(np.float32)
        arrays |= {"gate": normal(rng, (z.b, z.t, h * p), kind)} if gate else {}
        return arrays

    return Drawn(values, {})


def state_space_v1(rng: Rng) -> Drawn:
    """Draws a call of `state_space_v1`."""
    z, kind = Sequences(rng, 200), dtype(rng)
    i, e, gate = pick(rng, (8, 16, 24, 64, 100)), pick(rng, (1, 3, 4, 8, 16)), some(rng, 0.5)

    def values(rng: Rng) -> Arrays:
        arrays = z.arrays(rng, (i, e), kind)
        arrays |= {"hidden_states": normal(rng, (z.b, z.t, i), kind), "D": normal(rng, (i,), kind)}
        arrays |= {name: normal(rng, (z.b, z.t, e), kind) for name in "BC"}
        arrays["A"] = -np.exp(normal(rng, (i, e)) / 2).astype(kind)
        arrays["dt"] = np.log1p(np.exp(normal(rng, (z.b, z.t, i)) - 1)).astype(kind)
        arrays |= {"gate": normal(rng, (z.b, z.t, i), kind)} if gate else {}
        return arrays

    return Drawn(values, {})


def convolution(rng: Rng) -> Drawn:
    """Draws a call of `causal_conv1d`."""
    z, kind = Sequences(rng, 200, ("rows", "packed")), dtype(rng)
    c, w, bias = pick(rng, (8, 20, 64, 130)), int(rng.integers(2, 9)), some(rng, 0.5)

    def values(rng: Rng) -> Arrays:
        arrays = z.arrays(rng, (c, w - 1), kind)
        arrays |= {"x": normal(rng, (z.b, z.t, c), kind), "weight": normal(rng, (c, w), kind)}
        arrays |= {"bias": normal(rng, (c,), kind)} if bias else {}
        return arrays

    activation, state = some(rng, 0.5), some(rng, 0.5)
    return Drawn(values, given(activation="silu" if activation else None, return_state=True if state else None))


def network(rng: Rng, gates: int) -> Drawn:
    """Draws a call of `rnn`, `gru` or `lstm`, by their number of gates."""
    b, t, f, h = int(rng.integers(1, 4)), tokens(rng, 40), int(rng.integers(1, 40)), pick(rng, (8, 16, 33, 64))
    directions, kind = pick(rng, (1, 2)), dtype(rng)
    biases, state, lengths = (some(rng, 0.5) for _ in range(3))

    def values(rng: Rng) -> Arrays:
        arrays: Arrays = {
            "x": normal(rng, (b, t, f), kind),
            "weight_ih": normal(rng, (directions, gates * h, f), kind, f**-0.5),
            "weight_hh": normal(rng, (1, directions, gates * h, h), kind, h**-0.5),
        }
        names = ("bias_ih", "bias_hh") if biases else ()
        arrays |= {name: normal(rng, (1, directions, gates * h), kind) for name in names}
        arrays |= {"initial_hidden": normal(rng, (directions, b, h), kind)} if state else {}
        if lengths:
            arrays["seq_lengths"] = rng.integers(0, t + 1, b).astype(np.int32)
            arrays["x"] = poison(arrays["x"], np.arange(t) >= arrays["seq_lengths"][:, None])
        return arrays

    return Drawn(values, {})
