"""Block-sparse attention on a GPU, over windows and patterns: against flash attention and flex attention.

    python benchmarks/tiled_attention/blocksparse_attention_gpu.py  # a table; a minute or two
    # also results/blocksparse_attention_gpu.md
    python benchmarks/tiled_attention/blocksparse_attention_gpu.py --output results

Inputs, checks against float32 and timing are those of `flash_attention_gpu.py`: normal bfloat16 inputs, sides in
another order every round, medians, and only pairs that attend count.
"""

import argparse
import dataclasses
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from ejkernel.modules import blocksparse_attention
from ejkernel.types.sparse_masks import CausalMask, LocalMask, Mask, TileOccupancy, TileSpans

sys.path.append(str(Path(__file__).parents[1]))
import shared.report
from shared.gpu_cells import BLOCK, Cell
from shared.gpu_peers import peers
from tiled_attention import flash_attention_gpu

CELLS = (
    Cell(window=1024),
    Cell(length=32768, window=4352),
    Cell(pattern=(4, 1, 8)),
    Cell(length=32768, pattern=(16, 4, 8)),
)


@dataclasses.dataclass(frozen=True)
class BlockPattern(Mask):
    """The pattern of a cell, by blocks, without the causal mask."""

    cell: Cell

    def allowed(self, query: Any, key: Any, sizes: tuple[int, int]) -> jax.Array:
        q = query + jnp.arange(sizes[0], dtype=jnp.int32)[:, None]
        return self.cell.attends(q // BLOCK, (key + jnp.arange(sizes[1], dtype=jnp.int32)) // BLOCK)

    def tiles(self, queries: TileSpans, keys: TileSpans) -> TileOccupancy:
        ends = [(q[:, None] // BLOCK, k // BLOCK) for q in (queries.low, queries.high) for k in (keys.low, keys.high)]
        seen = [self.cell.attends(*both) for both in ends]  # no tile is longer than two blocks
        return TileOccupancy(np.any(seen, axis=0), np.all(seen, axis=0))


def blocksparse(cell: Cell, platform: str) -> Callable[..., jax.Array]:
    """Our call on a platform, with heads after tokens as the other sides have them."""
    shape = cell.length, cell.length
    pattern = BlockPattern(shape, cell) & CausalMask(shape)
    if cell.pattern is None:
        assert cell.window is not None
        pattern = LocalMask(shape, (cell.window - 1, 0))

    def call(q: Any, k: Any, v: Any) -> jax.Array:
        heads_first = (x.swapaxes(1, 2) for x in (q, k, v))
        options: Any = {"mask_builder": pattern, "causal": False, "platform": platform}
        return blocksparse_attention(*heads_first, **options).swapaxes(1, 2)

    return call


def compile_cell(cell: Cell) -> flash_attention_gpu.Compiled:
    """Compiles a cell for all sides."""
    shapes = tuple(jax.eval_shape(cell.inputs))
    dense = {} if cell.pattern else {"ejkernel flash, window": flash_attention_gpu.attention(cell, "auto")}
    calls: dict[str, Any] = dense
    calls |= {f"ejkernel block-sparse {name}": blocksparse(cell, name) for name in ("auto", "triton")}
    sides: dict[str, Any] = {}
    for name, call in calls.items():
        with flash_attention_gpu.leaving_out(name, cell):
            sides[name] = flash_attention_gpu.compiled(call, shapes)
    sides |= flexed(cell)
    truth, error = flash_attention_gpu.truth(cell, shapes, blocksparse), flash_attention_gpu.error(cell, shapes)
    return flash_attention_gpu.Compiled(jax.jit(cell.inputs).lower().compile(), truth, error, sides)


def flexed(cell: Cell) -> dict[str, Any]:
    """Flex attention, where it is installed."""
    return {name: call for name, call in peers(cell).items() if "flex" in name}


def main() -> None:
    parser = argparse.ArgumentParser(description="Block-sparse attention over windows and patterns on a GPU.")
    parser.add_argument("--output", type=Path, help="folder for the table")
    options = parser.parse_args()
    if not shared.report.has_gpu():
        return
    heading = f"{shared.report.heading()}\n{flash_attention_gpu.versions()}\n"
    rows = [row for cell in CELLS for row in flash_attention_gpu.timed(cell, compile_cell(cell))]
    text = f"{heading}\n{shared.report.markdown_table(flash_attention_gpu.COLUMNS, rows)}\n"
    print(text, flush=True)
    if options.output:
        options.output.mkdir(parents=True, exist_ok=True)
        (options.output / "blocksparse_attention_gpu.md").write_text(text)


if __name__ == "__main__":
    main()
