"""Attention with queries and keys of 192 and values of 128, as `flash_mla` makes it, on a GPU: TFLOP/s of both passes.

    python benchmarks/tiled_attention/flash_mla_gpu.py                    # a table; about a minute
    python benchmarks/tiled_attention/flash_mla_gpu.py --output results   # also results/flash_mla_gpu.md

`flash_attention` on the arrays that `flash_mla` makes, with the kernel that dispatch chooses and with Triton's, beside
cuDNN through `jax.nn` and PyTorch's SDPA (flash and cuDNN), each where it can do the call; and `flash_mla` as a whole,
with its projections, of which the attention alone counts as work. A side is timed only if its output and gradients
agree with float32 on the first KV head of the first row. Sides take turns in another order every round, and medians are
printed. Of each pair that attends, 2 * (192 + 128) operations count forward and 2 * (3 * 192 + 2 * 128) backward.
"""

import argparse
import dataclasses
import functools
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp

from ejkernel.modules import flash_mla

sys.path.append(str(Path(__file__).parents[1]))
import shared.report
from shared.gpu_cells import Cell
from tiled_attention import flash_attention_gpu as flash

ROPE, NOPE, LATENT = 64, 128, 512
"""Sizes of a key's parts, with and without rotary position, and of the latent vectors."""
SKIPPED = "tokamax", "flex", "packed"


@dataclasses.dataclass(frozen=True, kw_only=True)
class LatentCell(Cell):
    """A shape whose queries and keys are larger than its values."""

    rows: int = 1
    size: int = ROPE + NOPE
    value_size: int = 128

    @property
    def batch(self) -> int:
        return self.rows

    def __str__(self) -> str:
        return super().__str__().replace(f"D{self.size}", f"D{self.size}/{self.value_size}")

    @property
    def forward_flops(self) -> float:
        return 2.0 * self.rows * self.heads * (self.size + self.value_size) * self._num_attending_pairs(self.length)

    @property
    def both(self) -> float:
        """Operations of both passes, as a multiple of those of the forward pass."""
        return 1 + (3 * self.size + 2 * self.value_size) / (self.size + self.value_size)

    def inputs(self) -> tuple[jax.Array, ...]:
        """Query, key, value and the output's cotangent."""
        keys = jax.random.split(jax.random.key(0), 4)
        sizes = (self.size, self.size, self.value_size, self.value_size)
        heads = (self.heads, self.kv_heads, self.kv_heads, self.heads)
        shapes = [(self.rows, self.length, h, d) for h, d in zip(heads, sizes, strict=True)]
        return tuple(jax.random.normal(k, s, jnp.bfloat16) for k, s in zip(keys, shapes, strict=True))


def cells() -> Iterator[LatentCell]:
    """The shapes: a model's prefill, the same without a mask and with grouped heads, and a long row."""
    yield LatentCell(length=4096, heads=128, kv_heads=128)
    yield LatentCell(length=4096, heads=128, kv_heads=128, causal=False)
    yield LatentCell(length=16384, heads=32, kv_heads=8)


def whole(cell: LatentCell) -> tuple[Callable[..., Any], tuple[jax.Array, ...]]:
    """`flash_mla` of a cell, as a function of its arrays, and these."""
    keys = jax.random.split(jax.random.key(1), 6)
    heads, tokens = cell.kv_heads, (cell.rows, cell.length)
    arrays = (
        jax.random.normal(keys[0], (*tokens, cell.heads, cell.size), jnp.bfloat16),
        jax.random.normal(keys[1], (*tokens, LATENT), jnp.bfloat16),
        (jax.random.normal(keys[2], (LATENT, heads, NOPE)) * LATENT**-0.5).astype(jnp.bfloat16),
        (jax.random.normal(keys[3], (LATENT, heads, cell.value_size)) * LATENT**-0.5).astype(jnp.bfloat16),
        jax.random.normal(keys[4], (*tokens, ROPE), jnp.bfloat16),
        jax.random.normal(keys[5], (*tokens, cell.heads, cell.value_size), jnp.bfloat16),
    )

    def call(query: Any, latent: Any, w_kc: Any, w_vc: Any, k_rope: Any) -> jax.Array:
        return flash_mla(query, latent, w_kc, w_vc, None, k_rope, causal=cell.causal)

    return call, arrays


def whole_passes(cell: LatentCell) -> tuple[flash.Pass, flash.Pass]:
    """Both passes of `flash_mla`."""
    call, arrays = whole(cell)

    def both(*given: Any) -> Any:
        output, pull = jax.vjp(call, *given[:-1])
        return output, *pull(given[-1])

    forward = jax.jit(call).lower(*arrays[:-1]).compile()
    graded = jax.jit(both).lower(*arrays).compile()
    return functools.partial(forward, *arrays[:-1]), functools.partial(graded, *arrays)


def sides(cell: LatentCell, only: list[str]) -> dict[str, tuple[flash.Pass, flash.Pass]]:
    """Both passes of each side that can do a cell and is right."""
    wanted = functools.partial(flash.among, only)
    found = flash.correct_sides(
        cell, flash.compile_cell(cell, lambda name: wanted(name) and not any(word in name for word in SKIPPED))
    )
    if wanted("flash_mla"):
        with flash.leaving_out("flash_mla", cell):
            found["flash_mla"] = whole_passes(cell)
    return found


def measured(only: list[str], shapes: list[str]) -> Iterator[list[str]]:
    """A line for each side of each cell."""
    for cell in cells():
        if flash.among(shapes, str(cell)):
            yield from flash.medians(cell, sides(cell, only), cell.both)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--output", type=Path, help="folder for the table")
    for name, what in (("--only", "sides"), ("--shape", "shapes")):
        parser.add_argument(name, action="append", default=[], metavar="WORD", help=f"{what} whose name has it")
    options = parser.parse_args()
    if not shared.report.has_gpu():
        return
    heading, rows = f"{shared.report.heading()}\n{flash.versions()}\n", list[list[str]]()
    print(heading)
    for row in measured(options.only, options.shape):
        print("| " + " | ".join(row) + " |", flush=True)
        rows.append(row)
        if options.output:
            options.output.mkdir(parents=True, exist_ok=True)
            text = f"{heading}\n{shared.report.markdown_table(flash.COLUMNS, rows)}\n"
            (options.output / "flash_mla_gpu.md").write_text(text)


if __name__ == "__main__":
    main()
