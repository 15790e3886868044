"""Token-sparse attention on a GPU: the CUDA and Triton kernels against XLA, and against attention to all keys.

    python benchmarks/selected_attention/token_sparse_attention_gpu.py          # 4096 queries of 32768 and 131072 keys
    python benchmarks/selected_attention/token_sparse_attention_gpu.py --quick  # of 32768 keys
    python benchmarks/selected_attention/token_sparse_attention_gpu.py --latent # the latent form forward, and decoding
    python benchmarks/selected_attention/token_sparse_attention_gpu.py --grouped # KV heads, neighbours that share keys

The queries are the newest tokens of a context, as in chunked prefill. Each draws 2048 keys at random from those that
are not after it, and lists them once: 1981 on average of 32768 keys. Two layers: DeepSeek-V3.2's latent form, 128 heads
with rows of 512 + 64 elements, and 64 query heads with 4 KV heads of 128. Rates count the listed pairs, 2 (D + Dv)
operations per pair and head forward and 3.5 times as many with gradients, on all sides. XLA computes 256 queries: its
time is that of 4096 divided by 16. Outputs and gradients are compared with float32 first.

Decoding is 64 queries of the latent form that list 2048 of 262144 keys, eight calls in a program. Bytes are those of
the listed keys, once for all heads; the copy moves as many.

What the CUDA kernel for KV heads costs depends on the keys that neighbouring queries share. A model's selections
change little from a query to the next: each entry of a list, a token or a block of 128, is drawn again at a rate. U4
and U8 are the different keys of four and of eight neighbours, over those that one lists.
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

from ejkernel.modules import flash_attention, token_sparse_attention
from ejkernel.types import MaskInfo

sys.path.append(str(Path(__file__).parents[1]))
import shared.report
import shared.turns

COLUMNS = ("layer", "keys", "side", "forward ms", "rate", "with gradients ms", "rate", "memory MiB")
LISTED, QUERIES, XLA_QUERIES = 2048, 4096, 256


@dataclasses.dataclass(frozen=True, kw_only=True)
class Layer:
    """Sizes of a layer; a latent one has no values in addition to its keys."""

    name: str
    heads: int
    kv_heads: int
    head_dim: int
    value_size: int
    is_latent: bool

    def make_arrays(self, queries: int, num_keys: int, listed: int = LISTED) -> tuple[dict[str, Any], jax.Array]:
        """Normal bfloat16 arrays by argument, with lists of keys, and the output's cotangent."""
        keys = jax.random.split(jax.random.key(0), 5)
        group = (1, num_keys, self.kv_heads)
        arrays = {
            "query": jax.random.normal(keys[0], (1, queries, self.heads, self.head_dim), jnp.bfloat16),
            "key": jax.random.normal(keys[1], (*group, self.head_dim), jnp.bfloat16),
        }
        if not self.is_latent:
            arrays["value"] = jax.random.normal(keys[2], (*group, self.value_size), jnp.bfloat16)
        cotangent = jax.random.normal(keys[3], (1, queries, self.heads, self.value_size), jnp.bfloat16)
        return {**arrays, "indices": random_lists(keys[4], queries, num_keys, listed)}, cotangent

    def options(self) -> dict[str, Any]:
        """The other arguments of a call."""
        return {"softmax_scale": 192**-0.5, "value_size": self.value_size, "value": None} if self.is_latent else {}

    def operations(self, indices: jax.Array) -> float:
        """Operations of the listed pairs, forward."""
        return float(jnp.sum(indices >= 0)) * self.heads * 2.0 * (self.head_dim + self.value_size)


LAYERS = (
    Layer(name="latent 128 heads 512 + 64", heads=128, kv_heads=1, head_dim=576, value_size=512, is_latent=True),
    Layer(name="64/4 heads of 128", heads=64, kv_heads=4, head_dim=128, value_size=128, is_latent=False),
)


@functools.partial(jax.jit, static_argnums=(1, 2, 3))
def random_lists(key: jax.Array, queries: int, num_keys: int, listed: int) -> jax.Array:
    """[1, T, K] different keys of each query, in random order; -1 for a key that was drawn twice."""
    draw, order = jax.random.split(key)
    positions = jnp.arange(num_keys - queries, num_keys)[:, None]
    drawn = jnp.sort(jax.random.randint(draw, (queries, listed), 0, positions + 1), axis=1)
    is_repeated = jnp.pad(drawn[:, 1:] == drawn[:, :-1], ((0, 0), (1, 0)))
    lists = jax.random.permutation(order, jnp.where(is_repeated, -1, drawn), axis=1, independent=True)
    return lists[None].astype(jnp.int32)


def both_passes(function: Callable[..., jax.Array], arrays: dict[str, Any], cotangent: jax.Array) -> Any:
    """Returns the output of a function of arrays by name, and the gradients of those that have any."""
    constants = {name: x for name, x in arrays.items() if name == "indices"}
    given = {name: x for name, x in arrays.items() if name != "indices"}
    output, pull = jax.vjp(lambda given: function(**given, **constants), given)
    return output, pull(cotangent)[0]


def sides(layer: Layer, num_keys: int) -> Iterator[tuple[str, Callable[..., jax.Array], Any, jax.Array]]:
    """Yields the name, the function, the arrays and the cotangent of each side."""
    arrays, cotangent = layer.make_arrays(QUERIES, num_keys)
    call = functools.partial(token_sparse_attention, **layer.options())
    # Whatever dispatch chooses: the CUDA kernels forward, which have no gradients, and Triton's for those.
    yield "cuda, triton gradients", call, arrays, cotangent
    yield "triton", functools.partial(call, platform="triton"), arrays, cotangent
    few = layer.make_arrays(XLA_QUERIES, num_keys)
    yield f"xla, {XLA_QUERIES} queries", functools.partial(call, platform="xla"), *few
    if not layer.is_latent:
        yield "flash_attention to all keys", to_all_keys, arrays, cotangent


def to_all_keys(query: jax.Array, key: jax.Array, value: jax.Array, indices: jax.Array) -> jax.Array:
    """Returns attention of the newest tokens to all keys that are not after them, without the lists."""
    positions = jnp.arange(key.shape[1], dtype=jnp.int32)[None]
    mask = MaskInfo(q_positions=positions[:, -query.shape[1] :], kv_positions=positions)
    return flash_attention(query, key, value, mask_info=mask, causal=True)


def check(layer: Layer) -> None:
    """Compares the Triton kernels with XLA's in float32, on 256 queries that list 2048 of 4096 keys: several chunks.

    Raises:
        SystemExit: They are wrong.
    """
    arrays, cotangent = layer.make_arrays(256, 4096)
    call = functools.partial(token_sparse_attention, **layer.options())
    found = jax.jit(functools.partial(both_passes, functools.partial(call, platform="triton")))(arrays, cotangent)
    wide = jax.tree.map(lambda x: x.astype(jnp.float32) if x.dtype == jnp.bfloat16 else x, (arrays, cotangent))
    with jax.default_matmul_precision("highest"):
        want = jax.jit(functools.partial(both_passes, functools.partial(call, platform="xla")))(*wide)
    errors = jax.tree.map(relative_error, found, want)
    print(f"<!-- {layer.name}: relative errors {errors} -->", flush=True)
    if not max(jax.tree.leaves(errors)) < 1e-2:
        raise SystemExit(f"{layer.name}: the kernels are wrong")


def relative_error(found: jax.Array, want: jax.Array) -> float:
    """Returns the relative error of an array, by the norm."""
    return float(jnp.linalg.norm(found.astype(jnp.float32) - want) / jnp.linalg.norm(want))


def rows(layer: Layer, num_keys: int, rounds: int) -> Iterator[list[str]]:
    """Yields the lines of the table for a layer, all sides in turns."""
    contenders: dict[str, Callable[[], Any]] = {}
    memory: dict[str, str] = {}
    operations: dict[str, float] = {}
    for name, function, arrays, cotangent in sides(layer, num_keys):
        forward = jax.jit(lambda arrays, function=function: function(**arrays)).lower(arrays).compile()
        full = jax.jit(functools.partial(both_passes, function)).lower(arrays, cotangent).compile()
        contenders[f"{name} forward"] = functools.partial(forward, arrays)
        contenders[f"{name} full"] = functools.partial(full, arrays, cotangent)
        bytes_used = [x.memory_analysis().temp_size_in_bytes / 2**20 for x in (forward, full)]
        memory[name] = f"{bytes_used[0]:.0f} / {bytes_used[1]:.0f}"
        operations[name] = layer.operations(arrays["indices"])
    seconds = shared.turns.time_in_turns(contenders, rounds)
    for name, used in memory.items():
        line = [layer.name, str(num_keys), name]
        for passes, factor in (("forward", 1.0), ("full", 3.5)):
            took = seconds[f"{name} {passes}"]
            line += [f"{took * 1e3:.2f}", f"{factor * operations[name] / took / 1e12:.0f} TFLOP/s"]
        yield [*line, used]


DECODE_COLUMNS = ("heads", "side", "ms", "rate", "products")
DECODE_QUERIES, DECODE_KEYS, CALLS_PER_PROGRAM = 64, 262144, 8


def decode_rows(rounds: int) -> Iterator[list[str]]:
    """Yields the lines of the table of decoding; sides are interleaved."""
    for heads in (128, 16):
        layer = dataclasses.replace(LAYERS[0], heads=heads)
        arrays, _ = layer.make_arrays(DECODE_QUERIES, DECODE_KEYS)
        # Different queries, so that XLA cannot share calls.
        query = arrays.pop("query")
        queries = [jnp.roll(query, n, axis=1) for n in range(CALLS_PER_PROGRAM)]
        bytes_read = int(jnp.sum(arrays["indices"] >= 0)) * layer.head_dim * 2

        def program(call: Callable[..., jax.Array], queries: list[jax.Array], **arrays: Any) -> list[jax.Array]:
            return [call(query=query, **arrays) for query in queries]

        contenders: dict[str, Callable[[], Any]] = {}
        for platform in ("cuda", "triton"):
            call = functools.partial(token_sparse_attention, platform=platform, **layer.options())
            contenders[platform] = functools.partial(jax.jit(functools.partial(program, call)), queries, **arrays)
        copied = jax.random.normal(jax.random.key(1), (bytes_read * CALLS_PER_PROGRAM // 8,), jnp.float32)
        contenders["copy"] = functools.partial(jax.jit(lambda x: -x), copied)
        for side, seconds in shared.turns.time_in_turns(contenders, rounds).items():
            took = seconds / CALLS_PER_PROGRAM
            products = "" if side == "copy" else f"{layer.operations(arrays['indices']) / took / 1e12:.0f} TFLOP/s"
            yield [str(heads), side, f"{took * 1e3:.4f}", f"{bytes_read / took / 1e9:.0f} GB/s", products]


def latent_rows(num_keys: int, rounds: int) -> Iterator[list[str]]:
    """Yields the lines of the table of the latent form's forward pass with a number of keys, interleaved."""
    layer = LAYERS[0]
    arrays, _ = layer.make_arrays(QUERIES, num_keys)
    contenders: dict[str, Callable[[], Any]] = {}
    for platform in ("cuda", "triton"):
        call = functools.partial(token_sparse_attention, platform=platform, **layer.options())
        contenders[platform] = functools.partial(jax.jit(call), **arrays)
    for side, seconds in shared.turns.time_in_turns(contenders, rounds).items():
        rate = layer.operations(arrays["indices"]) / seconds / 1e12
        yield [layer.name, str(num_keys), side, f"{seconds * 1e3:.2f}", f"{rate:.0f} TFLOP/s"]


GROUPED_COLUMNS = ("lists", "keys", "U4", "U8", "side", "ms", "rate")
SELECTIONS = {
    "one list for all": (1, 0.0),
    "tokens, 6% drawn again": (1, 0.06),
    "tokens, 12.5% drawn again": (1, 0.125),
    "blocks of 128, 12.5% drawn again": (128, 0.125),
    "tokens, 30% drawn again": (1, 0.3),
    "tokens at random": (1, 1.0),
}
"""Tokens of a selected block, and the rate at which the next query selects another one, by name."""


def neighbours_lists(num_keys: int, block: int, rate: float) -> np.ndarray:
    """[1, T, K] different keys of each query, all before the first query, some drawn again from query to query."""
    rng = np.random.default_rng(5)
    selected = LISTED // block
    # A selection is one block of a stretch of its own, so that no two are the same.
    stretch = (num_keys - QUERIES) // block // selected
    drawn = rng.integers(0, stretch, (QUERIES, selected), dtype=np.int32)
    is_new = (rng.random((QUERIES, selected)) < rate) | (np.arange(QUERIES) == 0)[:, None]
    newest = np.maximum.accumulate(np.where(is_new, np.arange(QUERIES)[:, None], 0), axis=0)
    blocks = np.take_along_axis(drawn, newest, axis=0) + np.arange(selected, dtype=np.int32) * stretch
    keys = blocks[:, rng.permutation(selected), None] * block + np.arange(block, dtype=np.int32)
    return np.ascontiguousarray(keys.reshape(1, QUERIES, LISTED))


def union_ratio(lists: np.ndarray, neighbours: int) -> float:
    """Returns the different keys that neighbours list, over those that one lists, of every 16th group."""
    groups = lists[0].reshape(-1, neighbours * LISTED)[::16]
    return float(np.mean([np.unique(group).size for group in groups])) / LISTED


def grouped_rows(num_keys: int, rounds: int) -> Iterator[list[str]]:
    """Yields the lines of the table of the form with KV heads, forward, by how much neighbours share; interleaved."""
    layer = LAYERS[1]
    arrays, _ = layer.make_arrays(QUERIES, num_keys)
    calls = {x: jax.jit(functools.partial(token_sparse_attention, platform=x)) for x in ("cuda", "triton")}
    for name, (block, rate) in SELECTIONS.items():
        lists = neighbours_lists(num_keys, block, rate)
        arrays["indices"] = jnp.asarray(lists)
        contenders: dict[str, Callable[[], Any]] = {x: functools.partial(call, **arrays) for x, call in calls.items()}
        error = relative_error(contenders["cuda"](), contenders["triton"]().astype(jnp.float32))
        if not error < 5e-3:
            raise SystemExit(f"{name}: the kernels differ by {error}")
        unions = [f"{union_ratio(lists, n):.2f}" for n in (4, 8)]
        for side, seconds in shared.turns.time_in_turns(contenders, rounds).items():
            rate_of_side = f"{layer.operations(arrays['indices']) / seconds / 1e12:.0f} TFLOP/s"
            yield [name, str(num_keys), *unions, side, f"{seconds * 1e3:.3f}", rate_of_side]


def main() -> None:
    """Prints the table."""
    chosen = shared.report.parse_options(
        __doc__,
        {
            "--quick": "32768 keys, few rounds",
            "--latent": "the latent form forward, and decoding",
            "--grouped": "KV heads, lists of neighbours that share more and fewer keys",
        },
    )
    if chosen.grouped:
        every_selection = (row for n in (32768, 131072) for row in grouped_rows(n, 5))
        shared.report.print_rows_as_measured(GROUPED_COLUMNS, every_selection)
        return
    if chosen.latent:
        shared.report.print_rows_as_measured(COLUMNS[:5], (x for n in (32768, 131072) for x in latent_rows(n, 5)))
        print()
        shared.report.print_rows_as_measured(DECODE_COLUMNS, decode_rows(7))
        return
    for layer in LAYERS:
        check(layer)
    lengths = (32768,) if chosen.quick else (32768, 131072)
    every = (row for n in lengths for layer in LAYERS for row in rows(layer, n, 3 if chosen.quick else 5))
    shared.report.print_rows_as_measured(COLUMNS, every)


if __name__ == "__main__":
    main()
