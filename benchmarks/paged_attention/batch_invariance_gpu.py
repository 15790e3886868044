"""Paged attention in a `batch_invariant` block on a GPU: its cost with each kernel, and the bits of rows.

    python benchmarks/paged_attention/batch_invariance_gpu.py                 # the table
    python benchmarks/paged_attention/batch_invariance_gpu.py --cells 0:8     # some of its calls
    python benchmarks/paged_attention/batch_invariance_gpu.py --check         # small calls on any device, no times

Each call runs outside of the block with the kernel that dispatch chooses, and in the block with each backend,
interleaved; "times" is the multiple of the first. A program has several calls, each with pages of its own. Before it is
timed, rows of a side are compared bit for bit: the last sequence alone with the same sequence in the batch, and the
newest token of each sequence by a call of one token with the same token of a chunk. The line of the first side is the
control: outside of the block, numbers differ wherever splits depend on the batch.
"""

import argparse
import contextlib
import dataclasses
import functools
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from ejkernel import explain
from ejkernel.modules import page_attention, unified_attention
from ejkernel.ops import batch_invariant

sys.path.append(str(Path(__file__).parents[1]))
import shared.report
from paged_attention.paged_attention_gpu import Cell
from shared.turns import time_in_turns

COLUMNS = ("call", "side", "kernel", "ms", "times", "a sequence alone", "one token")
PLATFORMS = ("pallas", "triton")
SAMPLES = 5


@dataclasses.dataclass(frozen=True)
class Side:
    """A way to compute a call.

    Attributes:
        cell: The call.
        in_block: Whether it runs in a `batch_invariant` block.
        platform: The backend; None for the one that dispatch chooses.
    """

    cell: Cell
    in_block: bool
    platform: str | None

    def __str__(self) -> str:
        return f"in the block, {self.platform}" if self.in_block else "as chosen"

    def block(self) -> Any:
        """Returns the context of its calls."""
        return batch_invariant() if self.in_block else contextlib.nullcontext()

    def attend(self, query: jax.Array, *arrays: jax.Array) -> jax.Array:
        """Returns the output of one call of chunks, or of decoding."""
        keys, values, lengths, tables, starts = arrays
        if query.shape[0] == lengths.shape[0]:
            return page_attention(query, keys, values, lengths, tables, platform=self.platform)
        return unified_attention(query, keys, values, lengths, tables, starts, platform=self.platform)

    def run(self, query: jax.Array, *arrays: jax.Array) -> jax.Array:
        """Returns the output of several calls, the output of one of which is the query of the next."""
        keys, values, lengths, tables, starts = arrays
        pages_per_layer = keys.shape[0] // self.cell.layers
        for layer in range(self.cell.layers):
            query = self.attend(query, keys, values, lengths, tables + layer * pages_per_layer, starts)
        return query

    def kernel(self, arrays: tuple[jax.Array, ...]) -> str | None:
        """Returns the name of the implementation; None if the backend does not serve the call."""
        query, keys, values, lengths, tables, starts = arrays
        decodes = query.shape[0] == lengths.shape[0]
        function = page_attention if decodes else unified_attention
        arguments = (query, keys, values, lengths, tables, *(() if decodes else (starts,)))
        with self.block():
            chosen = explain(function, *arguments, platform=self.platform).forward.implementation
        return None if chosen is None else chosen.name

    def compiled(self, arrays: tuple[jax.Array, ...]) -> Callable[..., jax.Array]:
        """Returns the program for arrays of these shapes."""
        with self.block():
            return jax.jit(self.run).lower(*arrays).compile()


def cells() -> tuple[Cell, ...]:
    """Returns what is measured: decoding, then chunks."""
    decoding = [
        Cell(batch=batch, context=context, kv_heads=kv_heads, layers=8)
        for kv_heads, batch, context in (
            *((8, 1, n) for n in (4096, 32768)),
            *((8, 16, n) for n in (1024, 4096, 32768)),
            *((8, 64, n) for n in (1024, 4096, 8192)),
            (8, 256, 4096),
            *((4, n, 8192) for n in (1, 16)),
        )
    ]
    chunks = [Cell(batch=8, context=8192, rows=rows, kv_heads=kv_heads) for rows in (512, 8) for kv_heads in (8, 4)]
    return *decoding, *chunks, Cell(batch=8, context=8192, rows=512, size=64), Cell(batch=1, context=8192, rows=8192)


def small_cells() -> tuple[Cell, ...]:
    """Returns calls for `--check`."""
    sizes = {"page": 16, "heads": 4, "kv_heads": 2, "size": 64}
    return Cell(batch=3, context=150, layers=2, **sizes), Cell(batch=2, context=150, rows=40, **sizes)


def last_sequence(cell: Cell, arrays: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
    """Returns the arguments of the last sequence alone."""
    query, keys, values, lengths, tables, starts = arrays
    rows = int(cell.queries[-1])
    return query[-rows:], keys, values, lengths[-1:], tables[-1:], starts[:2]


def newest_tokens(cell: Cell, arrays: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
    """Returns the arguments of the newest token of each sequence."""
    query, keys, values, lengths, tables, starts = arrays
    return query[starts[1:] - 1], keys, values, lengths, tables, jnp.arange(len(cell.queries) + 1, dtype=jnp.int32)


def num_differing(one: jax.Array, other: jax.Array) -> str:
    """Returns how many numbers of two outputs have other bits."""
    x, y = (np.asarray(array.astype(jnp.float32)) for array in (one, other))  # exact for 16 bits
    return f"{int((x.view(np.int32) != y.view(np.int32)).sum())} of {x.size} differ" if (x != y).any() else "same bits"


def bits(side: Side, arrays: tuple[jax.Array, ...], output: jax.Array) -> tuple[str, str]:
    """Returns what a sequence alone, and calls of one token, give."""
    alone, newest = last_sequence(side.cell, arrays), newest_tokens(side.cell, arrays)
    found = num_differing(side.compiled(alone)(*alone), output[-alone[0].shape[0] :])
    if side.cell.rows == 1:
        return found, ""
    return found, num_differing(side.compiled(newest)(*newest), output[arrays[-1][1:] - 1])


def rows_of_cell(cell: Cell, has_times: bool) -> Iterator[tuple[str, ...]]:
    """Yields a line for each side that serves a call."""
    arrays, sides = cell.inputs(), [Side(cell, False, None), *(Side(cell, True, name) for name in PLATFORMS)]
    sides += [] if has_times else [Side(cell, True, "xla")]
    kernels = {side: side.kernel(arrays) for side in sides}
    programs = {side: side.compiled(arrays) for side in sides if kernels[side] is not None}
    found = {side: bits(side, arrays, program(*arrays)) for side, program in programs.items()}
    shown = {side: ("", "") for side in programs}
    if has_times:
        calls = {str(side): functools.partial(program, *arrays) for side, program in programs.items()}
        times = {name: 1e3 * x / cell.layers for name, x in time_in_turns(calls, SAMPLES).items()}
        shown = {side: (f"{times[str(side)]:.4f}", f"{times[str(side)] / times['as chosen']:.2f}") for side in programs}
    for side in sides:
        results = (*shown[side], *found[side]) if side in programs else ("refused", "", "", "")
        yield str(cell), str(side), kernels[side] or "none", *results


def main() -> None:
    """Prints the table."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--check", action="store_true", help="small calls without times, on any device")
    parser.add_argument("--cells", default=":", help="a slice of the calls, such as 0:8")
    options = parser.parse_args()
    if not options.check and not shared.report.has_gpu():
        return
    start, stop = (int(x) if x else None for x in options.cells.split(":"))
    chosen = (small_cells() if options.check else cells())[start:stop]
    shared.report.print_rows_as_measured(COLUMNS, (row for x in chosen for row in rows_of_cell(x, not options.check)))


if __name__ == "__main__":
    main()
