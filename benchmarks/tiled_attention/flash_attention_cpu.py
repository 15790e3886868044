"""Flash attention on a CPU against `jax.nn.dot_product_attention`: time, and temporary memory of the gradient.

    python benchmarks/tiled_attention/flash_attention_cpu.py  # sequences of 2048, 4096 and 8192; takes some minutes
    python benchmarks/tiled_attention/flash_attention_cpu.py --quick  # 512 and 1024

Both sides get the same random inputs, are compiled, and must agree before anything is timed. Runs are interleaved, so a
noisy machine disturbs both; the medians are printed.
"""

import argparse
import functools
import os
import platform
import statistics
import sys
import time
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from ejkernel.modules import flash_attention

MASKS: dict[str, dict[str, Any]] = {
    "full": {},
    "causal": {"causal": True},
    "window 512": {"sliding_window": 512},
    "causal, window 512": {"causal": True, "sliding_window": (512, 0)},
}


def jax_nn(query: jax.Array, key: jax.Array, value: jax.Array, *, causal: bool = False, sliding_window: Any = None):
    return jax.nn.dot_product_attention(
        query, key, value, is_causal=causal, local_window_size=sliding_window, implementation="xla"
    )


def compiled(attention: Callable[..., jax.Array], inputs: tuple[jax.Array, ...], gradient: bool, mask: dict[str, Any]):
    """The attention (or its gradient with respect to query, key and value), ready to run."""
    call = functools.partial(attention, **mask)
    if gradient:
        call = jax.grad(lambda *inputs: jnp.sum(functools.partial(attention, **mask)(*inputs) ** 2), (0, 1, 2))
    return jax.jit(call).lower(*inputs).compile()


def check(ours: Any, theirs: Any) -> None:
    """Stops the benchmark if the two sides disagree."""
    for x, y in zip(jax.tree.leaves(ours), jax.tree.leaves(theirs), strict=True):
        np.testing.assert_allclose(x, y, rtol=0, atol=1e-4 * max(1.0, float(jnp.abs(y).max())))


def interleaved(calls: list[Callable[..., Any]], inputs: tuple[jax.Array, ...], repeats: int) -> list[float]:
    """Median milliseconds of each call."""
    times: list[list[float]] = [[] for _ in calls]
    for _ in range(repeats):
        for call, record in zip(calls, times, strict=True):
            start = time.perf_counter()
            jax.block_until_ready(call(*inputs))
            record.append((time.perf_counter() - start) * 1e3)
    return [statistics.median(record) for record in times]


def rows(length: int, gradient: bool, repeats: int):
    """One line of the table for every mask."""
    inputs = tuple(jax.random.normal(jax.random.key(0), (3, 1, length, 8, 64)))
    calls = [compiled(side, inputs, gradient, mask) for mask in MASKS.values() for side in (flash_attention, jax_nn)]
    for ours, theirs in zip(calls[::2], calls[1::2], strict=True):
        check(ours(*inputs), theirs(*inputs))
    times = interleaved(calls, inputs, repeats)
    memory = [call.memory_analysis().temp_size_in_bytes / 1e6 for call in calls]
    for n, name in enumerate(MASKS):
        ours, theirs = times[2 * n : 2 * n + 2]
        ratios = f"{theirs / ours:.2f}", f"{ours / times[0]:.2f}"
        numbers = f"{ours:.1f}", f"{theirs:.1f}", *ratios, *(f"{size:.1f}" for size in memory[2 * n : 2 * n + 2])
        yield [str(length), "forward + backward" if gradient else "forward", name, *numbers]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="short sequences, few repeats")
    options = parser.parse_args()
    jax.config.update("jax_platforms", "cpu")
    print(f"{platform.processor() or platform.machine()}, {os.cpu_count()} CPUs, Python {platform.python_version()}")
    print(f"jax {jax.__version__}; batch 1, 8 heads, head size 64, float32")
    print(f"command: python {' '.join(sys.argv)}\n")
    print("| length | pass | mask | ejkernel ms | jax.nn ms | speed-up | of full | ejkernel MB | jax.nn MB |")
    print("|---|---|---|---|---|---|---|---|---|")
    for length in (512, 1024) if options.quick else (2048, 4096, 8192):
        for gradient in (False, True):
            for row in rows(length, gradient, 3 if options.quick else 5):
                print(f"| {' | '.join(row)} |", flush=True)


if __name__ == "__main__":
    main()
