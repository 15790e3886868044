"""The TPU kernel of the indexer's decode step compared with the family's meaning, and simulated with races detected."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from tpu_races import found
from tpu_records import interpreted, simulated

from ejkernel.families.lightning_indexer import LightningIndexer, reference
from ejkernel.ops.device import find_device
from ejkernel_pallas.tpu.lightning_indexer_decode import config, implementations
from ejkernel_pallas.tpu.lightning_indexer_decode.config import TpuIndexerDecodeTiles
from ejkernel_pallas.tpu.lightning_indexer_decode.forward import forward

TILES = TpuIndexerDecodeTiles(block_k=1024)


def record(shape=(2, 1, 3000, 9, 16), dtype="float32", key_dtype=None, slots=0, window=None, **fields):
    """A record of (B, T, S, H, D) with multiples of 1/4, so that scores are exact, and causal ranges of keys; over
    pages of `slots` tokens in a random order if there are any.
    """
    b, t, s, h, d = shape
    random = np.random.default_rng(3)

    def quarters(*size):
        return np.clip(np.round(4 * random.normal(size=size)), -8, 8) / 4

    ends = np.arange(t) + random.integers(t, s - t, (b, 1)) + 1
    starts = np.zeros_like(ends) if window is None else np.maximum(0, ends - window)
    entries = -(-s // slots) if slots else 0
    keys = (b * entries + 1, slots) if slots else (b, s)
    scale = {"key_scales": jnp.asarray(2.0 ** random.integers(-3, 1, keys), jnp.float32)} if key_dtype else {}
    tables = {"block_tables": jnp.asarray(random.permutation(b * entries).reshape(b, -1), jnp.int32)} if slots else {}
    given = {"top_k": 300, "softmax_scale": 0.25, **scale, **tables, **fields}
    return LightningIndexer(
        query=jnp.asarray(quarters(b, t, h, d), dtype),
        key=jnp.asarray(quarters(*keys, d) * (4 if key_dtype == "int8" else 1), key_dtype or dtype),
        weights=jnp.asarray(quarters(b, t, h), jnp.float32),
        key_starts=jnp.asarray(starts, jnp.int32),
        key_ends=jnp.asarray(ends, jnp.int32),
        **given,
    )


def with_nan_and_empty_rows(given):
    """The record with a key of NaN, negative zeros, a query that selects nothing, and a row that selects nothing."""
    ends = given.key_ends.at[1].set(0).at[0, 1].set(0)
    weights = given.weights.at[0, 2].set(-0.0)
    return dataclasses.replace(given, key=given.key.at[0, 11].set(jnp.nan), key_ends=ends, weights=weights)


def with_missing_pages(given):
    """The record with entries that are no page, and a page of large numbers that no request has."""
    tables = given.block_tables.at[0, 1].set(-1).at[1, 0].set(given.key.shape[0])
    return dataclasses.replace(given, block_tables=tables, key=given.key.at[-1].set(100))


CASES = {
    "float32, NaN, empty rows": with_nan_and_empty_rows(
        record((3, 3, 2500, 3, 8), rectify=False, softmax_scale=-0.5, window=2000)
    ),
    "float8 in pages, some missing": with_missing_pages(
        record((2, 2, 2100, 9, 128), "bfloat16", "float8_e4m3fn", 256, top_k=1100)
    ),
}


def check(given):
    """Compares two calls under `jax.vmap` that share all arrays but the queries."""
    queries = jnp.stack([given.query, 2 * given.query])
    selected = jax.jit(jax.vmap(lambda query: forward(dataclasses.replace(given, query=query), TILES)[0]))(queries)
    for n in range(2):
        expected, _ = reference(dataclasses.replace(given, query=queries[n]))
        jax.tree.map(np.testing.assert_array_equal, [x[n] for x in selected], list(expected))


@pytest.mark.parametrize("name", CASES)
def test_selects_the_same_keys_as_the_reference(name):
    with interpreted():
        check(CASES[name])


def test_calls_that_the_kernel_cannot_hold_are_refused():
    (implementation,) = implementations()
    reasons = lambda given: list(implementation.requires.extra(given))  # noqa: E731
    shape = jax.ShapeDtypeStruct
    dense, paged = record(), record((2, 1, 2100, 3, 128), "bfloat16", slots=64)
    assert not reasons(dense)
    assert not reasons(paged)
    query = lambda *size: {"query": shape(size, jnp.float32)}  # noqa: E731
    for given, changes, sentence in (
        (dense, query(2, 9, 9, 16), "query: got 9 queries per row, the kernel takes at most 8"),
        (dense, query(2, 1, 257, 16), "at most 256"),
        (dense, query(2**17, 1, 9, 16), "words of tables"),
        (dense, {"top_k": 4097}, "top_k: got 4097"),
        (dense, {**query(2, 8, 9, 16), "key": shape((2, 2**22, 16), jnp.float32)}, "bytes of VMEM"),
        (dense, {"key": shape((2, 2**23 + 1, 16), jnp.float32)}, "at most 8388608"),
        (paged, {"key": shape((66, 40, 128), jnp.bfloat16)}, "pages of 40 slots of bfloat16, wants a multiple of 16"),
        (paged, {"key": shape((66, 2**14, 128), jnp.bfloat16)}, "at most 8192"),
        (paged, {"key": shape((66, 64, 96), jnp.bfloat16)}, "got 96 channels, the kernel wants a multiple of 128"),
    ):
        assert sentence in " ".join(reasons(dataclasses.replace(given, **changes)))
    with pytest.raises(ValueError, match="block_k: got 1000"):
        TpuIndexerDecodeTiles(block_k=1000)


def test_several_queries_of_few_keys_go_to_xla():
    (implementation,) = implementations()
    for queries, keys, is_first in ((2, 2048, True), (8, 12287, False), (8, 12288, True)):
        query, key = (jax.ShapeDtypeStruct(x, jnp.float32) for x in ((1, queries, 64, 128), (1, keys, 128)))
        given = dataclasses.replace(record(), top_k=2048, query=query, key=key)
        assert (implementation.priority(given, find_device("v5e"), "forward") > 0) == is_first


@pytest.mark.parametrize("slots", [0, 64, 384])
def test_default_tiles_fit_memory_and_have_whole_pages(slots):
    shape = jax.ShapeDtypeStruct
    keys = {"key": shape((500, slots, 128), jnp.bfloat16), "block_tables": shape((1, 340), jnp.int32)}
    given = dataclasses.replace(
        record(),
        query=shape((1, 8, 64, 128), jnp.bfloat16),
        top_k=2048,
        **(keys if slots else {"key": shape((1, 131072, 128), jnp.bfloat16)}),
    )
    block_k = config.heuristic(given, None, "forward").block_k
    assert config.vmem_bytes(given, block_k) <= config.MAX_VMEM_BYTES
    assert not slots or block_k % slots == 0


def test_copies_pages_without_races():
    given = with_missing_pages(record((2, 1, 1100, 3, 128), "bfloat16", "int8", 64, top_k=40))
    with simulated():
        selected, _ = jax.jit(lambda given: forward(given, TILES))(given)
        jax.tree.map(np.testing.assert_array_equal, list(selected), list(reference(given)[0]))
    assert not found()
