"""RWKV's recurrences on a GPU, compared with gated linear attention on the same arrays.

    python benchmarks/linear_recurrence/rwkv_gpu.py          # B4 S8192 H16, heads of 64
    python benchmarks/linear_recurrence/rwkv_gpu.py --check  # a short row on any device, no times
    python benchmarks/linear_recurrence/rwkv_gpu.py --fla    # flash-linear-attention's chunk_rwkv6 and 7 too
    # one operation; processes may compile at the same time and measure in turn (EJKERNEL_BENCH_LOCK names a file)
    python benchmarks/linear_recurrence/rwkv_gpu.py --only rwkv7_mul

Log decays are of three strengths: -exp(uniform(-6, 0)) per channel, about the range of a trained RWKV-6; those of a
fresh RWKV-7 layer, -exp(-0.5) sigmoid(normal), which are bounded; and harsh ones, -exp(2 normal), of which 2% are -inf.
Flash-linear-attention runs with the bounded ones, as `safe_gate` asks, after its own autotuning, which takes minutes
(the configurations of a kernel are compiled in several threads).
Outputs are compared with the reference in float32 on a short row first. Sides are interleaved, several calls a sample,
and medians are printed.
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

from ejkernel.modules import gated_linear_attention, rwkv4, rwkv6, rwkv7_mul
from ejkernel.ops.plugins import registry

sys.path.append(str(Path(__file__).parents[1]))
import shared.gpu_peers
import shared.report
import shared.turns

COLUMNS = ("operation", "forward ms", "with gradients ms")
TOLERANCE = 2e-2
"""Of the relative difference of bfloat16 results, in the Frobenius norm."""
HEAD_DIM = 64
WHICH = ("forward", "both")

FIELDS: dict[Callable[..., Any], tuple[str, ...]] = {
    gated_linear_attention: ("r", "k", "v", "w"),
    rwkv6: ("r", "k", "v", "w", "u"),
    rwkv7_mul: ("r", "w", "k", "v", "kk", "a"),
}
"""The arrays of each operation, in the order of its arguments."""


def bounded_decays(key: jax.Array, shape: tuple[int, ...]) -> jax.Array:
    """Returns log decays as RWKV-7's layers compute them, from a normal distribution."""
    return -jnp.exp(-0.5) * jax.nn.sigmoid(jax.random.normal(key, shape))


def harsh_decays(key: jax.Array, shape: tuple[int, ...]) -> jax.Array:
    """Returns log decays of all strengths, of which 2% forget."""
    forgets = jax.random.uniform(jax.random.fold_in(key, 1), shape) < 0.02
    return jnp.where(forgets, -jnp.inf, -jnp.exp(2 * jax.random.normal(key, shape)))


def trained_decays(key: jax.Array, shape: tuple[int, ...]) -> jax.Array:
    """Returns log decays of about the range of a trained RWKV-6."""
    return -jnp.exp(jax.random.uniform(key, shape, minval=-6.0, maxval=0.0))


DECAYS = {"trained": trained_decays, "bounded": bounded_decays, "harsh": harsh_decays}


def inputs(batch: int, tokens: int, heads: int) -> dict[str, jax.Array]:
    """Returns arrays [B, T, H, 64] in bfloat16, log decays `w` in float32 and the bonus `u` [H, 64]."""
    keys = jax.random.split(jax.random.key(0), 7)
    shape = (batch, tokens, heads, HEAD_DIM)
    r, k, v, kk, a = (jax.random.normal(key, shape) for key in keys[:5])
    arrays = {
        "r": r,
        "k": k * HEAD_DIM**-0.5,
        "v": v,
        "kk": kk / jnp.linalg.norm(kk, axis=-1, keepdims=True),
        "a": jax.nn.sigmoid(a),
    }
    decays = trained_decays(keys[5], shape)
    bonus = jax.random.normal(keys[6], (heads, HEAD_DIM))
    return {name: x.astype(jnp.bfloat16) for name, x in arrays.items()} | {"w": decays, "u": bonus}


def difference(operation: Callable[..., Any]) -> float:
    """Returns the relative difference of an operation's output from its reference in float32, on a short row."""
    small = inputs(1, 300, 2)
    got = np.asarray(jax.jit(operation)(*(small[name] for name in FIELDS[operation])), np.float32)
    op = registry().op(operation.__name__)
    wide = (small[name].astype(jnp.float32) for name in FIELDS[operation])
    with jax.default_matmul_precision("highest"):
        want = np.asarray(
            op.reference(op.arguments(**dict(zip(op.signature.parameters, wide, strict=False)))), np.float32
        )
    return float(np.linalg.norm(got - want) / np.linalg.norm(want))


def graded(operation: Callable[..., Any], *arrays: jax.Array) -> Any:
    """Returns the gradients of all arrays, of the sum of the outputs."""
    total = lambda *x: jnp.sum(operation(*x).astype(jnp.float32))  # noqa: E731
    return jax.grad(total, tuple(range(len(arrays))))(*arrays)


def fla_sides(names: list[str], arrays: dict[str, jax.Array]) -> dict[str, shared.turns.TimedCall]:
    """Returns both passes of flash-linear-attention's form of each operation; `chunk_rwkv7` also has `safe_gate`."""
    shared.gpu_peers.keep_triton_cache()
    shared.gpu_peers.compile_configurations_in_parallel()
    import torch
    from fla.ops.rwkv6 import chunk_rwkv6
    from fla.ops.rwkv7 import chunk_rwkv7

    rate, direction = arrays["a"], arrays["kk"]
    of_rwkv6 = [arrays[name] for name in ("r", "k", "v", "w", "u")]
    of_rwkv7 = [*(arrays[name] for name in ("r", "w", "k", "v")), -direction, direction * rate]

    def passes(operation: Any, jax_arrays: list[jax.Array], **options: Any) -> tuple[shared.turns.TimedCall, ...]:
        tensors = [torch.from_dlpack(x).clone() for x in jax_arrays]
        leaves = [x.clone().requires_grad_() for x in tensors]

        def forward() -> Any:
            with torch.no_grad():
                return operation(*tensors, scale=HEAD_DIM**-0.5, **options)[0]

        def both() -> Any:
            output = operation(*leaves, scale=HEAD_DIM**-0.5, **options)[0]
            return torch.autograd.grad(output, leaves, torch.ones_like(output))

        return forward, both

    calls = {}
    if "rwkv6" in names:
        calls["fla chunk_rwkv6"] = passes(chunk_rwkv6, of_rwkv6)
    if "rwkv7_mul" in names:
        calls["fla chunk_rwkv7"] = passes(chunk_rwkv7, of_rwkv7)
        calls["fla chunk_rwkv7 safe_gate"] = passes(chunk_rwkv7, of_rwkv7, safe_gate=True, chunk_size=64)
    return {f"{name} {which}": call for name, both in calls.items() for which, call in zip(WHICH, both, strict=True)}


def chosen_operations(options: Namespace) -> list[Callable[..., Any]]:
    """Returns the operations to measure."""
    return [operation for operation in FIELDS if options.only in ("", operation.__name__)]


def library_sides(
    operations: list[Callable[..., Any]], large: dict[str, jax.Array]
) -> Iterator[tuple[str, shared.turns.TimedCall]]:
    """Yields both passes of each operation with decays of each strength."""
    for operation in operations:
        fields = FIELDS[operation]
        forward, both = jax.jit(operation), jax.jit(functools.partial(graded, operation))
        for strength, decays in DECAYS.items():
            arrays = large | {"w": decays(jax.random.key(2), large["w"].shape)}
            for which, call in zip(WHICH, (forward, both), strict=True):
                yield (
                    f"{operation.__name__}, {strength} {which}",
                    functools.partial(call, *(arrays[x] for x in fields)),
                )


def rows(options: Namespace) -> Iterator[list[str]]:
    """Yields a line per operation."""
    for operation in chosen_operations(options):
        off = difference(operation)
        if not off < TOLERANCE:
            raise AssertionError(f"{operation.__name__}: a relative difference of {off:.2g}")
        if options.check:
            yield [operation.__name__, "right", f"{off:.1e}"]
    if options.check:
        return
    large = inputs(4, 8192, 16)
    sides = dict(library_sides(chosen_operations(options), large))
    if options.fla:
        names = [operation.__name__ for operation in chosen_operations(options)]
        sides |= fla_sides(names, large | {"w": bounded_decays(jax.random.key(2), large["w"].shape)})
    took = shared.turns.time_in_turns(sides, 5)
    for name in dict.fromkeys(side.rpartition(" ")[0] for side in sides):
        yield [name, *(f"{took[f'{name} {which}'] * 1e3:.2f}" for which in WHICH)]
    if options.only in ("", "rwkv4"):
        yield rwkv4_row()


def rwkv4_row() -> list[str]:
    """Returns the line of RWKV-4, forward."""
    key, value = jax.random.normal(jax.random.key(1), (2, 4, 2048, 1024))
    zeros = jnp.zeros(1024)
    scan = {"rwkv4": functools.partial(jax.jit(rwkv4), zeros, zeros, key, value)}
    return ["rwkv4, B4 S2048 C1024", f"{shared.turns.time_in_turns(scan, 5)['rwkv4'] * 1e3:.2f}", ""]


def main() -> None:
    """Prints the table."""
    options = shared.report.parse_options(
        __doc__,
        {
            "--check": "a short row on any device, no times",
            "--fla": "flash-linear-attention's operations next to them, in the same process",
        },
        {"--only": ("", "one operation")},
    )
    shared.report.print_rows_as_measured(COLUMNS, rows(options))


if __name__ == "__main__":
    main()
