"""Forward mode of attention on a GPU: `jax.jvp` in a `forward_mode` block against the forward pass.

    python benchmarks/tiled_attention/forward_mode_gpu.py           # the table
    python benchmarks/tiled_attention/forward_mode_gpu.py --sizes 128   # its rows with heads of 128
    python benchmarks/tiled_attention/forward_mode_gpu.py --check   # small calls on any device, no times

Query, key and value have tangents. Every side gets the same bfloat16 arrays. Its output and tangent are compared with
those of XLA in float32 on a short row before anything is timed. Sides are interleaved, several calls per sample, and
medians are printed. "Forward" is the kernel that dispatch chooses without tangents. Memory is what the compiled
function needs in addition to arguments and results.
"""

import dataclasses
import functools
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from ejkernel.modules import flash_attention
from ejkernel.ops import forward_mode

sys.path.append(str(Path(__file__).parents[1]))
import shared.report
import shared.turns

COLUMNS = ("shape", "side", "ms", "of the forward pass", "memory MB")
TOLERANCE = 2e-2
"""Of the relative difference of bfloat16 results, in the Frobenius norm."""


@dataclasses.dataclass(frozen=True)
class Shape:
    """A self-attention with as many KV heads as query heads."""

    batch: int
    length: int
    heads: int
    size: int
    causal: bool

    def __str__(self) -> str:
        mask = "causal" if self.causal else "full"
        return f"B{self.batch} S{self.length} H{self.heads} D{self.size} {mask}"

    def arrays(self, seed: int) -> tuple[jax.Array, ...]:
        """Returns normal queries, keys and values, or tangents of them."""
        shape = (3, self.batch, self.length, self.heads, self.size)
        return tuple(jax.random.normal(jax.random.key(seed), shape, jnp.bfloat16))


HEAD_DIMS = "64,128"


def shapes(head_dims: str) -> tuple[Shape, ...]:
    """Returns what is measured."""
    return tuple(Shape(4, 4096, 16, int(size), causal) for size in head_dims.split(",") for causal in (False, True))


def sides(shape: Shape) -> dict[str, Callable[..., Any]]:
    """Functions of arguments and tangents, by name."""
    attend = functools.partial(flash_attention, causal=shape.causal)

    def derive(platform: str | None) -> Callable[..., Any]:
        return lambda primals, tangents: jax.jvp(functools.partial(attend, platform=platform), primals, tangents)

    return {
        "forward": lambda primals, _: attend(*primals),
        "jvp": derive(None),
        "jvp, xla": derive("xla"),
    }


def check(shape: Shape, calls: dict[str, Callable[..., Any]]) -> None:
    """Compares outputs and tangents of a short row with the reference in float32."""
    short = dataclasses.replace(shape, batch=1, length=256, heads=2)
    primals, tangents = short.arrays(0), short.arrays(1)
    wide = tuple(tuple(x.astype(jnp.float32) for x in arrays) for arrays in (primals, tangents))
    attend = functools.partial(flash_attention, causal=shape.causal, platform="xla")
    with forward_mode(), jax.default_matmul_precision("highest"):
        want = jax.jit(functools.partial(jax.jvp, attend))(*wide)
        for name, call in calls.items():
            got = jax.jit(call)(primals, tangents)
            for a, b in zip(jax.tree.leaves(got), want, strict=False):
                error = jnp.linalg.norm((a.astype(jnp.float32) - b).ravel()) / jnp.linalg.norm(b.ravel())
                np.testing.assert_array_less(error, TOLERANCE, f"{shape}, {name}")


def measure(shape: Shape) -> Iterator[tuple[str, ...]]:
    """Yields a line for each side."""
    calls, primals, tangents = sides(shape), shape.arrays(0), shape.arrays(1)
    check(shape, calls)
    with forward_mode():
        compiled = {name: jax.jit(call).lower(primals, tangents).compile() for name, call in calls.items()}
    timed = {name: functools.partial(program, primals, tangents) for name, program in compiled.items()}
    medians = {name: 1e3 * seconds for name, seconds in shared.turns.time_in_turns(timed, 7).items()}
    for name, program in compiled.items():
        analysis: Any = program.memory_analysis()
        ratio = medians[name] / medians["forward"]
        yield str(shape), name, f"{medians[name]:.3f}", f"{ratio:.2f}", f"{analysis.temp_size_in_bytes / 1e6:.0f}"


def main() -> None:
    """Prints the table."""
    options = shared.report.parse_options(
        __doc__,
        {"--check": "compare small calls, without times, on any device"},
        {"--sizes": (HEAD_DIMS, "head dimensions, with commas between them")},
    )
    if options.check:
        for shape in shapes(options.sizes):
            check(shape, sides(shape))
        return
    shared.report.print_rows_as_measured(COLUMNS, (row for x in shapes(options.sizes) for row in measure(x)))


if __name__ == "__main__":
    main()
