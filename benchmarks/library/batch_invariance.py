"""What a `batch_invariant` block costs, and whether rows keep their bits: on a CPU, or on the GPU that is there.

    python benchmarks/library/batch_invariance.py [--quick]

Each call runs as dispatch chooses it, and in the block; the two take turns. Then a part of its rows runs alone in the
block, and must have the bits that it has in the whole call. In both, kernels other than those that claim invariance may
be chosen: the table names them.
"""

import argparse
import dataclasses
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from ejkernel import explain
from ejkernel.modules import (
    causal_conv1d,
    flash_attention,
    fused_cross_entropy,
    gated_grouped_matmul,
    gla_attention,
    grouped_matmul,
    page_attention,
    state_space_v1,
)
from ejkernel.ops import batch_invariant

sys.path.append(str(Path(__file__).parents[1]))
from shared.report import heading, markdown_table

CALLS_PER_TURN = 5


@dataclasses.dataclass(frozen=True)
class Measured:
    """A call and a part of its rows.

    Attributes:
        label: Operation and sizes.
        function: The public function.
        arrays: Its arguments.
        part: Those of some of its rows alone.
        rows: Takes those rows of the whole call's output.
        options: Its keyword arguments.
    """

    label: str
    function: Callable[..., Any]
    arrays: tuple[Any, ...]
    part: tuple[Any, ...]
    rows: Callable[[Any], Any]
    options: dict[str, Any]


def normal(seed: int, *shape: int, dtype: Any) -> jax.Array:
    return jax.random.normal(jax.random.key(seed), shape, jnp.float32).astype(dtype)


def dense(batch: int, queries: int, keys: int, dtype: Any) -> Measured:
    heads, kv_heads, size = 8, 2, 64
    query = normal(0, batch, queries, heads, size, dtype=dtype)
    key, value = (normal(seed, batch, keys, kv_heads, size, dtype=dtype) for seed in (1, 2))
    return Measured(
        f"flash_attention, {batch} x {queries} queries, {keys} keys",
        flash_attention,
        (query, key, value),
        (query[-1:], key[-1:], value[-1:]),
        lambda output: output[-1:],
        {"causal": queries > 1},
    )


def paged(sequences: int, keys: int, dtype: Any) -> Measured:
    heads, kv_heads, size, slots = 8, 2, 64, 16
    pages = sequences * keys // slots
    query = normal(0, sequences, heads, size, dtype=dtype)
    caches = tuple(normal(seed, pages, slots, kv_heads, size, dtype=dtype) for seed in (1, 2))
    tables = jax.random.permutation(jax.random.key(3), pages).astype(jnp.int32).reshape(sequences, -1)
    lengths = jnp.full(sequences, keys, jnp.int32)
    return Measured(
        f"page_attention, {sequences} sequences of {keys} keys",
        page_attention,
        (query, *caches, lengths, tables),
        (query[-1:], *caches, lengths[-1:], tables[-1:]),
        lambda output: output[-1:],
        {},
    )


def grouped(rows: int, groups: int, dtype: Any) -> Measured:
    contracted, columns = 512, 1024
    lhs, rhs = normal(0, rows, contracted, dtype=dtype), normal(1, groups, contracted, columns, dtype=dtype)
    sizes = jnp.full(groups, rows // groups, jnp.int32)
    alone = jnp.zeros(groups, jnp.int32).at[-1].set(1)
    return Measured(
        f"grouped_matmul, {rows} rows, {groups} groups of {contracted} x {columns}",
        grouped_matmul,
        (lhs, rhs, sizes),
        (lhs[-1:], rhs, alone),
        lambda output: output[-1:],
        {},
    )


def gated_grouped(rows: int, groups: int, dtype: Any) -> Measured:
    call = grouped(rows, groups, dtype)
    return dataclasses.replace(call, label=f"gated_{call.label}", function=gated_grouped_matmul)


def rows_of_batch(
    label: str, function: Callable[..., Any], arrays: tuple[Any, ...], shared: tuple[Any, ...] = ()
) -> Measured:
    """A call whose first arrays have an axis of rows; the others belong to all rows."""
    alone = tuple(x[-1:] for x in arrays)
    return Measured(label, function, (*arrays, *shared), (*alone, *shared), lambda output: output[-1:], {})


def linear_attention(batch: int, tokens: int, dtype: Any) -> Measured:
    arrays = tuple(normal(seed, batch, tokens, 8, 64, dtype=dtype) for seed in range(3))
    gates = -jax.nn.softplus(normal(3, batch, tokens, 8, 64, dtype=dtype))
    return rows_of_batch(f"gla_attention, {batch} x {tokens} tokens", gla_attention, (*arrays, gates))


def convolution(batch: int, tokens: int, dtype: Any) -> Measured:
    x, weight = normal(0, batch, tokens, 512, dtype=dtype), normal(1, 512, 4, dtype=dtype)
    return rows_of_batch(f"causal_conv1d, {batch} x {tokens} tokens of 512 channels", causal_conv1d, (x,), (weight,))


def scan(batch: int, tokens: int, dtype: Any) -> Measured:
    x, step = (normal(seed, batch, tokens, 512, dtype=dtype) for seed in (0, 1))
    write, read = (normal(seed, batch, tokens, 16, dtype=dtype) for seed in (2, 3))
    decay = -jnp.exp(normal(4, 512, 16, dtype=dtype))

    def outputs(x: Any, step: Any, write: Any, read: Any, decay: Any) -> Any:
        return state_space_v1(x, decay, write, read, None, jnp.abs(step))[0]

    label = f"state_space_v1, {batch} x {tokens} tokens of 512 channels"
    return rows_of_batch(label, outputs, (x, step, write, read), (decay,))


def loss(tokens: int, dtype: Any) -> Measured:
    hidden, head = normal(0, tokens, 256, dtype=dtype), normal(1, 256, 4096, dtype=dtype)
    targets = jax.random.randint(jax.random.key(2), (tokens,), 0, 4096)

    def losses(hidden: Any, targets: Any, head: Any) -> Any:
        return fused_cross_entropy(targets=targets, hidden=hidden, lm_head_weight=head, reduction="none").loss

    label = f"fused_cross_entropy, {tokens} tokens, 256 x 4096"
    return rows_of_batch(label, losses, (hidden, targets), (head,))


def calls(quick: bool) -> Iterator[Measured]:
    is_gpu = jax.default_backend() == "gpu"
    dtype, scale = (jnp.bfloat16, 8) if is_gpu and not quick else (jnp.float32, 1)
    length = 256 if quick else 1024 * min(scale, 4)
    yield dense(scale, length, length, dtype)
    yield dense(4 * scale, 1, length, dtype)
    yield paged(4 * scale, length, dtype)
    yield grouped(2 * length * scale, 8, dtype)
    yield grouped(16, 8, dtype)
    yield gated_grouped(2 * length * scale, 8, dtype)
    yield linear_attention(scale, length, dtype)
    yield linear_attention(16 * scale, 1, dtype)
    yield scan(scale, length, dtype)
    yield scan(16 * scale, 1, dtype)
    yield convolution(scale, length, dtype)
    yield loss(length, dtype)


def chosen(call: Measured) -> str:
    if call.function.__name__ in ("outputs", "losses"):  # not a public function, which `explain` wants
        return "xla"
    implementation = explain(call.function, *call.arrays, **call.options).forward.implementation
    return "none" if implementation is None else implementation.name


def seconds(function: Callable[..., Any], arrays: tuple[Any, ...]) -> float:
    start = time.perf_counter()
    for _ in range(CALLS_PER_TURN):
        result = function(*arrays)
    jax.block_until_ready(result)
    return (time.perf_counter() - start) / CALLS_PER_TURN


def row_of(call: Measured, turns: int) -> tuple[str, ...]:
    """A line of the table.

    Raises:
        AssertionError: The rows have other bits alone.
    """
    run = jax.jit(lambda *arrays: call.function(*arrays, **call.options))
    outside, inside, names = [], [], [chosen(call)]
    with batch_invariant():
        names.append(chosen(call))
        together, alone = call.rows(run(*call.arrays)), run(*call.part)
    np.testing.assert_array_equal(np.asarray(together, np.float32), np.asarray(alone, np.float32), strict=True)
    jax.block_until_ready(run(*call.arrays))
    for _ in range(turns):
        outside.append(seconds(run, call.arrays))
        with batch_invariant():
            inside.append(seconds(run, call.arrays))
    usual, fixed = (1e3 * statistics.median(times) for times in (outside, inside))
    return (call.label, names[0], f"{usual:.3f}", names[1], f"{fixed:.3f}", f"{fixed / usual:.2f}", "the same")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="small sizes, few repeats")
    quick = parser.parse_args().quick
    print(heading())
    columns = ("call", "as chosen", "ms", "in the block", "ms", "times", "bits of a row alone")
    print(markdown_table(columns, ()))
    for call in calls(quick):
        print("| " + " | ".join(row_of(call, 3 if quick else 15)) + " |", flush=True)


if __name__ == "__main__":
    main()
