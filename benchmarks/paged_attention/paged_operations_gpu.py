"""Decoding through each operation over pages on a GPU: the same batch, in the cache that the operation takes.

    python benchmarks/paged_attention/paged_operations_gpu.py                      # a table
    python benchmarks/paged_attention/paged_operations_gpu.py --only cuda          # platforms, separated by commas

`ragged_page_attention_v3` and `chunked_prefill_paged_decode` write each sequence's newest token into a donated cache
first; the other operations find it there. A side is timed only if its output agrees with float64 on a few query rows.
Sides are interleaved with a copy of as many bytes, timed as in `paged_attention_gpu.py`, and medians are printed.
"""

import argparse
import functools
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp

from ejkernel.modules import (
    chunked_prefill_paged_decode,
    decode_attention,
    page_attention,
    ragged_page_attention_v2,
    ragged_page_attention_v3,
    unified_attention,
)

sys.path.append(str(Path(__file__).parents[1]))
import shared.report
from paged_attention.paged_attention_gpu import COLUMNS, Cell, copy, ends, error, truth
from shared.turns import TimedCall, time_in_turns

CELLS = (
    Cell(),
    Cell(context=2048),
    Cell(context=16384, ragged=True),
    Cell(cache="float8_e4m3fn"),
    Cell(cache="float8_e4m3fn", context=2048),
)


def side(call: Callable[..., Any], *given: Any, donated: tuple[int, ...] = ()) -> TimedCall:
    """A compiled call; caches that it returns are given to it the next time."""
    compiled = jax.jit(call, donate_argnums=donated).lower(*given).compile()
    arguments = list(given)

    def run() -> jax.Array:
        made = compiled(*arguments)
        if not donated:
            return jax.tree.leaves(made)[0]
        output, *caches = made
        for n, cache in zip(donated, caches, strict=True):
            arguments[n] = cache
        return output

    return run


def sides(cell: Cell, arrays: tuple[jax.Array, ...], platform: str) -> Iterator[tuple[str, TimedCall]]:
    """Every operation on one platform. Caches that are donated are copies."""
    query, keys, values, lengths, tables, starts = arrays
    page, slot = tables[jnp.arange(len(lengths)), (lengths - 1) // cell.page], (lengths - 1) % cell.page
    tokens = keys[page, slot], values[page, slot]
    combined = jnp.stack((keys, values), axis=3).reshape(*keys.shape[:2], 2 * cell.kv_heads, cell.size)
    pack = 4 // jnp.dtype(cell.cache).itemsize
    packed = jnp.array(combined).reshape(*keys.shape[:2], -1, pack, cell.size)
    count = jnp.int32(len(lengths))
    rows = [x.reshape(-1, *x.shape[2:]) for x in (keys, values)]
    on = functools.partial
    yield "unified_attention", side(on(unified_attention, platform=platform), *arrays)
    yield "page_attention", side(on(page_attention, platform=platform, kv_layout="pshd"), *arrays[:3], lengths, tables)
    decode = on(decode_attention, page_size=cell.page, platform=platform)
    yield "decode_attention", side(decode, query, *rows, tables, lengths)
    second = on(ragged_page_attention_v2, platform=platform)
    yield "ragged_page_attention_v2", side(second, query, combined, lengths, tables, starts, count)
    third = on(ragged_page_attention_v3, softmax_scale=None, platform=platform)
    given = query, *tokens, packed, lengths, tables, starts, jnp.stack((count, count, count))
    yield "ragged_page_attention_v3, writes", side(third, *given, donated=(3,))
    chunked = on(chunked_prefill_paged_decode, platform=platform)
    given = query, *tokens, *(jnp.array(x) for x in (keys, values)), lengths, tables, starts
    yield "chunked_prefill_paged_decode, writes", side(chunked, *given, donated=(3, 4))


def timed(cell: Cell, platforms: list[str], rounds: int) -> Iterator[list[str]]:
    """One line for each operation and platform."""
    arrays = cell.inputs()
    want, contenders = truth(cell, arrays), {}
    for platform in platforms:
        for name, run in sides(cell, arrays, platform):
            off = max(error(run(), want) for _ in range(2))
            if off < 1e-2:
                contenders[f"{platform}, {name}"] = run
            else:
                print(f"<!-- {platform}, {name} is wrong on {cell}: relative error {off:.2g} -->", flush=True)
    for name, seconds in time_in_turns(contenders | {"copy": copy(cell)}, rounds).items():
        yield [str(cell), name, f"{seconds * 1e3:.3f}", cell.rate(seconds)]


def main() -> None:
    """Prints the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", default="cuda,triton", help="platforms, separated by commas")
    parser.add_argument("--cells", default=":", help="of the shapes, those from one number to another; commas between")
    parser.add_argument("--quick", action="store_true", help="one shape, few rounds")
    parser.add_argument("--rounds", type=int, default=7)
    options = parser.parse_args()
    if not shared.report.has_gpu():
        return
    cells, rounds = (CELLS[:1], 3) if options.quick else (CELLS, options.rounds)
    chosen = [cell for part in options.cells.split(",") for cell in cells[slice(*ends(part))]]
    shared.report.print_rows_as_measured(
        COLUMNS, (row for cell in chosen for row in timed(cell, options.only.split(","), rounds))
    )


if __name__ == "__main__":
    main()
