"""The cost of a `batch_invariant` block, and whether rows keep their bits, on a CPU or a GPU.

    python benchmarks/library/batch_invariance.py [--quick | --once] [NAME ...]

Each call runs outside of the block and in it, interleaved. Then some of its rows run alone in the block, and must have
the bits that they have in the whole call. The table names the kernels that dispatch chose.
"""

import argparse
import contextlib
import dataclasses
import functools
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
    expert_routing,
    flash_attention,
    fused_cross_entropy,
    fused_kl_divergence,
    gated_delta_rule,
    gated_grouped_matmul,
    gather_reduce,
    gla_attention,
    grouped_matmul,
    kernel_delta_attention,
    lightning_indexer,
    mean_pooling,
    page_attention,
    quantized_matmul,
    rwkv7,
    state_space_v1,
    token_sparse_attention,
    unified_attention,
)
from ejkernel.ops import batch_invariant
from ejkernel.quantization import prepack_quantized_weights
from ejkernel.types import MaskInfo

sys.path.append(str(Path(__file__).parents[1]))
from shared.report import heading, markdown_table

MIN_SECONDS, MAX_CALLS = 0.02, 20
"""The least time of a sample, and the most calls in it."""


@dataclasses.dataclass(frozen=True)
class Measured:
    """A call and some of its rows.

    Attributes:
        label: Sizes.
        function: The public function.
        arrays: Its arguments, or the inputs of `arguments`.
        part: The same for only some of its rows.
        rows: Selects those rows of the whole call's output.
        options: Its keyword arguments.
        arguments: Arrays -> positional and keyword arguments.
        output: Result -> the array that is compared.
        has_gradients: Whether the gradients of the arrays are computed and compared, too.
    """

    label: str
    function: Callable[..., Any]
    arrays: tuple[Any, ...]
    part: tuple[Any, ...]
    rows: Callable[[Any], Any] = lambda output: output[-1:]
    options: dict[str, Any] = dataclasses.field(default_factory=dict)
    arguments: Callable[..., tuple[tuple[Any, ...], dict[str, Any]]] = lambda *arrays: (arrays, {})
    output: Callable[[Any], Any] = lambda result: result
    has_gradients: bool = False

    def __call__(self, *arrays: Any) -> Any:
        if not self.has_gradients:
            return self._run(*arrays)
        output, pullback = jax.vjp(self._run, *arrays)
        results = output, *pullback(output)
        return jnp.concatenate([x.reshape(x.shape[0], -1) for x in results], axis=1)

    def _run(self, *arrays: Any) -> Any:
        arguments, named = self.arguments(*arrays)
        return self.output(self.function(*arguments, **named, **self.options))

    def chosen(self) -> str:
        """Returns the name of the implementation."""
        arguments, named = self.arguments(*self.arrays)
        implementation = explain(self.function, *arguments, **named, **self.options).forward.implementation
        return "none" if implementation is None else implementation.name


def normal(seed: int, *shape: int, dtype: Any) -> jax.Array:
    return _normal(seed, shape, jnp.dtype(dtype))


@functools.partial(jax.jit, static_argnums=(1, 2))
def _normal(seed: int, shape: tuple[int, ...], dtype: jnp.dtype) -> jax.Array:
    return jax.random.normal(jax.random.key(seed), shape, jnp.float32).astype(dtype)


def rows_of_batch(
    label: str, function: Callable[..., Any], arrays: tuple[Any, ...], shared: tuple[Any, ...] = (), **others: Any
) -> Measured:
    """A call whose first arrays have an axis of rows; the others belong to all rows."""
    alone = tuple(x[-1:] for x in arrays)
    return Measured(label, function, (*arrays, *shared), (*alone, *shared), **others)


def dense(batch: int, queries: int, keys: int, dtype: Any) -> Measured:
    heads, kv_heads, size = 8, 2, 128
    query = normal(0, batch, queries, heads, size, dtype=dtype)
    key, value = (normal(seed, batch, keys, kv_heads, size, dtype=dtype) for seed in (1, 2))
    label = f"{batch} x {queries} queries, {keys} keys"
    return rows_of_batch(label, flash_attention, (query, key, value), options={"causal": queries > 1})


def trained(batch: int, tokens: int, dtype: Any) -> Measured:
    """Dense attention and its gradients."""
    call = dense(batch, tokens, tokens, dtype)
    return dataclasses.replace(call, label=f"{call.label}, and gradients", has_gradients=True)


def chunked(batch: int, queries: int, keys: int, dtype: Any) -> Measured:
    """The last queries of prompts, with positions."""
    call = dense(batch, queries, keys, dtype)
    positions = jnp.arange(keys, dtype=jnp.int32)[None]

    def arguments(query: Any, key: Any, value: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
        mask = MaskInfo(q_positions=positions[:, keys - query.shape[1] :], kv_positions=positions)
        return (query, key, value), {"mask_info": mask}

    return dataclasses.replace(call, label=f"{call.label}, a chunk", options={"causal": True}, arguments=arguments)


def packed(batch: int, tokens: int, segments: int, dtype: Any) -> Measured:
    call = dense(batch, tokens, tokens, dtype)
    ids = jnp.broadcast_to(jnp.arange(tokens, dtype=jnp.int32) // (tokens // segments), (batch, tokens))
    return rows_of_batch(
        f"{batch} x {tokens} tokens of {segments} documents",
        flash_attention,
        (*call.arrays, ids),
        options={"causal": True},
        arguments=lambda query, key, value, ids: (
            (query, key, value),
            {"mask_info": MaskInfo.from_segments(ids)},
        ),
    )


def paged(sequences: int, keys: int, dtype: Any, rows: int = 1) -> Measured:
    """Decoding over pages, or chunks of `rows` query rows."""
    heads, kv_heads, size, slots = 8, 2, 128, 16
    pages = sequences * keys // slots
    query = normal(0, sequences * rows, heads, size, dtype=dtype)
    caches = tuple(normal(seed, pages, slots, kv_heads, size, dtype=dtype) for seed in (1, 2))
    tables = jax.random.permutation(jax.random.key(3), pages).astype(jnp.int32).reshape(sequences, -1)
    lengths = jnp.full(sequences, keys, jnp.int32)
    if rows > 1:
        starts = jnp.arange(sequences + 1, dtype=jnp.int32) * rows
        return Measured(
            f"{sequences} chunks of {rows} tokens, {keys} keys",
            unified_attention,
            (query, *caches, lengths, tables, starts),
            (query[-rows:], *caches, lengths[-1:], tables[-1:], starts[:2]),
            lambda output: output[-rows:],
        )
    return Measured(
        f"{sequences} sequences of {keys} keys",
        page_attention,
        (query, *caches, lengths, tables),
        (query[-1:], *caches, lengths[-1:], tables[-1:]),
    )


def grouped(function: Callable[..., Any], rows: int, groups: int, matrix: tuple[int, int], dtype: Any) -> Measured:
    lhs, rhs = normal(0, rows, matrix[0], dtype=dtype), normal(1, groups, *matrix, dtype=dtype)
    sizes = jnp.full(groups, rows // groups, jnp.int32).at[-1].add(rows % groups)
    alone = jnp.zeros(groups, jnp.int32).at[-1].set(1)
    label = f"{rows} rows, {groups} groups of {matrix[0]} x {matrix[1]}"
    return Measured(label, function, (lhs, rhs, sizes), (lhs[-1:], rhs, alone))


def quantized(rows: int, size: int, dtype: Any) -> Measured:
    packed, scales, zeros = prepack_quantized_weights(normal(1, size, size, dtype=jnp.float32), bits=4, group_size=64)
    x, options = normal(0, rows, size, dtype=dtype), {"bits": 4, "group_size": 64}
    label = f"{rows} rows, {size} x {size} of 4 bits"
    return rows_of_batch(label, quantized_matmul, (x,), (packed, scales, zeros), options=options)


def linear_attention(batch: int, tokens: int, dtype: Any) -> Measured:
    arrays = tuple(normal(seed, batch, tokens, 8, 64, dtype=dtype) for seed in range(3))
    gates = -jax.nn.softplus(normal(3, batch, tokens, 8, 64, dtype=dtype))
    return rows_of_batch(f"{batch} x {tokens} tokens", gla_attention, (*arrays, gates))


def delta_rule(function: Callable[..., Any], batch: int, tokens: int, dtype: Any) -> Measured:
    """A delta rule with a gate per head, or per channel (KDA)."""
    query, key, value = (normal(seed, batch, tokens, 8, 128, dtype=dtype) for seed in range(3))
    arrays = query, key / jnp.linalg.norm(key, axis=-1, keepdims=True), value
    beta = jax.nn.sigmoid(normal(3, batch, tokens, 8, dtype=dtype))
    channels = () if function is gated_delta_rule else (128,)
    gates = -jax.nn.softplus(normal(4, batch, tokens, 8, *channels, dtype=jnp.float32))
    options = {"use_qk_l2norm": False, "softmax_scale": 0.01}  # XLA computes the norm, for the whole array
    return rows_of_batch(f"{batch} x {tokens} tokens", function, (*arrays, beta, gates), options=options)


def low_rank(batch: int, tokens: int, dtype: Any) -> Measured:
    """RWKV-7, whose layers bound their gates."""
    r, k, v, a = (0.125 * normal(seed, batch, tokens, 8, 64, dtype=dtype) for seed in range(4))
    gates = -0.6 * jax.nn.sigmoid(normal(4, batch, tokens, 8, 64, dtype=jnp.float32))
    return rows_of_batch(f"{batch} x {tokens} tokens", rwkv7, (r, gates, k, v, a, -a))


def convolution(batch: int, tokens: int, channels: int, dtype: Any) -> Measured:
    x, weight = normal(0, batch, tokens, channels, dtype=dtype), normal(1, channels, 4, dtype=dtype)
    return rows_of_batch(f"{batch} x {tokens} tokens of {channels} channels", causal_conv1d, (x,), (weight,))


def scan(batch: int, tokens: int, channels: int, dtype: Any) -> Measured:
    x, step = (normal(seed, batch, tokens, channels, dtype=dtype) for seed in (0, 1))
    write, read = (normal(seed, batch, tokens, 16, dtype=dtype) for seed in (2, 3))
    decay = -jnp.exp(normal(4, channels, 16, dtype=jnp.float32))
    return rows_of_batch(
        f"{batch} x {tokens} tokens of {channels} channels",
        state_space_v1,
        (x, jnp.abs(step), write, read),
        (decay,),
        arguments=lambda x, step, write, read, decay: ((x, decay, write, read, None, step), {}),
        output=lambda result: result[0],
    )


def loss(tokens: int, entries: int, dtype: Any) -> Measured:
    logits = normal(0, tokens, entries, dtype=dtype)
    targets = jax.random.randint(jax.random.key(2), (tokens,), 0, entries)
    label, options = f"{tokens} tokens of {entries} logits", {"reduction": "none"}
    return rows_of_batch(
        label, fused_cross_entropy, (logits, targets), options=options, output=lambda result: result.loss
    )


def loss_of_hidden(tokens: int, entries: int, dtype: Any) -> Measured:
    hidden, head = normal(0, tokens, 256, dtype=dtype), normal(1, 256, entries, dtype=dtype)
    targets = jax.random.randint(jax.random.key(2), (tokens,), 0, entries)
    return rows_of_batch(
        f"{tokens} tokens, 256 x {entries}",
        fused_cross_entropy,
        (hidden, targets),
        (head,),
        options={"reduction": "none"},
        arguments=lambda hidden, targets, head: (
            (None, targets),
            {"hidden": hidden, "lm_head_weight": head},
        ),
        output=lambda result: result.loss,
    )


def divergence(tokens: int, entries: int, dtype: Any) -> Measured:
    logits = tuple(normal(seed, tokens, entries, dtype=dtype) for seed in (0, 1))
    label, options = f"{tokens} tokens of {entries} logits", {"reduction": "none"}
    return rows_of_batch(label, fused_kl_divergence, logits, options=options, output=lambda result: result.loss)


def routing(tokens: int, experts: int, dtype: Any) -> Measured:
    logits, options = normal(0, tokens, experts, dtype=dtype), {"top_k": 8}
    label = f"8 of {experts} experts, {tokens} tokens"
    return rows_of_batch(label, expert_routing, (logits,), options=options, output=lambda result: result[0])


def combination(tokens: int, channels: int, dtype: Any) -> Measured:
    rows, weights = normal(0, 8 * tokens, channels, dtype=dtype), normal(1, tokens, 8, dtype=dtype)
    order = jax.random.permutation(jax.random.key(2), 8 * tokens).astype(jnp.int32)
    places = jnp.argsort(order).astype(jnp.int32).reshape(tokens, 8)
    alone = jnp.where(order // 8 == tokens - 1, order % 8, -1)[:, None]
    return Measured(
        f"8 rows of {channels} a token, {tokens} tokens",
        gather_reduce,
        (rows, places, order[:, None], weights),
        (rows, places[-1:], alone, weights[-1:]),
    )


def sparse(batch: int, queries: int, keys: int, dtype: Any) -> Measured:
    query, key, value = (
        normal(n, batch, t, h, 128, dtype=dtype) for n, t, h in ((0, queries, 16), (1, keys, 1), (2, keys, 1))
    )
    listed = jax.random.randint(jax.random.key(3), (batch, queries, 512), 0, keys, jnp.int32)
    label = f"{batch} x {queries} queries, 512 of {keys} keys"
    return rows_of_batch(label, token_sparse_attention, (query, key, value, listed))


def indexer(batch: int, queries: int, keys: int, dtype: Any) -> Measured:
    query, key = normal(0, batch, queries, 16, 128, dtype=dtype), normal(1, batch, keys, 128, dtype=dtype)
    arrays = (query, key, normal(2, batch, queries, 16, dtype=dtype))
    label, options = f"{batch} x {queries} queries, 512 of {keys} keys", {"top_k": 512, "causal": False}
    return rows_of_batch(label, lightning_indexer, arrays, options=options, output=lambda result: result[1])


def pooling(batch: int, tokens: int, dtype: Any) -> Measured:
    x = normal(0, batch, tokens, 8, 128, dtype=dtype)
    return rows_of_batch(f"{batch} x {tokens} tokens in pools of 32", mean_pooling, (x,), options={"chunk_size": 32})


def calls(quick: bool) -> Iterator[Measured]:
    large = jax.default_backend() == "gpu" and not quick
    dtype, batch, decoding = (jnp.bfloat16, 8, 64) if large else (jnp.float32, 1, 16)
    length, channels, entries = (4096, 4096, 32768) if large else (256 if quick else 1024, 512, 4096)
    groups, matrix = (128, (2048, 1536)) if large else (8, (512, 1024))
    yield dense(batch, length, length, dtype)
    yield trained(batch, length, dtype)
    yield chunked(batch, length // 8, length, dtype)
    yield chunked(decoding, 1, length, dtype)
    yield dense(decoding, 1, length, dtype)
    yield packed(batch, length, 4, dtype)
    yield paged(decoding, length, dtype)
    yield paged(batch, length, dtype, length // 8)
    for rows in (batch * length, decoding):
        yield grouped(grouped_matmul, rows, groups, matrix, dtype)
        yield grouped(gated_grouped_matmul, rows, groups, matrix, dtype)
    for rows in (length, decoding, 1):
        yield quantized(rows, channels, dtype)
    for rows, tokens in ((1, length), (decoding, 1)):
        yield linear_attention(rows, tokens, dtype)
        yield delta_rule(gated_delta_rule, rows, tokens, dtype)
        yield delta_rule(kernel_delta_attention, rows, tokens, dtype)
        yield low_rank(rows, tokens, dtype)
    for rows, tokens in ((batch, length), (decoding, 1)):
        yield scan(rows, tokens, channels, dtype)
        yield convolution(rows, tokens, channels, dtype)
    yield loss(length, entries, dtype)
    yield loss_of_hidden(length, entries, dtype)
    yield divergence(length, entries, dtype)
    for tokens in (length, decoding):
        yield routing(tokens, 128, dtype)
        yield combination(tokens, channels, dtype)
    for rows, queries in ((1, length), (decoding, 1)):
        yield sparse(rows, queries, length, dtype)
        yield indexer(rows, queries, length, dtype)
    yield pooling(batch, length, dtype)


def seconds(function: Callable[..., Any], arrays: tuple[Any, ...], count: int) -> float:
    start, result = time.perf_counter(), None
    for _ in range(count):
        result = function(*arrays)
    jax.block_until_ready(result)
    return (time.perf_counter() - start) / count


def row_of(call: Measured, turns: int) -> tuple[str, ...]:
    """A line of the table."""
    run = jax.jit(lambda *arrays: call(*arrays))
    label, names = f"{call.function.__name__}, {call.label}", [call.chosen()]
    with batch_invariant():
        names.append(call.chosen())
        if names[1] == "none":
            return (label, names[0], "", "none", "", "", "refused")
        together, alone = (np.asarray(x, np.float32) for x in (call.rows(run(*call.arrays)), run(*call.part)))
    differing = int((together != alone).sum())
    jax.block_until_ready(run(*call.arrays))
    times: dict[bool, list[float]] = {False: [], True: []}
    for _ in range(turns):
        for inside, found in times.items():
            count = max(1, min(MAX_CALLS, round(MIN_SECONDS / found[0]))) if found else 1
            with batch_invariant() if inside else contextlib.nullcontext():
                found.append(seconds(run, call.arrays, count))
    usual, fixed = (1e3 * statistics.median(found[1:] or found) for found in times.values())
    bits = f"{differing} of {alone.size} differ" if differing else "the same"
    return (label, names[0], f"{usual:.3f}", names[1], f"{fixed:.3f}", f"{fixed / usual:.2f}", bits)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", help="operations (all)")
    parser.add_argument("--quick", action="store_true", help="small sizes, few repeats")
    parser.add_argument("--once", action="store_true", help="a single repeat, for the bits")
    options = parser.parse_args()
    print(heading())
    columns = ("call", "as chosen", "ms", "in the block", "ms", "times", "bits of a row alone")
    print(markdown_table(columns, ()))
    for call in calls(options.quick):
        if not options.names or call.function.__name__ in options.names:
            row = row_of(call, 1 if options.once else 4 if options.quick else 8)
            print("| " + " | ".join(row) + " |", flush=True)


if __name__ == "__main__":
    main()
