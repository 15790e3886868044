"""The expert layer of `examples/moe.py` on GPUs: what routing, sorting and un-sorting add to its grouped products.

    python benchmarks/moe_gpu.py            # one device, and all of them where there are several

bfloat16, tokens and weights normal. The grouped products are those of the same groups alone. The rate counts the three
products of M rows, three times with gradients; `share` is the products' time in that of the layer.
"""

import concurrent.futures
import functools
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import _report
import jax
import jax.numpy as jnp

sys.path.append(str(Path(__file__).parents[1] / "examples"))

import moe

COLUMNS = ("layer", "pass", "side", "ms", "rate", "share")
LAYERS = ((8192, 128, 2048, 768, 8), (16384, 8, 4096, 14336, 2))
"""Tokens, experts, size, inner size and experts a token: of Qwen3-30B-A3B and of Mixtral."""


def median(run: Callable[[], Any], rounds: int = 7) -> float:
    """Seconds of a call, of several in a row."""
    jax.block_until_ready(run())
    samples = []
    for _ in range(rounds):
        start = time.perf_counter()
        made = [run() for _ in range(5)][-1]
        jax.block_until_ready(made)
        samples.append((time.perf_counter() - start) / 5)
    return statistics.median(samples)


def graded(call: Callable[..., jax.Array]) -> Callable[..., Any]:
    """A call and its gradients."""

    def run(*arrays: Any) -> Any:
        output, pullback = jax.vjp(call, *arrays)
        return output, pullback(output)

    return run


def measure(tokens: int, experts: int, size: int, inner: int, top_k: int) -> None:
    """Prints the lines of one layer."""
    layer = moe.init(jax.random.key(0), experts, size, inner, top_k, jnp.bfloat16)
    x = jax.random.normal(jax.random.key(1), (tokens, size), jnp.bfloat16)
    chosen = moe.route(layer, x)[0].reshape(-1)
    sizes = jnp.bincount(chosen, length=experts).astype(jnp.int32)
    rows = jax.random.normal(jax.random.key(2), (tokens * top_k, size), jnp.bfloat16)
    products = functools.partial(lambda sizes, layer, rows: moe.mlp(layer, rows, sizes), sizes)
    sides: dict[str, tuple[Callable[..., jax.Array], tuple[Any, ...]]] = {
        "products alone": (products, (layer, rows)),
        "one device": (moe.moe, (layer, x)),
    }
    if jax.device_count() > 1:
        mesh = jax.make_mesh((jax.device_count(),), ("experts",), axis_types=(jax.sharding.AxisType.Auto,))
        sides["all devices"] = (functools.partial(moe.sharded, mesh, "experts"), (layer, x))
    operations = 6.0 * tokens * top_k * size * inner
    passes = {"forward": (lambda f: f, 1), "with gradients": (graded, 3)}
    with concurrent.futures.ThreadPoolExecutor(8) as compilers:
        compiled = {
            (name, side): compilers.submit(jax.jit(wrap(call)).lower(*arrays).compile)
            for name, (wrap, _) in passes.items()
            for side, (call, arrays) in sides.items()
        }
    for name, (_, factor) in passes.items():
        times = {
            side: median(functools.partial(compiled[name, side].result(), *arrays))
            for side, (_, arrays) in sides.items()
        }
        for side, seconds in times.items():
            label = f"T{tokens} E{experts} D{size} F{inner} k{top_k}"
            rate, share = factor * operations / seconds / 1e12, times["products alone"] / seconds
            print(f"| {label} | {name} | {side} | {seconds * 1e3:.3f} | {rate:.0f} TFLOP/s | {share:.2f} |", flush=True)


def main() -> None:
    """Prints the table."""
    if jax.default_backend() != "gpu":
        print("moe_gpu.py needs a GPU: nothing was measured")
        return
    print(_report.heading())
    print(_report.markdown_table(COLUMNS, ()), flush=True)
    for layer in LAYERS:
        measure(*layer)


if __name__ == "__main__":
    main()
