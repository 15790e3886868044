"""The forward kernel of packed rows with a thread for each warpgroup: it ends, and a document has the values it has
alone. Faults that are planted into its mbarriers and masks are found.
"""

import dataclasses

import jax.numpy as jnp
import numpy as np
import pytest
from tests.pallas.gpu.tiled_attention.forward_simulation import COMPILED, simulated_forward
from tests.pallas.gpu.tiled_attention.warpgroups import Mbarriers

from ejkernel.families.tiled_attention import TiledAttention
from ejkernel_pallas.gpu.tiled_attention import forward
from ejkernel_pallas.gpu.tiled_attention.config import FORWARD_TILES, VALUE_HEAD_DIMS, HopperForward

TOKENS, HEADS = 300, 2
SIZES = tuple(FORWARD_TILES)
MASKS = (
    {},
    {"causal": True, "logits_soft_cap": 3.0},
    {"sliding_window": (50, 0)},
    {"sliding_window": (90, 20), "softmax_aux": jnp.asarray([0.3, -1.0])},
)


def ids_of(*lengths, before=0):
    """Ids of documents, with padding before and after them."""
    ids = np.repeat(np.arange(len(lengths)), lengths)
    return np.pad(ids, (before, TOKENS - before - ids.size), constant_values=-1)


LAYOUTS = {
    "one document": [ids_of(300)],
    "padding before and after": [ids_of(130, 70, before=50)],
    "several documents": [ids_of(7, 101, 150, 42)],
    "documents of one token": [ids_of(*[1] * 140)],
    "boundaries of blocks": [ids_of(64, 128, 64, 44)],
    "next to boundaries of blocks": [ids_of(63, 130, 1, 106)],
    "a row of padding": [ids_of(20, 200), ids_of()],
    "other documents per row": [ids_of(300), ids_of(1, 1, 190)],
    "out of order": [np.random.default_rng(0).permutation(ids_of(100, 20, 160))],
    "queries of a chunk": [ids_of(90, 130, 80)],
}


def make(ids, size, mask, queries=slice(None)):
    """A record of random arrays in which padding is NaN."""
    rng, ids = np.random.default_rng(0), jnp.asarray(np.stack(ids), jnp.int32)
    (value_size,) = VALUE_HEAD_DIMS[size]
    query, key, value = (
        jnp.where((ids < 0)[..., None, None], jnp.nan, rng.normal(size=(*ids.shape, heads, columns)))
        for heads, columns in ((HEADS, size), (1, size), (1, value_size))
    )
    arrays = {"query": query[:, queries], "key": key, "value": value}
    arrays = {name: x.astype(jnp.bfloat16) for name, x in arrays.items()}
    return TiledAttention(**arrays, softmax_scale=0.2, q_segment_ids=ids[:, queries], kv_segment_ids=ids, **mask)


def tile_of(size):
    queries, keys, stages = FORWARD_TILES[size][0]
    return HopperForward(block_q=queries, block_kv=keys, stages=stages, batch_invariant=True)


def expected(record):
    """Output and lse, with one matrix of scores."""
    q, k, v = (np.nan_to_num(np.asarray(x, np.float32)) for x in (record.query, record.key, record.value))
    q_ids, k_ids = (np.asarray(x) for x in (record.q_segment_ids, record.kv_segment_ids))
    scores = np.einsum("bthd,bsgd->bhts", q, k) * record.softmax_scale
    if record.logits_soft_cap is not None:
        scores = record.logits_soft_cap * np.tanh(scores / record.logits_soft_cap)
    distance = np.arange(k.shape[1]) - np.arange(q.shape[1])[:, None]
    left, right = record.sliding_window or (TOKENS, 0 if record.causal else TOKENS)
    attends = (q_ids[:, :, None] == k_ids[:, None]) & (k_ids >= 0)[:, None]
    weights = np.where((attends & (distance >= -left) & (distance <= right))[:, None], np.exp(scores), 0)
    total = weights.sum(axis=-1)
    if record.softmax_aux is not None:
        total = total + np.exp(np.asarray(record.softmax_aux))[:, None]
    with np.errstate(divide="ignore"):
        lse = np.log(total)
    return np.einsum("bhts,bsgd->bthd", weights / np.where(total > 0, total, 1)[..., None], v), lse


def check(monkeypatch, record, params, seeds=(0,)):
    """Checks values in some orders of the threads."""
    for seed in seeds:
        results = simulated_forward(monkeypatch, record, params, seed)
        for x, y in zip(results, expected(record), strict=True):
            np.testing.assert_allclose(x, y, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("mask", range(len(MASKS)))
@pytest.mark.parametrize("layout", LAYOUTS)
def test_layouts(monkeypatch, layout, mask):
    """The head dimension rotates with layout and mask."""
    size = SIZES[(list(LAYOUTS).index(layout) + mask) % len(SIZES)]
    queries = slice(130, 200) if layout == "queries of a chunk" else slice(None)
    check(monkeypatch, make(LAYOUTS[layout], size, MASKS[mask], queries), tile_of(size), [mask])


def document_at(record, start, end, first):
    """The call with tokens `start` to `end` alone, which begin at `first`, and padding."""

    def move(x, fill):
        return jnp.full_like(x, fill).at[:, first : first + end - start].set(x[:, start:end])

    arrays = {name: move(getattr(record, name), jnp.nan) for name in ("query", "key", "value")}
    ids = {name: move(getattr(record, name), -1) for name in ("q_segment_ids", "kv_segment_ids")}
    return dataclasses.replace(record, **arrays, **ids)


@pytest.mark.parametrize(("size", "mask"), list(zip(SIZES, MASKS, strict=True)), ids=str)
def test_bits_of_a_document(monkeypatch, size, mask):
    record, params = make([ids_of(7, 101, 150, 42)], size, mask), tile_of(size)
    output, lse = simulated_forward(monkeypatch, record, params)
    for (start, end), first in (((7, 108), 0), ((7, 108), 3), ((108, 258), 0), ((108, 258), 42)):
        alone, lse_alone = simulated_forward(monkeypatch, document_at(record, start, end, first), params, seed=1)
        tokens = slice(first, first + end - start)
        np.testing.assert_array_equal(alone[:, tokens], output[:, start:end])
        np.testing.assert_array_equal(lse_alone[..., tokens], lse[..., start:end])


BARRIERS = (
    "q_full",
    "q_free",
    "k_full",
    "k_free",
    "v_full",
    "v_free",
    "v_copied",
    "tile_index_full",
    "tile_index_free",
)


@pytest.mark.parametrize("fault", ["a missing arrival", "an arrival too many", "a wait that does not wait"])
@pytest.mark.parametrize("name", BARRIERS)
def test_faults_of_mbarriers_are_found(monkeypatch, name, fault):
    """Within a few orders of the threads."""
    arrive, start_wait = Mbarriers.arrive, Mbarriers.start_wait

    def faulty_arrive(self, n, copies=0):
        arrive(self, n, copies)
        if self.name == name and self.phases[n] == 1:
            self.arrivals[n] += {"a missing arrival": -1, "an arrival too many": 1}.get(fault, 0)

    def faulty_wait(self, n, who):
        is_over = start_wait(self, n, who)
        return (lambda: True) if self.name == name and fault == "a wait that does not wait" else is_over

    monkeypatch.setattr(Mbarriers, "arrive", faulty_arrive)
    monkeypatch.setattr(Mbarriers, "start_wait", faulty_wait)
    record, params = make([ids_of(7, 101, 80, 42), ids_of(60, 90)], 128, {"causal": True}), tile_of(128)
    with pytest.raises(AssertionError):
        check(monkeypatch, record, params, range(20))


def test_keys_of_earlier_documents_that_are_not_masked_are_found(monkeypatch):
    """Rows then count the keys that the last block of an earlier document shares with theirs."""
    record, params = make([ids_of(7, 101, 150, 42)], 128, {}), tile_of(128)
    run = forward.document_operands

    def without_first_blocks(*args):
        operands = run(*args)
        return operands | {"ranges": operands["ranges"].at[:, 2].set(0)}

    monkeypatch.setitem(COMPILED, "document_operands", without_first_blocks)
    with pytest.raises(AssertionError):
        check(monkeypatch, record, params)


def test_a_block_past_the_end_is_found(monkeypatch):
    record, params = make([ids_of(300)], 128, {}), tile_of(128)
    run = forward.document_operands

    def with_a_longer_list(*args):
        operands = run(*args)
        return operands | {"table": operands["table"].at[:, :, 3].set(operands["blocks"].shape[2] + 1)}

    monkeypatch.setitem(COMPILED, "document_operands", with_a_longer_list)
    with pytest.raises(AssertionError, match="out of bounds"):
        check(monkeypatch, record, params)
