"""Recurrences with their tokens split over the GPUs of one host, against one of these GPUs.

    python benchmarks/linear_recurrence/split_tokens_gpu.py           # one row of 131072 tokens
    python benchmarks/linear_recurrence/split_tokens_gpu.py --quick   # of 32768, few rounds
    python benchmarks/linear_recurrence/split_tokens_gpu.py --check   # a short row on any devices, no times

Both sides get the same bfloat16 numbers. Gates have the distribution of a layer's initialisation: Mamba's A from 1 to
16 and dt log-uniform from 1e-3 to 0.1, for Mamba-1, Mamba-2, the gated delta rule and KDA; log_sigmoid(normal) / 16 for
GLA (arXiv:2312.06635); the slopes of lightning attention. A shape is timed only if outputs and gradients of both sides
agree. Sides are interleaved, several calls a sample, and medians are printed.
"""

import functools
import sys
from argparse import Namespace
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from ejkernel.modules import (
    causal_conv1d,
    gated_delta_rule,
    gated_linear_attention,
    kernel_delta_attention,
    lightning_attention,
    state_space_v1,
    state_space_v2,
)

sys.path.append(str(Path(__file__).parents[1]))
import shared.report
import shared.turns

COLUMNS = ("operation", "pass", "one GPU ms", "split ms", "times one GPU")
TOLERANCE = 2e-2
"""Of the relative difference of bfloat16 results, in the Frobenius norm."""
SPLIT, WHOLE = P(None, "gpus"), P()

Inputs = dict[str, tuple[jax.Array, P]]
Call = Callable[..., Any]


class Draw:
    """Draws the arrays of a call of so many tokens; each array comes with the spec of its tokens."""

    def __init__(self, tokens: int) -> None:
        self.tokens, self.keys = tokens, iter(jax.random.split(jax.random.key(0), 20))

    def normal(self, *axes: int) -> tuple[jax.Array, P]:
        return jax.random.normal(next(self.keys), (1, self.tokens, *axes), jnp.float32).astype(jnp.bfloat16), SPLIT

    def dt(self, *axes: int) -> jax.Array:
        """Step sizes, log-uniform from 1e-3 to 0.1."""
        low, high = np.log(1e-3), np.log(0.1)
        return jnp.exp(jax.random.uniform(next(self.keys), (1, self.tokens, *axes), minval=low, maxval=high))

    def initial_gate(self, *axes: int) -> tuple[jax.Array, P]:
        """Log decays -A dt, with A uniform from 1 to 16 per head."""
        rates = jax.random.uniform(next(self.keys), (axes[0], *(1,) * (len(axes) - 1)), minval=1.0, maxval=16.0)
        return -rates * self.dt(*axes), SPLIT

    def tokens_of(self, heads: int, *, delta: bool = False) -> Inputs:
        inputs = {name: self.normal(heads, 128) for name in ("query", "key", "value")}
        if delta:
            inputs["beta"] = jax.nn.sigmoid(self.normal(heads)[0].astype(jnp.float32)), SPLIT
        return inputs


def _gla(draw: Draw, heads: int) -> tuple[Call, Inputs]:
    gate = jax.nn.log_sigmoid(draw.normal(heads, 128)[0].astype(jnp.float32)) / 16
    return gated_linear_attention, {**draw.tokens_of(heads), "g": (gate, SPLIT)}


def _lightning(draw: Draw, heads: int) -> tuple[Call, Inputs]:
    return functools.partial(lightning_attention, layer_idx=4, num_layers=32), draw.tokens_of(heads)


def _gated_delta(draw: Draw, heads: int) -> tuple[Call, Inputs]:
    return gated_delta_rule, {**draw.tokens_of(heads, delta=True), "decay": draw.initial_gate(heads)}


def _kda(draw: Draw, heads: int) -> tuple[Call, Inputs]:
    return kernel_delta_attention, {**draw.tokens_of(heads, delta=True), "decay": draw.initial_gate(heads, 128)}


def _mamba_2(draw: Draw, heads: int) -> tuple[Call, Inputs]:
    inputs = {"x": draw.normal(heads, 64), "A": (-jnp.linspace(1.0, 16.0, heads), WHOLE)}
    inputs |= {"B": draw.normal(1, 128), "C": draw.normal(1, 128), "D": (jnp.ones(heads), WHOLE)}
    inputs["dt"] = draw.dt(heads), SPLIT
    return lambda *args, **options: state_space_v2(*args, **options)[0], inputs


def _mamba_1(draw: Draw, heads: int) -> tuple[Call, Inputs]:
    channels = 128 * heads
    inputs = {"x": draw.normal(channels), "A": (-jnp.arange(1.0, 17.0) * jnp.ones((channels, 1)), WHOLE)}
    inputs |= {"B": draw.normal(16), "C": draw.normal(16), "D": (jnp.ones(channels), WHOLE)}
    inputs["dt"] = draw.dt(channels), SPLIT
    return lambda *args, **options: state_space_v1(*args, **options)[0], inputs


def _convolution(draw: Draw, heads: int) -> tuple[Call, Inputs]:
    weight = jax.random.normal(next(draw.keys), (128 * heads, 4), jnp.float32).astype(jnp.bfloat16) / 2
    return functools.partial(causal_conv1d, activation="silu"), {"x": draw.normal(128 * heads), "w": (weight, WHOLE)}


KINDS = {
    "lightning": _lightning,
    "GLA": _gla,
    "gated delta rule": _gated_delta,
    "KDA": _kda,
    "Mamba-2": _mamba_2,
    "Mamba-1": _mamba_1,
    "causal_conv1d": _convolution,
}


def graded(call: Call, cotangent: jax.Array, *arrays: jax.Array) -> tuple[Any, ...]:
    output, pull = jax.vjp(call, *arrays)
    return output, *pull(cotangent)


def sides(kind: str, tokens: int, heads: int, mesh: Any) -> dict[str, dict[str, Callable[[], Any]]]:
    """Returns the runs of both sides, by pass and side."""
    call, inputs = KINDS[kind](Draw(tokens), heads)
    specs = tuple(spec for _, spec in inputs.values())
    split = functools.partial(call, mesh=mesh, in_specs=specs, out_specs=SPLIT)
    first = [jax.device_put(x, mesh.devices.flat[0]) for x, _ in inputs.values()]
    placed = [jax.device_put(x, NamedSharding(mesh, spec)) for x, spec in inputs.values()]
    output = jax.eval_shape(call, *first)
    cotangent = jax.random.normal(jax.random.key(1), output.shape, jnp.float32).astype(output.dtype)
    runs: dict[str, dict[str, Callable[[], Any]]] = {"forward": {}, "with gradients": {}}
    for side, run, arrays, where in (
        ("one", call, first, mesh.devices.flat[0]),
        ("split", split, placed, NamedSharding(mesh, SPLIT)),
    ):
        runs["forward"][side] = functools.partial(jax.jit(run), *arrays)
        both = jax.jit(functools.partial(graded, run))
        runs["with gradients"][side] = functools.partial(both, jax.device_put(cotangent, where), *arrays)
    return runs


def difference(one: Any, other: Any) -> float:
    """Returns the largest relative difference of two trees of arrays."""
    pairs = zip(jax.tree.leaves(one), jax.tree.leaves(other), strict=True)
    return max(float(_relative_difference(x, jax.device_put(y, x.sharding))) for x, y in pairs)


@jax.jit
def _relative_difference(x: jax.Array, y: jax.Array) -> jax.Array:
    x, y = x.astype(jnp.float32), y.astype(jnp.float32)
    return jnp.linalg.norm((x - y).ravel()) / jnp.linalg.norm(x.ravel())


def rows(options: Namespace) -> Iterator[list[str]]:
    """Yields a line per operation and pass."""
    mesh = jax.make_mesh((jax.device_count(),), ("gpus",), (AxisType.Auto,))
    tokens, heads = (512, 2) if options.check else (32768 if options.quick else 131072, 16)
    for kind in KINDS:
        for which, runs in sides(kind, tokens, heads, mesh).items():
            off = difference(runs["one"](), runs["split"]())
            if not off < TOLERANCE:
                raise AssertionError(f"{kind}, {which}: a relative difference of {off:.2g}")
            if options.check:
                yield [kind, which, "right", f"{off:.1e}", ""]
            else:
                found = shared.turns.time_in_turns(runs, 3 if options.quick else 7)
                one, split = found["one"], found["split"]
                yield [kind, which, f"{one * 1e3:.2f}", f"{split * 1e3:.2f}", f"{one / split:.2f}"]


def main() -> None:
    """Prints the table."""
    flags = {"--quick": "fewer tokens and rounds", "--check": "a short row on any devices, no times"}
    options = shared.report.parse_options(__doc__, flags)
    if jax.device_count() < 2:
        print("split_tokens_gpu.py needs two devices: nothing was measured")
        return
    print(f"<!-- {jax.device_count()} devices -->")
    shared.report.print_rows_as_measured(COLUMNS, rows(options))


if __name__ == "__main__":
    main()
