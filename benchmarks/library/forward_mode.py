"""Forward mode on the device that is there: time and memory of `jax.jvp` and of Hessian-vector products.

    python benchmarks/library/forward_mode.py  # 4096 tokens
    python benchmarks/library/forward_mode.py --quick  # 512

Every argument has a tangent. Each tangent is compared with a difference of outputs before anything is timed; sides are
timed in turns, and medians are printed as multiples of the forward pass by XLA.
"""

import argparse
import functools
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from ejkernel.modules import flash_attention, gla_attention, grouped_matmul
from ejkernel.ops import forward_mode

sys.path.append(str(Path(__file__).parents[1]))
import shared.report

COLUMNS = ("call", "forward ms", "jvp", "gradient", "Hessian-vector product", "forward MB", "jvp MB", "product MB")


def calls(length: int) -> dict[str, tuple[Callable[..., jax.Array], tuple[jax.Array, ...]]]:
    """The operations with their arguments."""
    tokens = tuple(jax.random.normal(jax.random.key(0), (3, 1, length, 8, 64)))
    rows, matrices = tokens[0].reshape(-1, 512), 0.05 * jax.random.normal(jax.random.key(1), (8, 512, 512))
    groups = jnp.full(8, length // 8, jnp.int32)
    return {
        "attention": (functools.partial(flash_attention, platform="xla"), tokens),
        "attention, causal": (functools.partial(flash_attention, platform="xla", causal=True), tokens),
        "gated linear attention": (
            lambda q, k, v: gla_attention(q, k, v, -jax.nn.softplus(k), platform="xla"),
            tokens,
        ),
        "grouped matmul": (lambda x, w: grouped_matmul(x, w, groups, platform="xla"), (rows, matrices)),
    }


def programs(call: Callable[..., jax.Array], primals: tuple[Any, ...], tangents: tuple[Any, ...]) -> list[Any]:
    """The forward pass, `jax.jvp`, the gradient and the Hessian-vector product, compiled."""

    def gradient(*primals: jax.Array) -> Any:
        return jax.grad(lambda *primals: jnp.mean(call(*primals) ** 2), tuple(range(len(primals))))(*primals)

    sides = (
        lambda primals, _: call(*primals),
        lambda primals, tangents: jax.jvp(call, primals, tangents),
        lambda primals, _: gradient(*primals),
        lambda primals, tangents: jax.jvp(gradient, primals, tangents)[1],
    )
    with forward_mode():
        return [jax.jit(side).lower(primals, tangents).compile() for side in sides]


def row(name: str, call: Callable[..., jax.Array], primals: tuple[Any, ...], repeats: int) -> tuple[str, ...]:
    """A line of the table."""
    keys = jax.random.split(jax.random.key(2), len(primals))
    tangents = tuple(jax.random.normal(key, x.shape) * x.std() for key, x in zip(keys, primals, strict=True))
    compiled = programs(call, primals, tangents)
    check(compiled, primals, tangents)
    times: list[list[float]] = [[] for _ in compiled]
    for _ in range(repeats):
        for side, record in zip(compiled, times, strict=True):
            start = time.perf_counter()
            jax.block_until_ready(side(primals, tangents))
            record.append((time.perf_counter() - start) * 1e3)
    forward, *others = map(statistics.median, times)
    memory = [f"{side.memory_analysis().temp_size_in_bytes / 1e6:.1f}" for side in compiled]
    return (name, f"{forward:.1f}", *(f"{t / forward:.2f}" for t in others), memory[0], memory[1], memory[3])


def check(compiled: list[Any], primals: tuple[Any, ...], tangents: tuple[Any, ...]) -> None:
    """Compares a tangent with a central difference in float32, of which rounding leaves about three digits."""
    step, forward = 1e-2, compiled[0]
    ends = [
        forward(tuple(x + sign * step * t for x, t in zip(primals, tangents, strict=True)), tangents)
        for sign in (1, -1)
    ]
    want = (ends[0] - ends[1]) / (2 * step)
    got = compiled[1](primals, tangents)[1]
    error = float(jnp.linalg.norm((got - want).ravel()) / jnp.linalg.norm(want.ravel()))
    np.testing.assert_array_less(error, 2e-2)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="512 tokens, few repeats")
    quick = parser.parse_args().quick
    print(shared.report.heading())
    print("float32; times after the first as multiples of the forward pass; temporary memory\n")
    print(shared.report.markdown_table(COLUMNS, ()))
    for name, (call, primals) in calls(512 if quick else 4096).items():
        print("| " + " | ".join(row(name, call, primals, 3 if quick else 7)) + " |", flush=True)


if __name__ == "__main__":
    main()
