"""The indexer's TPU kernel compared with the family's meaning, and simulated with races detected."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from tpu_races import found
from tpu_records import interpreted, simulated

from ejkernel.families.lightning_indexer import LightningIndexer, reference
from ejkernel_pallas.tpu.lightning_indexer import MAX_HEADS, MAX_QUERIES, MAX_TOP_K, config, implementations
from ejkernel_pallas.tpu.lightning_indexer.config import TpuIndexerTiles
from ejkernel_pallas.tpu.lightning_indexer.forward import forward

TILES = TpuIndexerTiles(block_k=256, keys_per_selection=512)


def record(shape=(1, 37, 600, 3, 16), dtype="bfloat16", top_k=7, window=None, key_dtype=None, **fields):
    """A record of (B, T, S, H, D) with multiples of 1/4, so that scores are exact, and causal ranges of keys."""
    b, t, s, h, d = shape
    random = np.random.default_rng(3)

    def quarters(*size):
        return np.clip(np.round(4 * random.normal(size=size)), -8, 8) / 4

    ends = np.clip(np.arange(t) + s - t + 1, 0, s)[None]
    starts = np.zeros_like(ends) if window is None else np.maximum(0, ends - window)
    given = {name: x(random) if callable(x) else x for name, x in fields.items()}
    return LightningIndexer(
        query=jnp.asarray(quarters(b, t, h, d), dtype),
        key=jnp.asarray(quarters(b, s, d), key_dtype or dtype),
        weights=jnp.asarray(quarters(b, t, h), jnp.float32),
        key_starts=jnp.asarray(starts, jnp.int32),
        key_ends=jnp.asarray(ends, jnp.int32),
        top_k=top_k,
        softmax_scale=given.pop("softmax_scale", 0.25),
        **given,
    )


def with_nan_and_zeros(given):
    """The record with a key of NaN, a query of NaN, negative zeros, and a query that selects nothing."""
    query = given.query.at[0, 5].set(jnp.nan).at[0, 7].set(-0.0)
    return dataclasses.replace(
        given, query=query, key=given.key.at[0, 411].set(jnp.nan), key_ends=given.key_ends.at[0, 9].set(0)
    )


CASES = {
    "several selections of two blocks, NaN": with_nan_and_zeros(
        record((1, 140, 1100, 2, 8), top_k=300, rectify=False, softmax_scale=-0.5, window=900)
    ),
    "scaled keys of 8 bits, float32": record(
        (2, 5, 300, 9, 8),
        "float32",
        key_dtype="int8",
        key_scales=lambda random: jnp.asarray(2.0 ** random.integers(-3, 1, (2, 300)), jnp.float32),
    ),
}


def check(given):
    (indices, scores), _ = jax.jit(lambda given: forward(given, TILES))(given)
    (expected_indices, expected_scores), _ = reference(given)
    np.testing.assert_array_equal(indices, expected_indices)
    np.testing.assert_array_equal(scores, expected_scores)


@pytest.mark.parametrize("name", CASES)
def test_selects_the_same_keys_as_the_reference(name):
    with interpreted():
        check(CASES[name])


def test_selects_without_races_and_skips_tiles_that_no_query_needs():
    with simulated():
        check(record((1, 9, 1100, 3, 16), window=500))
    assert not found()


def test_calls_that_the_kernel_cannot_hold_are_refused():
    (implementation,) = implementations()
    reasons = lambda given: list(implementation.requires.extra(given))  # noqa: E731
    shape, given = jax.ShapeDtypeStruct, record()
    assert not reasons(given)
    query = lambda *size: {"query": shape(size, jnp.float32)}  # noqa: E731
    for changes, sentence in (
        (query(1, 8, MAX_HEADS + 1, 16), "at most 256"),
        (query(1, MAX_QUERIES + 1, 4, 16), "query: got 4194305 queries"),
        (query(1, 8, 256, 256), "bytes of VMEM"),
        ({"top_k": MAX_TOP_K + 1}, "top_k: got 4097"),
        ({"top_k": 2048, "key": shape((1, 2**20, 16), jnp.bfloat16)}, "key: got 1048576 keys"),
    ):
        assert sentence in reasons(dataclasses.replace(given, **changes))[0]
    with pytest.raises(ValueError, match="keys_per_selection: got 300"):
        TpuIndexerTiles(block_k=256, keys_per_selection=300)


@pytest.mark.parametrize("keys", [200, 8192, 32768, 131072, 500000])
def test_default_tiles_fit_memory_and_the_bits_of_an_index(keys):
    shape = jax.ShapeDtypeStruct
    given = dataclasses.replace(
        record(),
        query=shape((1, 4096, 64, 128), jnp.bfloat16),
        key=shape((1, keys, 128), jnp.bfloat16),
        top_k=min(2048, keys),
    )
    tiles = config.heuristic(given, None, "forward")
    assert config.vmem_bytes(given, tiles.block_k, tiles.keys_per_selection) <= config.MAX_VMEM_BYTES
    rows = config.kept_rows(given.top_k) + tiles.keys_per_selection
    assert rows <= 1 << config.shift_bits(keys)
    assert config.shift_bits(keys) + (keys - 1).bit_length() <= config.PACKED_BITS
