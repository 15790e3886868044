"""Decoding over pages on a GPU with a float8 cache, a shared prefix and a tree of draft tokens, alone and together.

    python benchmarks/paged_attention/serving_features_gpu.py          # 64 requests of 8192 tokens
    python benchmarks/paged_attention/serving_features_gpu.py --check  # few short requests on any device, no times

The sizes are Llama 3 70B's: 64 query heads, 8 KV heads, head dimension 128. The shared prefix has half of a request's
tokens. A tree has 8 draft tokens, so the other cases are timed with 8 new tokens per request as well as with one.
Outputs are compared with XLA's on short requests first. Cases are interleaved, and medians are printed.
"""

import functools
import sys
from argparse import Namespace
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from ejkernel.modules import unified_attention

sys.path.append(str(Path(__file__).parents[1]))
import shared.report
import shared.turns

HEADS, KV_HEADS, HEAD_DIM = 64, 8, 128
SCALE = 0.5
"""Of the float8 keys and values."""
TOLERANCE = 2e-2
"""Largest difference of bfloat16 outputs of normal values."""
COLUMNS = ("page size", "case", "us", "GB/s", "times the slowest alone")


class Case(NamedTuple):
    """The features of a call, and how many new tokens each request has."""

    float8: bool = False
    prefix: bool = False
    tree: bool = False
    new_tokens: int = 8

    def __str__(self) -> str:
        features = [n for n, on in zip(("float8", "prefix", "tree"), self, strict=False) if on]
        return f"{' + '.join(features) or 'bfloat16'}, {self.new_tokens} new tokens"


ALONE = (Case(float8=True), Case(prefix=True), Case(tree=True))
TOGETHER = Case(float8=True, prefix=True, tree=True)
CASES = (Case(new_tokens=1), Case(float8=True, new_tokens=1), Case(prefix=True, new_tokens=1), Case(), *ALONE, TOGETHER)


class Batch(NamedTuple):
    """Sizes of a batch: tokens are those of one request, its new tokens included."""

    page_size: int
    requests: int = 64
    tokens: int = 8192

    @property
    def prefix(self) -> int:
        """Tokens of the shared prefix."""
        return self.tokens // 2


def ancestors(rng: np.random.Generator, tokens: int) -> np.ndarray:
    """Returns which tokens [tokens, tokens] each token of a random tree attends to."""
    mask = np.eye(tokens, dtype=bool)
    for i in range(1, tokens):
        mask[i] |= mask[rng.integers(0, i)]
    return mask


def arguments(case: Case, batch: Batch) -> tuple[dict[str, Any], dict[str, Any]]:
    """Returns the array arguments of `unified_attention`, and its scales."""
    rng, keys = np.random.default_rng(0), jax.random.split(jax.random.key(0), 3)
    requests, new = batch.requests, case.new_tokens
    entries = batch.tokens // batch.page_size
    dtype = jnp.float8_e4m3fn if case.float8 else jnp.bfloat16
    cache = (requests * entries, batch.page_size, KV_HEADS, HEAD_DIM)
    normal = jax.jit(lambda key: jax.random.normal(key, cache, jnp.bfloat16).astype(dtype))
    tables = rng.permutation(requests * entries).reshape(requests, entries).astype(np.int32)
    arrays: dict[str, Any] = {
        "queries": jax.random.normal(keys[0], (requests * new, HEADS, HEAD_DIM), jnp.bfloat16),
        "key_cache": normal(keys[1]),
        "value_cache": normal(keys[2]),
        "kv_lens": np.int32(batch.tokens) - rng.integers(0, batch.page_size, requests).astype(np.int32),
        "query_start_loc": np.arange(requests + 1, dtype=np.int32) * new,
    }
    if case.tree:
        masks = np.stack([ancestors(rng, new) for _ in range(requests)])
        arrays["qq_bias"] = np.where(masks, 0, -np.inf).astype(np.float32)
    if case.prefix:
        tables[:, : batch.prefix // batch.page_size] = tables[0, : batch.prefix // batch.page_size]
        arrays["shared_prefix"] = np.int32(batch.prefix)
    arrays["block_tables"] = tables
    scales = {"k_scale": SCALE, "v_scale": SCALE} if case.float8 else {}
    return jax.tree.map(jnp.asarray, arrays), scales


def attention(case: Case, batch: Batch, platform: str) -> Any:
    """Returns a compiled call without arguments."""
    arrays, scales = arguments(case, batch)
    return functools.partial(jax.jit(functools.partial(unified_attention, platform=platform, **scales)), **arrays)


def difference(case: Case, page_size: int, platform: str) -> float:
    """Returns the largest difference from XLA's output, for four short requests."""
    batch = Batch(page_size, requests=4, tokens=512)
    got, want = (np.asarray(attention(case, batch, p)(), np.float32) for p in (platform, "xla"))
    return float(np.abs(got - want).max())


def bytes_read(case: Case, batch: Batch) -> int:
    """Returns the bytes of the keys and values that a call has to read."""
    tokens = batch.requests * batch.tokens - (batch.requests - 1) * batch.prefix * case.prefix
    return 2 * tokens * KV_HEADS * HEAD_DIM * (1 if case.float8 else 2)


def rows(options: Namespace) -> Iterator[list[str]]:
    """Yields a line per page size and case."""
    for page_size in (16, 64):
        for case in CASES:
            off = difference(case, page_size, options.platform)
            if not off < TOLERANCE:
                raise AssertionError(f"{case}, pages of {page_size}: a difference of {off:.2g}")
            if options.check:
                yield [str(page_size), str(case), "right", f"{off:.1e}", ""]
        if options.check:
            continue
        batch = Batch(page_size)
        took = shared.turns.time_in_turns({str(c): attention(c, batch, options.platform) for c in CASES}, 15)
        slowest = max(took[str(case)] for case in ALONE)
        for case in CASES:
            seconds = took[str(case)]
            times = f"{seconds / slowest:.3f}" if case == TOGETHER else ""
            rate = bytes_read(case, batch) / seconds / 1e9
            yield [str(page_size), str(case), f"{seconds * 1e6:.1f}", f"{rate:.0f}", times]


def main() -> None:
    """Prints the table."""
    flags = {"--check": "few short requests on any device, no times"}
    options = shared.report.parse_options(
        __doc__, flags, {"--platform": ("auto", "the toolchain, as the call's argument")}
    )
    shared.report.print_rows_as_measured(COLUMNS, rows(options))


if __name__ == "__main__":
    main()
