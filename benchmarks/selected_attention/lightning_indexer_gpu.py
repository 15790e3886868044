"""The lightning indexer on a GPU: the Triton kernels against XLA, and their scores and selection apart.

    python benchmarks/selected_attention/lightning_indexer_gpu.py          # prefill, training and decoding
    python benchmarks/selected_attention/lightning_indexer_gpu.py --quick  # prefill of 32768 keys

64 heads of 128 select 2048 keys per query, as in DeepSeek-V3.2; arrays are normal bfloat16. The queries are the newest
tokens of a context. Rates count the pairs of a query and a key that it may select, 2 H D operations each. *Scores* are
the kernel that multiplies, *selection* the four that take the largest and sort them. The indices are compared with
XLA's first, for numbers whose scores are the same in any order of summation. cuDNN's kernels for Hopper, where
`nvidia-cudnn-frontend` and `nvidia-cutlass-dsl` are installed, select without sorting.
"""

import dataclasses
import functools
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp

from ejkernel.families.lightning_indexer import LightningIndexer
from ejkernel.modules import lightning_indexer
from ejkernel.ops.device import current_device
from ejkernel_triton.lightning_indexer import config
from ejkernel_triton.lightning_indexer.forward import ordered_scores_of_chunk, select_top_k
from ejkernel_triton.lightning_indexer.spec import make_spec

sys.path.append(str(Path(__file__).parents[1]))
import _indexer_peers
import shared.report
import shared.turns

COLUMNS = ("case", "batch", "queries", "keys", "side", "ms", "rate", "memory MiB")
HEADS, CHANNELS, TOP_K = 64, 128, 2048


@dataclasses.dataclass(frozen=True, kw_only=True)
class Case:
    """Sizes of a call."""

    name: str
    batch: int = 1
    queries: int
    keys: int

    def make_arrays(self, draw: Callable[..., jax.Array] = jax.random.normal) -> tuple[jax.Array, ...]:
        """Bfloat16 queries and keys, and float32 weights."""
        keys = jax.random.split(jax.random.key(0), 3)
        query = draw(keys[0], (self.batch, self.queries, HEADS, CHANNELS))
        key, weights = draw(keys[1], (self.batch, self.keys, CHANNELS)), draw(keys[2], query.shape[:3])
        return query.astype(jnp.bfloat16), key.astype(jnp.bfloat16), weights.astype(jnp.float32)

    def operations(self, queries: int) -> float:
        """Operations of the pairs of the last of the queries."""
        return self.batch * queries * (self.keys - (queries - 1) / 2) * HEADS * CHANNELS * 2.0


CASES = (
    Case(name="prefill", queries=4096, keys=32768),
    Case(name="prefill", queries=1024, keys=131072),
    Case(name="training", queries=8192, keys=8192),
    Case(name="decoding", batch=16, queries=1, keys=131072),
    Case(name="decoding", queries=1, keys=131072),
)


def draw_quarters(key: jax.Array, shape: tuple[int, ...]) -> jax.Array:
    """Multiples of 1/4 from -2 to 2."""
    return jax.random.randint(key, shape, -8, 9) / 4


def check() -> None:
    """Compares all indices and scores with XLA's, many of which are equal scores.

    Raises:
        SystemExit: They differ.
    """
    for case in (Case(name="check", queries=300, keys=9000), Case(name="check", batch=2, queries=64, keys=32768)):
        arrays = case.make_arrays(draw_quarters)
        call = functools.partial(lightning_indexer, top_k=TOP_K, softmax_scale=2.0**-5)
        found, want = (jax.jit(functools.partial(call, platform=x))(*arrays) for x in ("triton", "xla"))
        if not all(bool(jnp.array_equal(x, y)) for x, y in zip(found, want, strict=True)):
            raise SystemExit(f"{case}: the kernels are wrong")


def both_kernels(case: Case, arrays: tuple[jax.Array, ...]) -> tuple[dict[str, Callable[[], Any]], int]:
    """Returns the scores and the selection of a chunk of queries, each by itself, and the queries of a chunk."""
    ends = jnp.arange(case.keys - case.queries + 1, case.keys + 1, dtype=jnp.int32)[None]
    ranges = {"key_starts": jnp.zeros_like(ends), "key_ends": ends}
    fields = dict(zip(("query", "key", "weights"), arrays, strict=True)) | ranges
    record = LightningIndexer(**fields, top_k=TOP_K, softmax_scale=CHANNELS**-0.5)
    tiles, spec = config.heuristic(record, current_device(), "forward"), make_spec(record)
    start = jnp.full((1, 1), case.queries - spec.CHUNK, jnp.int32)
    scores = jax.jit(lambda record: ordered_scores_of_chunk(record, start, spec, tiles))
    select = jax.jit(lambda record, scores: select_top_k(record, scores, start, spec, tiles))
    ordered_scores = scores(record)
    return {
        f"scores, {spec.CHUNK} queries": functools.partial(scores, record),
        f"selection, {spec.CHUNK} queries": functools.partial(select, record, ordered_scores),
    }, spec.CHUNK


def cudnn_kernels(case: Case, arrays: tuple[jax.Array, ...], chunk: int) -> dict[str, Callable[[], Any]]:
    """Returns cuDNN's scores and selection of the last chunk of queries, after a comparison of what they select.

    Raises:
        SystemExit: They differ from ours by more than rounding.
    """
    query, key, weights = arrays
    newest = query[:, -chunk:], key, weights[:, -chunk:]
    scores = _indexer_peers.cudnn_scores(newest, CHANNELS**-0.5, float8=False)
    selection = _indexer_peers.cudnn_selection(scores(), TOP_K)
    want, _ = jax.jit(functools.partial(lightning_indexer, top_k=TOP_K))(*newest)
    found = jnp.from_dlpack(selection()).reshape(want.shape)
    share = jnp.mean(jnp.sort(found, axis=-1) == jnp.sort(want, axis=-1))
    overlap = jnp.isin(found[0, -1], want[0, -1]).mean()
    print(f"cuDNN: {share:.3f} of the selected keys in the same place, {overlap:.4f} of the last row's the same")
    if overlap < 0.99:
        raise SystemExit(f"{case}: cuDNN selects other keys")
    return {
        f"cuDNN scores, {chunk} queries": scores,
        f"cuDNN scores in float8, {chunk} queries": _indexer_peers.cudnn_scores(newest, CHANNELS**-0.5, float8=True),
        f"cuDNN selection, {chunk} queries": selection,
    }


def rows(case: Case, rounds: int) -> Iterator[list[str]]:
    """Yields the lines of the table for a case, all sides in turns."""
    arrays = case.make_arrays()
    sides, chunk = both_kernels(case, arrays)
    if _indexer_peers.is_installed() and chunk > 1:
        sides |= cudnn_kernels(case, arrays, chunk)
    memory = dict.fromkeys(sides, "")
    for platform in ("triton", "xla"):
        call: Any = jax.jit(functools.partial(lightning_indexer, top_k=TOP_K, platform=platform))
        call = call.lower(*arrays).compile()
        sides[platform] = functools.partial(call, *arrays)
        memory[platform] = f"{call.memory_analysis().temp_size_in_bytes / 2**20:.0f}"
    seconds = shared.turns.time_in_turns(sides, rounds)
    for name, took in seconds.items():
        operations = case.operations(case.queries if name in ("triton", "xla") else chunk)
        rate = "" if "selection" in name else f"{operations / took / 1e12:.0f} TFLOP/s"
        sizes = (str(case.batch), str(case.queries), str(case.keys))
        yield [case.name, *sizes, name, f"{took * 1e3:.3f}", rate, memory[name]]


def main() -> None:
    """Prints the table."""
    chosen = shared.report.parse_options(__doc__, {"--quick": "32768 keys, few rounds"})
    check()
    cases = CASES[:1] if chosen.quick else CASES
    every = (row for case in cases for row in rows(case, 3 if chosen.quick else 5))
    shared.report.print_rows_as_measured(COLUMNS, every)


if __name__ == "__main__":
    main()
