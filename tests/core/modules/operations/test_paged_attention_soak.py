"""Serving for a long time: 500 sequences come, grow by prompts, chunks and single tokens, and go, in one cache.

After every step the outputs are those of a dense cache that knows nothing of pages, and no slot has changed but those
of the step's own tokens. Shapes never change, so each operation is compiled once. On a GPU, heads have the size and the
dtype that its kernels take.
"""

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from paged_calls import QUICK

from ejkernel.modules import chunked_prefill_paged_decode, ragged_page_attention_v3

SEQUENCES, ENTRIES, PAGES, LIVE = 500, 4, 22, 6


class Model(NamedTuple):
    """What is served: heads and their size, the dtype, an output's tolerance, rows of a step and slots of a page."""

    heads: int = 2
    kv_heads: int = 1
    size: int = 8
    dtype: object = jnp.float32
    tolerance: float = 1e-5
    rows: int = 12
    slots: int = 4


ON_A_GPU = Model(heads=8, kv_heads=2, size=128, dtype=jnp.bfloat16, tolerance=1e-2)
DECODING = ON_A_GPU._replace(rows=LIVE)
ON_HOPPER = ON_A_GPU._replace(rows=16 * LIVE, slots=8)


class Dense:
    """A sequence as plain arrays, with the pages it owns."""

    def __init__(self, length, model):
        self.length, self.pages = length, []
        self.keys, self.values = np.zeros((2, 0, model.kv_heads, model.size))

    @property
    def done(self):
        return len(self.keys) >= self.length

    def attend(self, queries):
        """Causal attention of the newest tokens, in float64."""
        repeat, size = queries.shape[1] // self.keys.shape[1], self.keys.shape[2]
        keys, values = (np.repeat(x, repeat, axis=1) for x in (self.keys, self.values))
        scores = np.einsum("qhd,khd->hqk", queries, keys) * size**-0.5
        places = np.arange(len(keys))
        scores[:, places > (len(keys) - len(queries) + np.arange(len(queries)))[:, None]] = -np.inf
        weights = np.exp(scores - scores.max(axis=-1, keepdims=True))
        return np.einsum("hqk,khd->qhd", weights / weights.sum(axis=-1, keepdims=True), values)


class V3:
    """The cache and the calls of `ragged_page_attention_v3`."""

    def __init__(self, rng, model, platform=None, options=QUICK):
        packing = 4 // jnp.dtype(model.dtype).itemsize
        shape = PAGES, model.slots, 2 * model.kv_heads // packing, packing, 128
        self.model, self.cache = model, jnp.asarray(rng.normal(size=shape), model.dtype)
        call = functools.partial(ragged_page_attention_v3, softmax_scale=None, platform=platform)
        self.step = jax.jit(call, donate_argnums=3, compiler_options=options)

    def __call__(self, queries, keys, values, lens, tables, starts, live):
        distribution = np.array([0, 0, live], np.int32)
        args = (queries, keys, values, self.cache, lens, tables.reshape(-1), starts, distribution)
        output, self.cache = self.step(*args)
        return output

    def slots(self):
        """Keys and values [2, P, S, Hk, D], as they lie in the cache."""
        rows = np.asarray(self.cache).reshape(PAGES, self.model.slots, self.model.kv_heads, 2, 128)
        return np.moveaxis(rows[..., : self.model.size], 3, 0)


class Chunked:
    """The caches and the calls of `chunked_prefill_paged_decode`."""

    def __init__(self, rng, model, platform=None, options=QUICK):
        shape = PAGES, model.slots, model.kv_heads, model.size
        self.model, self.caches = model, [jnp.asarray(rng.normal(size=shape), model.dtype) for _ in range(2)]
        call = functools.partial(chunked_prefill_paged_decode, platform=platform)
        self.step = jax.jit(call, donate_argnums=(3, 4), compiler_options=options)

    def __call__(self, queries, keys, values, lens, tables, starts, live):
        output, *self.caches = self.step(queries, keys, values, *self.caches, lens, tables, starts)
        return output

    def slots(self):
        return np.stack([np.asarray(cache) for cache in self.caches])


def grow(rng, sequences, rows):
    """How many tokens each sequence gets this step: a prompt, a chunk, one token or none, as far as there are rows."""
    if rows == LIVE:
        return [1] * len(sequences)
    left, counts = rows, []
    for sequence in sequences:
        rest = sequence.length - len(sequence.keys)
        count = min(rest, left, int(rng.choice([0, 1, 1, 1, rng.integers(2, 9), rest])))
        counts.append(count)
        left -= count
    return counts


def serve(rng, server, sequences, free):
    """One step of the live sequences: calls the operation, and compares output and cache."""
    heads, kv_heads, size, dtype, tolerance, rows, slots = server.model
    counts, tables = grow(rng, sequences, rows), np.zeros((LIVE, ENTRIES), np.int32)  # tables are padded with page 0
    starts, lens = np.zeros(LIVE + 1, np.int32), np.zeros(LIVE, np.int32)
    queries, keys, values = (rng.normal(size=(rows, n, size)).astype(dtype) for n in (heads, kv_heads, kv_heads))
    expected, row = server.slots().copy(), 0
    want = np.zeros((rows, heads, size))
    for n, (sequence, count) in enumerate(zip(sequences, counts, strict=True)):
        first = len(sequence.keys)
        sequence.keys, sequence.values = (
            np.concatenate((old, new[row : row + count]))
            for old, new in ((sequence.keys, keys), (sequence.values, values))
        )
        while len(sequence.pages) * slots < len(sequence.keys):
            sequence.pages.append(free.pop(int(rng.integers(len(free)))))
        for offset in range(count):
            page, slot = sequence.pages[(first + offset) // slots], (first + offset) % slots
            expected[:, page, slot] = keys[row + offset], values[row + offset]
        tables[n, : len(sequence.pages)], lens[n] = sequence.pages, len(sequence.keys)
        if count:
            want[row : row + count] = sequence.attend(queries[row : row + count].astype(np.float64))
        row += count
        starts[n + 1 :] = row
    got = server(queries, keys, values, lens, tables, starts, len(sequences))
    np.testing.assert_allclose(np.asarray(got, np.float64), want, rtol=10 * tolerance, atol=tolerance)
    np.testing.assert_array_equal(server.slots(), expected)


def serve_all(server, rng):
    """Serves 500 sequences, at most six at a time."""
    free, live, started = list(range(PAGES)), [], 0
    while started < SEQUENCES or live:
        while started < SEQUENCES and len(live) < LIVE:
            sequence = Dense(
                int(rng.integers(1, 3 * server.model.slots + 1)), server.model
            )  # at most 3 pages each: none is missing
            live.append(sequence)
            started += 1
        serve(rng, server, live, free)
        for sequence in [sequence for sequence in live if sequence.done]:
            live.remove(sequence)
            free.extend(sequence.pages)
    assert sorted(free) == list(range(PAGES))
    assert server.step._cache_size() == 1


@pytest.mark.parametrize("kind", [V3, Chunked])
def test_500_sequences_never_diverge_and_never_write_outside_their_own_slots(kind):
    rng = np.random.default_rng(7)
    serve_all(kind(rng, Model()), rng)


@pytest.mark.needs("gpu")
@pytest.mark.parametrize("kind", [V3, Chunked])
@pytest.mark.parametrize(
    ("platform", "model"), [("pallas", ON_HOPPER), ("triton", ON_A_GPU), ("triton", DECODING), ("cuda", DECODING)]
)
def test_500_sequences_never_diverge_on_a_gpu(kind, platform, model):
    rng = np.random.default_rng(7)
    serve_all(kind(rng, model, platform, options=None), rng)
