"""What patterns make of tiles in XLA: those without a pair are not visited, forward or backward, on shards too."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from tiled_attention_cases import abstract, assert_close, attend, cotangent_of, differentiable, expected, make, tiled

from ejkernel.families.tiled_attention import FAMILY
from ejkernel.types.sparse_masks import (
    CausalMask,
    ChunkedCausalMask,
    FullMask,
    LocalMask,
    MultiHeadMask,
    NumpyMask,
)
from ejkernel_xla.tiled_attention.kernels import patterns
from ejkernel_xla.tiled_attention.kernels.key_tiles import find_key_tiles
from ejkernel_xla.tiled_attention.plan import make_plan

LENGTH, BLOCK = 128, 16
SHAPE = (LENGTH, LENGTH)
TILES = np.random.default_rng(0).random((8, 8)) < 0.3  # far from next to each other
SCATTERED = NumpyMask(np.kron(TILES, np.ones((BLOCK, BLOCK), bool)))
PATTERNS = {
    "causal": CausalMask(SHAPE),
    "local": LocalMask(SHAPE, (20, 3)),
    "chunked": ChunkedCausalMask(SHAPE, 40),
    "scattered": SCATTERED,
    "ends and diagonal": SCATTERED & CausalMask(SHAPE) | LocalMask(SHAPE, (0, 0)),
    "by head": MultiHeadMask((SCATTERED, LocalMask(SHAPE, (9, 0)), LocalMask(SHAPE, (9, 0)), CausalMask(SHAPE))),
}


def dense(pattern):
    """The pairs, [H | 1, T, S]."""
    heads = range(pattern.heads or 1)
    return np.stack([np.asarray(pattern.of_head(h).allowed(0, 0, pattern.shape)) for h in heads])


def counts(key_tiles):
    """Tiles that are visited, and those of them without masking."""
    return int(np.asarray(key_tiles.count).sum()), int(np.asarray(key_tiles.full).sum())


@pytest.mark.parametrize("name", PATTERNS)
@pytest.mark.parametrize("causal", [False, True])
def test_pattern_tiles_are_computed_if_nonempty_and_masked_if_partial(name, causal):
    pattern = PATTERNS[name]
    record = abstract(LENGTH, 4, 2 if pattern.heads else 4, pattern=pattern, causal=causal)
    plan = make_plan(record, BLOCK, BLOCK)
    key_tiles = find_key_tiles(record, plan)
    # Query heads of a KV head share their tiles.
    whole = dense(pattern).reshape(-1, plan.group if pattern.heads else 1, 8, BLOCK, 8, BLOCK)
    below = np.tril(np.ones(SHAPE, bool)) if causal else np.ones(SHAPE, bool)
    below = below.reshape(8, BLOCK, 8, BLOCK)
    some = whole.any(axis=(1, 3, 5)) & below.any(axis=(1, 3))
    every = whole.all(axis=(1, 3, 5)) & below.all(axis=(1, 3))
    assert key_tiles.listed.shape[1] == whole.shape[0]
    assert counts(key_tiles) == (some.sum(), every.sum())
    for head, row in np.ndindex(some.shape[:2]):
        listed = key_tiles.listed[0, head, row, : key_tiles.count[0, head, row]]
        assert set(listed.tolist()) == set(np.flatnonzero(some[head, row]).tolist())
    assert key_tiles.listed.shape[-1] == max(1, some.sum(axis=-1).max())


@pytest.mark.parametrize("name", PATTERNS)
@pytest.mark.parametrize("blocks", [(16, 16), (24, 40)])
def test_values_and_gradients_are_those_of_the_reference(name, blocks):
    extra = {"pattern": PATTERNS[name], "softmax_aux": True}
    record = make((LENGTH, LENGTH, 8, 6), (4, 2), batch=1, segments=True, band={"causal": True}, extra=extra)
    cotangent, grad_fields = cotangent_of(record), differentiable(record)
    assert_close(
        tiled(record, cotangent, blocks=blocks, grad_fields=grad_fields),
        expected(record, cotangent, grad_fields=grad_fields),
        5e-5,
    )


@pytest.mark.parametrize("name", ["scattered", "local", "by head"])
def test_nan_in_keys_of_skipped_tiles_is_never_read(name):
    pattern = PATTERNS[name] & NumpyMask(np.repeat(np.arange(LENGTH)[None] // BLOCK % 3 != 1, LENGTH, axis=0))
    record = make((LENGTH, LENGTH, 8, 8), (4, 4), batch=1, extra={"pattern": pattern})
    left_out = np.arange(LENGTH) // BLOCK % 3 == 1
    poison = {n: x.at[:, left_out].set(jnp.nan) for n, x in (("key", record.key), ("value", record.value))}
    cotangent, grad_fields = cotangent_of(record), differentiable(record)
    clean, poisoned = (
        tiled(r, cotangent, blocks=(BLOCK, BLOCK), grad_fields=grad_fields)
        for r in (record, dataclasses.replace(record, **poison))
    )
    assert_close(poisoned, clean, 0)  # a masked tile would have made NaN of 0 times NaN
    # The gradients of what no query reads are 0.
    assert not np.asarray(poisoned[2]["value"])[:, left_out].any()


@pytest.mark.parametrize(
    ("name", "letters"),
    [("local", "t"), ("ends and diagonal", "th"), ("by head", "t"), ("by head", "h"), ("by head", "th")],
)
def test_shards_use_their_part_of_the_pattern(name, letters):
    pattern = PATTERNS[name]
    record = make((LENGTH, LENGTH, 8, 8), (4, 4), batch=1, extra={"pattern": pattern})
    whole, _ = FAMILY.reference(record)
    parts = 0
    for t in range(4 if "t" in letters else 1):
        for h in range(2 if "h" in letters else 1):
            rows = slice(32 * t, 32 * t + 32) if "t" in letters else slice(None)
            heads = slice(2 * h, 2 * h + 2) if "h" in letters else slice(None)
            local = {n: getattr(record, n)[:, :, heads] for n in ("key", "value")}
            cut = dataclasses.replace(record, query=record.query[:, rows, heads], **local)
            offsets = {"t": jnp.int32(32 * t), "h": jnp.int32(2 * h)}
            shard = FAMILY.apply_shard_offsets(cut, {letter: offsets[letter] for letter in letters})
            got, _, _ = tiled(shard, cotangent_of(shard), blocks=(BLOCK, BLOCK), grad_fields=frozenset())
            np.testing.assert_allclose(got, whole[:, rows, heads], rtol=2e-5, atol=2e-6)
            parts += counts(find_key_tiles(shard, make_plan(shard, BLOCK, BLOCK)))[0]
    # What the shards visit is what the whole visits; where all heads are alike, each shard of heads does.
    times = 2 if "h" in letters and pattern.heads is None else 1
    assert parts == times * counts(find_key_tiles(record, make_plan(record, BLOCK, BLOCK)))[0]


def test_uneven_shards_of_a_pattern_are_right_without_skipping_tiles():
    record = make((LENGTH, LENGTH, 8, 8), (2, 2), batch=1, extra={"pattern": PATTERNS["local"]})
    cut = FAMILY.apply_shard_offsets(dataclasses.replace(record, query=record.query[:, 23:]), {"t": jnp.int32(23)})
    got, _, _ = tiled(cut, cotangent_of(cut), blocks=(BLOCK, BLOCK), grad_fields=frozenset())
    np.testing.assert_allclose(got, FAMILY.reference(record)[0][:, 23:], rtol=2e-5, atol=2e-6)


def test_tile_tables_are_cached_per_pattern_and_tile_size():
    patterns.tile_tables.cache_clear()
    for _ in range(3):
        record = abstract(LENGTH, pattern=LocalMask(SHAPE, (20, 3)) | FullMask(SHAPE))
        find_key_tiles(record, make_plan(record, BLOCK, BLOCK))
    assert (patterns.tile_tables.cache_info().misses, patterns.tile_tables.cache_info().hits) == (1, 2)


@pytest.mark.parametrize("by_head", [False, True])
def test_work_and_memory_of_a_window_are_linear(by_head):
    def window(length):
        mask = LocalMask((length, length), (500, 0))
        return MultiHeadMask((mask, LocalMask(mask.shape, (200, 0)), mask, mask)) if by_head else mask

    def visited(length):
        record = abstract(length, 4, 4, pattern=window(length))
        return counts(find_key_tiles(record, make_plan(record, 512, 512)))[0]

    def temporary(length):
        record = abstract(length, 4, 4, pattern=window(length))

        def loss(*arrays):
            fields = dict(zip(("query", "key", "value"), arrays, strict=True))
            return jnp.sum(attend(dataclasses.replace(record, **fields)) ** 2)

        program = jax.jit(jax.grad(loss, (0, 1, 2))).lower(record.query, record.key, record.value).compile()
        return program.memory_analysis().temp_size_in_bytes

    assert visited(16384) <= 2.1 * visited(8192)
    assert visited(8192) < 2 * 16 * (4 if by_head else 1)
    small, large = temporary(8192), temporary(16384)
    assert large <= 2.1 * small
    assert large < 16384**2 / 4
