"""Serving for a long time: 500 sequences come, grow by prompts, chunks and single tokens, and go, in one cache.

After every step the outputs are those of a dense cache that knows nothing of pages, and no slot has changed but those
of the step's own tokens. Shapes never change, so each operation is compiled once.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from paged_calls import QUICK

from ejkernel.modules import chunked_prefill_paged_decode, ragged_page_attention_v3

SEQUENCES, ROWS, SLOTS, ENTRIES, PAGES = 500, 12, 4, 4, 22
LIVE, HEADS, KV_HEADS, SIZE = 6, 2, 1, 8


class Dense:
    """A sequence as plain arrays, with the pages it owns."""

    def __init__(self, length):
        self.length, self.pages = length, []
        self.keys, self.values = np.zeros((2, 0, KV_HEADS, SIZE))

    @property
    def done(self):
        return len(self.keys) >= self.length

    def attend(self, queries):
        """Causal attention of the newest tokens, in float64."""
        repeat = HEADS // KV_HEADS
        keys, values = (np.repeat(x, repeat, axis=1) for x in (self.keys, self.values))
        scores = np.einsum("qhd,khd->hqk", queries, keys) * SIZE**-0.5
        places = np.arange(len(keys))
        scores[:, places > (len(keys) - len(queries) + np.arange(len(queries)))[:, None]] = -np.inf
        weights = np.exp(scores - scores.max(axis=-1, keepdims=True))
        return np.einsum("hqk,khd->qhd", weights / weights.sum(axis=-1, keepdims=True), values)


class V3:
    """The cache and the calls of `ragged_page_attention_v3`."""

    def __init__(self, rng):
        self.cache = jnp.asarray(rng.normal(size=(PAGES, SLOTS, 2 * KV_HEADS, 1, 128)), jnp.float32)
        self.step = jax.jit(
            functools.partial(ragged_page_attention_v3, softmax_scale=None), donate_argnums=3, compiler_options=QUICK
        )

    def __call__(self, queries, keys, values, lens, tables, starts, live):
        distribution = np.array([0, 0, live], np.int32)
        args = (queries, keys, values, self.cache, lens, tables.reshape(-1), starts, distribution)
        output, self.cache = self.step(*args)
        return output

    def slots(self):
        """Keys and values [2, P, S, Hk, D], as they lie in the cache."""
        rows = np.asarray(self.cache).reshape(PAGES, SLOTS, KV_HEADS, 2, 128)[..., :SIZE]
        return np.moveaxis(rows, 3, 0)


class Chunked:
    """The caches and the calls of `chunked_prefill_paged_decode`."""

    def __init__(self, rng):
        self.caches = [jnp.asarray(rng.normal(size=(PAGES, SLOTS, KV_HEADS, SIZE)), jnp.float32) for _ in range(2)]
        self.step = jax.jit(chunked_prefill_paged_decode, donate_argnums=(3, 4), compiler_options=QUICK)

    def __call__(self, queries, keys, values, lens, tables, starts, live):
        output, *self.caches = self.step(queries, keys, values, *self.caches, lens, tables, starts)
        return output

    def slots(self):
        return np.stack([np.asarray(cache) for cache in self.caches])


def grow(rng, sequences):
    """How many tokens each sequence gets this step: a prompt, a chunk, one token or none, as far as there are rows."""
    left, counts = ROWS, []
    for sequence in sequences:
        rest = sequence.length - len(sequence.keys)
        count = min(rest, left, int(rng.choice([0, 1, 1, 1, rng.integers(2, 9), rest])))
        counts.append(count)
        left -= count
    return counts


def serve(rng, server, sequences, free):
    """One step of the live sequences: calls the operation, and compares output and cache."""
    counts, tables = grow(rng, sequences), np.zeros((LIVE, ENTRIES), np.int32)  # tables are padded with page 0
    starts, lens = np.zeros(LIVE + 1, np.int32), np.zeros(LIVE, np.int32)
    queries, keys, values = (rng.normal(size=(ROWS, n, SIZE)).astype(np.float32) for n in (HEADS, KV_HEADS, KV_HEADS))
    expected, row = server.slots().copy(), 0
    want = np.zeros((ROWS, HEADS, SIZE))
    for n, (sequence, count) in enumerate(zip(sequences, counts, strict=True)):
        first = len(sequence.keys)
        sequence.keys, sequence.values = (
            np.concatenate((old, new[row : row + count]))
            for old, new in ((sequence.keys, keys), (sequence.values, values))
        )
        while len(sequence.pages) * SLOTS < len(sequence.keys):
            sequence.pages.append(free.pop(int(rng.integers(len(free)))))
        for offset in range(count):
            page, slot = sequence.pages[(first + offset) // SLOTS], (first + offset) % SLOTS
            expected[:, page, slot] = keys[row + offset], values[row + offset]
        tables[n, : len(sequence.pages)], lens[n] = sequence.pages, len(sequence.keys)
        if count:
            want[row : row + count] = sequence.attend(queries[row : row + count])
        row += count
        starts[n + 1 :] = row
    got = server(queries, keys, values, lens, tables, starts, len(sequences))
    np.testing.assert_allclose(got, want, rtol=1e-4, atol=1e-5)
    np.testing.assert_array_equal(server.slots(), expected)


@pytest.mark.parametrize("kind", [V3, Chunked])
def test_500_sequences_never_diverge_and_never_write_outside_their_own_slots(kind):
    rng = np.random.default_rng(7)
    server, free, live, started = kind(rng), list(range(PAGES)), [], 0
    while started < SEQUENCES or live:
        while started < SEQUENCES and len(live) < LIVE:
            sequence = Dense(int(rng.integers(1, 13)))  # at most 3 pages each: the cache never runs out
            live.append(sequence)
            started += 1
        serve(rng, server, live, free)
        for sequence in [sequence for sequence in live if sequence.done]:
            live.remove(sequence)
            free.extend(sequence.pages)
    assert sorted(free) == list(range(PAGES))
    assert server.step._cache_size() == 1
