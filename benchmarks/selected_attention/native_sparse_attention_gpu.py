"""Native sparse attention on a GPU: the selected branch alone, and all three branches, against dense attention.

    python benchmarks/selected_attention/native_sparse_attention_gpu.py  # tables
    python benchmarks/selected_attention/native_sparse_attention_gpu.py --quick  # 8192 tokens
    # also every configuration worth measuring
    python benchmarks/selected_attention/native_sparse_attention_gpu.py --candidates

All sides get the same normal bfloat16 arrays. In the selected branch every query reads its own block and others drawn
at random from those before it; with all branches the blocks are computed. Our kernels, in every configuration, are
first compared with float32 on 1024 tokens, all gradients; the other sides are checked by tests of their own. Sides run
one after the other, several calls a sample, and medians are printed. Rates count the products of listed pairs, and 2.5
times as many backward. Memory is what XLA sets aside beside arguments and results.
"""

import dataclasses
import functools
import itertools
import statistics
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp

from ejkernel.modules import flash_attention, native_sparse_attention
from ejkernel.ops.device import current_device
from ejkernel.ops.plugins import registry
from ejkernel.types.pullback import Pullback

sys.path.append(str(Path(__file__).parents[1]))
import shared.report

COLUMNS = ("shape", "side", "forward ms", "rate", "with gradients ms", "rate", "memory MB")
Passes = tuple[Callable[[], Any] | None, Callable[[], Any] | None, str]
BLOCK, BLOCKS, WINDOW = 64, 16, 512
GATES = ("g_cmp", "g_slc", "g_swa")
SLOW = 0.2
"""Seconds from which on one call is timed."""
XLA_MOST = 8192
"""Tokens up to which XLA's side is timed: it is slow."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Cell:
    """One call: whether all branches are there, or the selected one with given blocks alone."""

    length: int = 8192
    branches: str = "selected"
    heads: int = 64
    kv_heads: int = 4
    size: int = 128

    def __str__(self) -> str:
        return f"{self.branches}, S{self.length} H{self.heads}/{self.kv_heads} D{self.size}, {BLOCKS} x {BLOCK}"

    @property
    def operations(self) -> float:
        """Of the listed pairs, forward."""
        pairs = sum(min(BLOCKS, t // BLOCK + 1) * BLOCK for t in range(self.length))
        return 4.0 * self.size * self.heads * pairs

    def arrays(self, dtype: Any = jnp.bfloat16) -> dict[str, jax.Array]:
        """Query, key, value, and gates or blocks; and the output's cotangent."""
        keys = jax.random.split(jax.random.key(0), 6)
        rows, group = (1, self.length, self.heads, self.size), (1, self.length, self.kv_heads, self.size)
        shapes = {"query": rows, "key": group, "value": group, "cotangent": rows}
        made = {name: jax.random.normal(k, s).astype(dtype) for k, (name, s) in zip(keys, shapes.items(), strict=False)}
        if self.branches == "selected":
            return made | {"block_indices": random_blocks(keys[4], self)}
        gates = jax.random.uniform(keys[5], (3, *rows[:3])).astype(dtype)
        return made | dict(zip(GATES, gates, strict=True))


@functools.partial(jax.jit, static_argnums=1)
def random_blocks(key: jax.Array, cell: Cell) -> jax.Array:
    """Each query's own block, and as many others as there are slots and blocks before it."""
    own = jnp.arange(cell.length) // BLOCK
    count = -(-cell.length // BLOCK)

    def of_head(key: jax.Array) -> jax.Array:
        order = jax.random.uniform(key, (cell.length, count))
        order = jnp.where(jnp.arange(count) < own[:, None], order, -1.0)
        values, found = jax.lax.top_k(order, min(BLOCKS - 1, count))
        return jnp.concatenate([own[:, None], jnp.where(values >= 0, found, -1)], axis=1)

    made = jax.lax.map(of_head, jax.random.split(key, cell.kv_heads))
    return made.swapaxes(0, 1)[None].astype(jnp.int32)


def cells(quick: bool) -> Iterator[Cell]:
    """What is measured."""
    for length in (8192,) if quick else (8192, 16384, 32768, 65536):
        for branches in ("selected", "all"):
            yield Cell(length=length, branches=branches)


def operands(arrays: dict[str, jax.Array]) -> dict[str, jax.Array]:
    """What has gradients."""
    return {name: x for name, x in arrays.items() if name not in ("block_indices", "cotangent")}


def options(arrays: dict[str, jax.Array]) -> dict[str, Any]:
    """The other arguments of a call."""
    if "block_indices" in arrays:
        return {"block_indices": arrays["block_indices"], "block_size": BLOCK, "block_counts": BLOCKS}
    return {"block_size": BLOCK, "block_counts": BLOCKS, "window_size": WINDOW}


def both(function: Callable[..., jax.Array]) -> Callable[..., Any]:
    """A function and its gradients: (operands, cotangent) -> (output, gradients)."""

    def run(given: dict[str, jax.Array], cotangent: jax.Array) -> Any:
        output, pull = jax.vjp(lambda given: function(**given), given)
        return output, pull(cotangent)[0]

    return run


def passes(function: Callable[..., jax.Array], given: dict[str, jax.Array], cotangent: jax.Array) -> Passes:
    """Both passes of a function of operands by name, compiled."""
    forward = jax.jit(lambda given: function(**given)).lower(given).compile()
    full = jax.jit(both(function)).lower(given, cotangent).compile()
    memory = [x.memory_analysis().temp_size_in_bytes / 2**20 for x in (forward, full)]
    return (lambda: forward(given)), (lambda: full(given, cotangent)), f"{memory[0]:.0f} / {memory[1]:.0f}"


def ours(arrays: dict[str, jax.Array], platform: str) -> Passes:
    """The operation, as users call it."""
    call = functools.partial(native_sparse_attention, platform=platform, **options(arrays))
    return passes(call, operands(arrays), arrays["cotangent"])


def dense(arrays: dict[str, jax.Array]) -> Passes:
    """Dense causal attention to all keys."""
    given = {name: arrays[name] for name in ("query", "key", "value")}
    return passes(functools.partial(flash_attention, causal=True), given, arrays["cotangent"])


def implementation() -> Any:
    """The Triton kernels."""
    found = registry().implementations["native_sparse_attention"]
    return next(i for i in found if i.name == "triton")


def configured(arrays: dict[str, jax.Array]) -> Iterator[tuple[str, Passes]]:
    """The Triton kernels with every configuration worth measuring, each pass by itself."""
    op, kernels = registry().ops["native_sparse_attention"], implementation()
    record = jax.jit(lambda given: op.lower(op.arguments(**given, **options(arrays))))(operands(arrays))
    device, wanted = current_device(), frozenset(operands(arrays))
    first = kernels.config.heuristic(record, device, "forward")
    output, residuals = jax.jit(lambda record: kernels.function("forward")(record, first))(record)
    saved = Pullback(
        record=record, residuals=residuals, output=output, cotangent=arrays["cotangent"], grad_fields=wanted
    )
    for direction, given in (("forward", record), ("backward", saved)):
        for config in kernels.config.candidates(record, device, direction):
            run = jax.jit(lambda given, config=config, d=direction: kernels.function(d)(given, config))
            call = functools.partial(run, given)
            yield str(config), ((call, None, "") if direction == "forward" else (None, call, "backward alone"))


SIDES: dict[str, tuple[str, Callable[[dict[str, jax.Array]], Passes]]] = {
    "triton": ("ejkernel triton", lambda arrays: ours(arrays, "triton")),
    "dense": ("dense causal flash_attention", dense),
    "xla": ("ejkernel xla", lambda arrays: ours(arrays, "xla")),
}
"""Who can compute a cell: by the name to choose it by, what it is called, and what makes it."""


def sides(cell: Cell, arrays: dict[str, jax.Array], wanted: Iterable[str]) -> Iterator[tuple[str, Passes]]:
    """Those of the wanted sides that can compute a cell in bearable time."""
    for name in wanted:
        if name != "xla" or cell.length <= XLA_MOST:
            title, make = SIDES[name]
            yield title, make(arrays)


def errors(made: Any, want: Any) -> float:
    """The largest relative error of the arrays of two trees."""

    def one(x: jax.Array, y: jax.Array) -> float:
        x, y = x.astype(jnp.float32), y.astype(jnp.float32)
        return float(jnp.linalg.norm(x - y) / jnp.linalg.norm(y))

    return max(jax.tree.leaves(jax.tree.map(one, made, want)))


def check(branches: str, candidates: bool) -> None:
    """Compares the Triton kernels with float32 on 1024 tokens.

    Raises:
        SystemExit: They are wrong.
    """
    cell = Cell(length=1024, branches=branches, heads=32, kv_heads=2)
    narrow = cell.arrays()
    if branches == "all":  # computed blocks would differ where scores are close
        narrow["block_indices"] = random_blocks(jax.random.key(1), cell)
    wide = {n: x.astype(jnp.float32) if n != "block_indices" else x for n, x in narrow.items()}
    with jax.default_matmul_precision("highest"):
        call = functools.partial(native_sparse_attention, platform="xla", **options(wide))
        want = jax.jit(both(call))(operands(wide), wide["cotangent"])
    _, full, _ = ours(narrow, "triton")
    assert full is not None
    found = {"ejkernel triton": errors(full(), want)}
    for name, (forward, backward, _) in configured(narrow) if candidates else ():
        if forward is not None:
            found[name] = errors(forward()[0], want[0])
        else:
            assert backward is not None
            found[name] = errors(backward(), want[1])
    for name, off in found.items():
        print(f"<!-- {branches}: {name}: relative error {off:.2g} -->", flush=True)
        if not off < 2e-2:
            raise SystemExit(f"{name} is wrong")


def median(call: Callable[[], Any], rounds: int) -> float:
    """Seconds a call; of one that takes long, a single one."""
    jax.block_until_ready(call())
    times: list[float] = []
    while len(times) < rounds:
        start = time.perf_counter()
        jax.block_until_ready(call())
        first = time.perf_counter() - start
        if first > SLOW:
            return first
        calls = max(1, min(20, round(0.02 / first)))
        start = time.perf_counter()
        made = [call() for _ in range(calls)][-1]  # one after the other, so that starting them costs nothing
        jax.block_until_ready(made)
        times.append((time.perf_counter() - start) / calls)
    return statistics.median(times)


def row(cell: Cell, name: str, side: Passes, rounds: int) -> list[str]:
    """One line of the table."""
    forward, full, memory = side
    line = [str(cell), name]
    for call, factor in ((forward, 1.0), (full, 2.5 if forward is None else 3.5)):
        if call is None:
            line += ["", ""]
        else:
            seconds = median(call, rounds)
            line += [f"{seconds * 1e3:.3f}", f"{factor * cell.operations / seconds / 1e12:.0f} TFLOP/s"]
    return [*line, memory]


def main() -> None:
    """Prints the table."""
    chosen = shared.report.parse_options(
        __doc__,
        {
            "--quick": "8192 tokens, few rounds",
            **shared.report.CANDIDATES_FLAG,
            "--no-check": "where the same kernels were checked just now",
        },
        {
            "--branches": ("", "selected or all; without it both"),
            "--lengths": ("", "tokens, separated by commas"),
            "--sides": (",".join(SIDES), "some of the default, separated by commas"),
        },
    )
    print(shared.report.heading())
    for branches in ("selected", "all"):
        if not chosen.no_check and chosen.branches in ("", branches):
            check(branches, chosen.candidates)
    print(shared.report.markdown_table(COLUMNS, ()), flush=True)
    for cell in cells(chosen.quick):
        if chosen.branches not in ("", cell.branches):
            continue
        if chosen.lengths and str(cell.length) not in chosen.lengths.split(","):
            continue
        arrays = cell.arrays()
        more = configured(arrays) if chosen.candidates else ()
        for name, side in itertools.chain(sides(cell, arrays, chosen.sides.split(",")), more):
            print("| " + " | ".join(row(cell, name, side, 3 if chosen.quick else 7)) + " |", flush=True)


if __name__ == "__main__":
    main()
