"""Programs of attention over paged caches: pages and slots without tokens are poisoned, tables end in garbage."""

import dataclasses
from typing import Any

import numpy as np

from ejkernel.arithmetic import cdiv
from ejkernel_conformance.random_calls.draws import (
    NARROW_HEAD_DIMS,
    Arrays,
    Drawn,
    Rng,
    dtype,
    given,
    heads,
    normal,
    pick,
    poison,
    some,
)


@dataclasses.dataclass(frozen=True)
class Batch:
    """Sequences in a cache; draws have the same lengths in another order.

    Attributes:
        lens: Tokens of each sequence.
        q_lens: How many of them are queries.
        slots: Slots of a page.
        entries: Entries of a table.
        h: Query heads.
        g: KV heads.
        d: Size of keys.
        v: Size of values.
        kind: The dtype.
    """

    lens: np.ndarray
    q_lens: np.ndarray
    slots: int
    entries: int
    h: int
    g: int
    d: int
    v: int
    kind: Any

    @property
    def rows(self) -> int:
        """Returns query rows, and one row of no sequence."""
        return int(self.q_lens.sum()) + 1

    @property
    def pages(self) -> int:
        """Pages of the cache: those in use and three more."""
        return int(cdiv(self.lens, self.slots).sum()) + 3

    def tables(self, rng: Rng, order: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Returns int32 [N, entries], with garbage after the pages in use; and bool [P, S], the slots
        without a token.
        """
        free = list(rng.permutation(self.pages))
        tables = np.asarray(pick(rng, (0, -1, self.pages + 7)), np.int32) * np.ones(
            (len(order), self.entries), np.int32
        )
        unread = np.ones((self.pages, self.slots), bool)
        for row, length in zip(tables, self.lens[order], strict=True):
            for page in range(-(-int(length) // self.slots)):
                row[page] = free.pop()
                unread[row[page], : int(length) - page * self.slots] = False
        return tables, unread


def draw_batch(rng: Rng, *, decoding: bool, sequences: int | None = None, value_size: bool = True) -> Batch:
    """Draws a batch of sequences."""
    count = int(rng.integers(1, 7)) if sequences is None else sequences
    lens = np.maximum(rng.integers(0, 200, count), 1 if decoding else 0)
    q_lens = np.ones_like(lens)
    if not decoding:
        q_lens = np.array([min(int(n), int(pick(rng, (0, 1, 1, int(rng.integers(0, 80)), n)))) for n in lens])
        if not q_lens.any():
            lens[0], q_lens[0] = max(1, lens[0]), 1
    slots, (h, g), d = pick(rng, (4, 8, 16, 16, 32, 64)), heads(rng), pick(rng, (*NARROW_HEAD_DIMS, 128, 256))
    v = pick(rng, NARROW_HEAD_DIMS) if value_size and some(rng, 0.2) else d
    entries = int(max(1, *cdiv(lens, slots), 1)) + int(rng.integers(0, 3))
    return Batch(lens, q_lens, slots, entries, h, g, d, v, dtype(rng))


def _terms(rng: Rng) -> dict[str, Any]:
    """Draws chunks and the scales that stored keys and values were divided by."""
    return {
        "chunk_size": int(rng.integers(1, 100)) if some(rng, 0.2) else None,
        "k_scale": float(rng.uniform(0.3, 2)) if some(rng, 0.2) else None,
        "v_scale": float(rng.uniform(0.3, 2)) if some(rng, 0.2) else None,
    }


def _options(rng: Rng, **more: Any) -> dict[str, Any]:
    made = {
        **_terms(rng),
        "sliding_window": int(rng.integers(1, 100)) if some(rng, 0.4) else None,
        "logits_soft_cap": float(rng.uniform(0.5, 30)) if some(rng, 0.3) else None,
    }
    return given(**made, **more)


@dataclasses.dataclass(frozen=True)
class Terms:
    """Which arrays of a call's terms are drawn.

    Attributes:
        slopes: Whether there are `alibi_slopes`.
        prefix: Tokens of the shared prefix; None without it.
        pairs: Axes of `qq_bias`: 1 for packed tables, 2 for one, 3 for one per sequence; 0 without it.
    """

    slopes: bool
    prefix: int | None
    pairs: int

    def arrays(self, rng: Rng, batch: Batch, order: np.ndarray) -> Arrays:
        """Returns the arrays, by name."""
        made: Arrays = {"alibi_slopes": normal(rng, (batch.h,), np.float32, 0.1)} if self.slopes else {}
        if self.prefix is not None:
            made["shared_prefix"] = np.int32(self.prefix)
        if self.pairs:
            most = int(batch.q_lens.max())
            shapes = ((int((batch.q_lens**2).sum()),), (most, most), (len(order), most, most))
            bias = normal(rng, shapes[self.pairs - 1])
            made["qq_bias"] = np.where(rng.random(bias.shape) < 0.2, -np.inf, bias).astype(np.float32)
        return made


def _drawn_terms(rng: Rng, batch: Batch, *, pairs: tuple[int, ...] = (), prefix: bool = True) -> Terms:
    # Also the first sequence of an order, which has the prefix's pages, has so many tokens.
    most = int(np.where(batch.q_lens > 0, batch.lens - batch.q_lens, batch.lens).min())
    return Terms(
        slopes=some(rng, 0.2),
        prefix=int(rng.integers(0, most + 1)) if prefix and some(rng, 0.3) else None,
        pairs=pick(rng, pairs) if pairs and some(rng, 0.3) else 0,
    )


def _lse(rng: Rng) -> dict[str, Any]:
    return {"return_lse": True} if some(rng, 0.4) else {}


def _sinks(rng: Rng, drawn: bool, batch: Batch) -> Arrays:
    return {"softmax_aux": normal(rng, (batch.h,))} if drawn else {}


def _caches(rng: Rng, batch: Batch, unread: np.ndarray, value: float = np.nan) -> tuple[np.ndarray, np.ndarray]:
    z = batch
    keys, values = (normal(rng, (z.pages, z.slots, z.g, size), z.kind) for size in (z.d, z.v))
    return poison(keys, unread, value), poison(values, unread, value)


def query_starts(batch: Batch, order: np.ndarray) -> np.ndarray:
    """Returns int32 [N + 1], the first query row of each sequence."""
    return np.concatenate([[0], np.cumsum(batch.q_lens[order])]).astype(np.int32)


def draw_queries(rng: Rng, batch: Batch) -> np.ndarray:
    """Returns query rows, of which the last belongs to no sequence."""
    x = normal(rng, (batch.rows, batch.h, batch.d), batch.kind)
    return poison(x, np.arange(batch.rows) == batch.rows - 1)


def page(rng: Rng, op: str = "page_attention") -> Drawn:
    """Draws a call of `page_attention` or `decode_attention`, with one query per sequence."""
    z, sinks = draw_batch(rng, decoding=True), some(rng, 0.3)
    plain, terms = op == "page_attention", _drawn_terms(rng, z)

    def values(rng: Rng) -> Arrays:
        order = rng.permutation(len(z.lens))
        tables, unread = z.tables(rng, order)
        keys, held = _caches(rng, z, unread)
        query = normal(rng, (len(order), z.h, z.d), z.kind)
        lens, more = z.lens[order].astype(np.int32), _sinks(rng, sinks, z) | terms.arrays(rng, z, order)
        if plain:
            caches = {"key_cache": keys, "value_cache": held, "kv_lens": lens, "block_tables": tables}
        else:
            flat = {"key_buffer": keys.reshape(-1, z.g, z.d), "value_buffer": held.reshape(-1, z.g, z.v)}
            caches = {**flat, "req_to_tokens": tables, "kv_lens": lens}
        return {"query": query, **caches, **more}

    if plain:
        # Sizes are drawn, so the caches' shapes may fit several layouts.
        return Drawn(values, _options(rng, kv_layout="pshd", **_lse(rng)))
    return Drawn(values, _options(rng, page_size=z.slots))


def decode(rng: Rng) -> Drawn:
    """Draws a call of `decode_attention`."""
    return page(rng, "decode_attention")


def prefill(rng: Rng) -> Drawn:
    """Draws a call of `prefill_page_attention` with one sequence."""
    z, sinks = draw_batch(rng, decoding=False, sequences=1), some(rng, 0.3)
    rows, terms = int(z.q_lens[0]), _drawn_terms(rng, z, pairs=(2,), prefix=False)

    def values(rng: Rng) -> Arrays:
        tables, unread = z.tables(rng, np.arange(1))
        keys, held = (x.transpose(2, 0, 1, 3) for x in _caches(rng, z, unread))
        lens = {"kv_lens": z.lens.astype(np.int32), "page_indices": tables[0]}
        query = normal(rng, (rows, z.h, z.d), z.kind)
        more = _sinks(rng, sinks, z) | terms.arrays(rng, z, np.arange(1))
        return {"query": query, "key_cache": keys, "value_cache": held, **lens, **more}

    return Drawn(values, _options(rng, kv_layout="hpsd", **_lse(rng)))


def unified(rng: Rng, writes: bool = False) -> Drawn:
    """Draws a call of `unified_attention` or `chunked_prefill_paged_decode`, which writes new keys and values first."""
    z, sinks = draw_batch(rng, decoding=False), some(rng, 0.3)
    terms = _drawn_terms(rng, z, pairs=(1, 2, 3))

    def values(rng: Rng) -> Arrays:
        order = rng.permutation(len(z.lens))
        tables, unread = z.tables(rng, order)
        # Caches that are written are returned: there infinity is equal to itself.
        keys, held = _caches(rng, z, unread, np.inf if writes else np.nan)
        arrays = {"queries": draw_queries(rng, z), "key_cache": keys, "value_cache": held}
        arrays |= {
            "kv_lens": z.lens[order].astype(np.int32),
            "block_tables": tables,
            "query_start_loc": query_starts(z, order),
        }
        arrays |= terms.arrays(rng, z, order)
        if writes:
            new = {"keys": normal(rng, (z.rows, z.g, z.d), z.kind), "values": normal(rng, (z.rows, z.g, z.v), z.kind)}
            arrays |= {name: poison(x, np.arange(z.rows) == z.rows - 1) for name, x in new.items()}
        return {**arrays, **_sinks(rng, sinks, z)}

    return Drawn(values, _options(rng, **_lse(rng)))


def chunked(rng: Rng) -> Drawn:
    """Draws a call of `chunked_prefill_paged_decode`."""
    return unified(rng, writes=True)


def version2(rng: Rng) -> Drawn:
    """Draws a call of `ragged_page_attention_v2`, whose cache alternates keys and values."""
    z, sinks = draw_batch(rng, decoding=False, value_size=False), some(rng, 0.3)
    terms = _drawn_terms(rng, z, pairs=(1, 2, 3))

    def values(rng: Rng) -> Arrays:
        order = rng.permutation(len(z.lens))
        tables, unread = z.tables(rng, order)
        pages = np.stack(_caches(rng, z, unread), axis=3).reshape(z.pages, z.slots, -1, z.d)
        lens = {"kv_lens": z.lens[order].astype(np.int32), "block_tables": tables}
        lens |= {"query_start_loc": query_starts(z, order), "num_seqs": np.int32(len(order))}
        return {
            "queries": draw_queries(rng, z),
            "kv_pages": pages,
            **lens,
            **_sinks(rng, sinks, z),
            **terms.arrays(rng, z, order),
        }

    return Drawn(values, _options(rng, **_lse(rng)))


def version3(rng: Rng) -> Drawn:
    """Draws a call of `ragged_page_attention_v3`, which writes new keys and values into a packed cache."""
    z, sinks = draw_batch(rng, decoding=False, value_size=False), some(rng, 0.3)
    terms = _drawn_terms(rng, z, pairs=(1, 2, 3))
    pack = 4 // z.kind.itemsize
    shape = (cdiv(2 * z.g, pack), pack, cdiv(z.d, 128) * 128)

    def values(rng: Rng) -> Arrays:
        order = rng.permutation(len(z.lens))
        tables, unread = z.tables(rng, order)
        cache = poison(normal(rng, (z.pages, z.slots, *shape), z.kind), unread, np.inf)
        new = {name: normal(rng, (z.rows, z.g, z.d), z.kind) for name in ("keys", "values")}
        new = {name: poison(x, np.arange(z.rows) == z.rows - 1) for name, x in new.items()}
        lens = {"kv_lens": z.lens[order].astype(np.int32), "block_tables": tables.reshape(-1)}
        lens |= {"query_start_loc": query_starts(z, order), "distribution": np.array([0, 0, len(order)], np.int32)}
        more = _sinks(rng, sinks, z) | terms.arrays(rng, z, order)
        return {"queries": draw_queries(rng, z), **new, "kv_cache": cache, **lens, **more}

    return Drawn(values, _options(rng, softmax_scale=z.d**-0.5, kv_layout="interleaved", **_lse(rng)))


def latent(rng: Rng) -> Drawn:
    """Draws a call of `multi_latent_ragged_page_attention` or its second version."""
    z = draw_batch(rng, decoding=False)
    sinks, terms = some(rng, 0.2), _drawn_terms(rng, z, pairs=(1, 2, 3))
    r, rope = pick(rng, (64, 128, 512)), pick(rng, (16, 64))
    pack = 4 // z.kind.itemsize
    lanes = cdiv(r, 128) * 128 + cdiv(rope, 128) * 128

    def values(rng: Rng) -> Arrays:
        order, rows = rng.permutation(len(z.lens)), z.rows
        tables, unread = z.tables(rng, order)
        cache = poison(normal(rng, (z.pages, z.slots, lanes), z.kind), unread, np.inf)
        shapes = {"queries_nope": (rows, z.h, r), "queries_pe": (rows, z.h, rope), "keys_values": (rows, r)}
        shapes |= {"keys_pe": (rows, rope)}
        made = {name: normal(rng, shape, z.kind) for name, shape in shapes.items()}
        made = {name: poison(x, np.arange(rows) == rows - 1) for name, x in made.items()}
        lens = {"kv_lens": z.lens[order].astype(np.int32), "block_tables": tables.reshape(-1)}
        lens |= {"query_start_loc": query_starts(z, order), "distribution": np.array([0, 0, len(order)], np.int32)}
        more = _sinks(rng, sinks, z) | terms.arrays(rng, z, order)
        return {**made, "kv_cache": cache.reshape(z.pages, z.slots // pack, pack, lanes), **lens, **more}

    return Drawn(values, _options(rng, softmax_scale=(r + rope) ** -0.5, **_lse(rng)))


def ragged_decode(rng: Rng) -> Drawn:
    """Draws a call of `ragged_decode_attention`, with one query per row over a range of keys."""
    z, sinks, s = draw_batch(rng, decoding=True), some(rng, 0.3), int(rng.integers(1, 300))
    count, terms = len(z.lens), _drawn_terms(rng, z, prefix=False)

    def values(rng: Rng) -> Arrays:
        ends = rng.integers(0, s + 1, count).astype(np.int32)
        starts = (ends * rng.random(count)).astype(np.int32)
        positions = np.arange(s)
        unread = (positions < starts[:, None]) | (positions >= ends[:, None])
        shapes = {"key": (count, s, z.g, z.d), "value": (count, s, z.g, z.v)}
        arrays = {name: poison(normal(rng, shape, z.kind), unread) for name, shape in shapes.items()}
        arrays |= {"query": normal(rng, (count, z.h, z.d), z.kind), "sequence_start": starts, "sequence_end": ends}
        arrays |= terms.arrays(rng, z, np.arange(count))
        return {**arrays, **({"softmax_aux": normal(rng, (z.h, 2))} if sinks else {})}

    options = _options(rng, **_lse(rng))
    options |= {"sliding_window": (options["sliding_window"], None)} if "sliding_window" in options else {}
    return Drawn(values, options)
