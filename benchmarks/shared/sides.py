"""Two ways to compute the same thing, side by side: compiled, compared, then timed in turns."""

import argparse
import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import shared.report


def parse_options(description: str) -> argparse.Namespace:
    """The command line of a benchmark; everything then runs on the CPU."""
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--quick", action="store_true", help="small sizes, few repeats")
    chosen = parser.parse_args()
    jax.config.update("jax_platforms", "cpu")
    return chosen


def print_table_header(peer_name: str) -> None:
    """What the figures below were measured with, and the head of their table."""
    print(shared.report.heading())
    print("float32; medians of interleaved runs; temporary memory\n")
    columns = ("size", "pass", "ejkernel ms", f"{peer_name} ms", "speed-up", "ejkernel MB", f"{peer_name} MB")
    print(shared.report.markdown_table(columns, ()))


def print_comparison(
    size_label: str,
    our_call: Callable[..., Any],
    peer_call: Callable[..., Any],
    arrays: Sequence[Any],
    gradient_argnums: Sequence[int],
    repeats: int,
    tolerance: float = 2e-4,
) -> None:
    """Prints a line for the forward pass, and one for it and the gradients of `gradient_argnums` together.

    Raises:
        AssertionError: The two sides disagree.
    """
    for name, make in (
        ("forward", lambda f: f),
        ("forward + backward", lambda f: _value_and_gradients(f, gradient_argnums)),
    ):
        sides = [jax.jit(make(f)).lower(*arrays).compile() for f in (our_call, peer_call)]
        _assert_close(*(side(*arrays) for side in sides), tolerance)
        times: list[list[float]] = [[], []]
        for _ in range(repeats):
            for side, record in zip(sides, times, strict=True):
                start = time.perf_counter()
                jax.block_until_ready(side(*arrays))
                record.append((time.perf_counter() - start) * 1e3)
        one, other = (statistics.median(record) for record in times)
        memory = [f"{side.memory_analysis().temp_size_in_bytes / 1e6:.1f}" for side in sides]
        print(
            f"| {size_label} | {name} | {one:.1f} | {other:.1f} | {other / one:.2f} | {memory[0]} | {memory[1]} |",
            flush=True,
        )


def _value_and_gradients(call: Callable[..., Any], argnums: Sequence[int]) -> Callable[..., Any]:
    return jax.value_and_grad(lambda *a: sum(jnp.sum(x**2) for x in jax.tree.leaves(call(*a))), tuple(argnums))


def _assert_close(ours: Any, theirs: Any, tolerance: float) -> None:
    for x, y in zip(jax.tree.leaves(ours), jax.tree.leaves(theirs), strict=True):
        np.testing.assert_allclose(x, y, rtol=0, atol=tolerance * max(1.0, float(jnp.abs(y).max())))
