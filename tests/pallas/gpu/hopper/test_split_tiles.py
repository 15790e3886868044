"""Tiles whose visits several blocks share: every visit is some block's, and parts make the whole."""

import collections

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from ejkernel.families.tiled_attention import TiledAttention
from ejkernel.types.pullback import Pullback
from ejkernel_pallas.gpu.hopper import tile_scheduler
from ejkernel_pallas.gpu.hopper.split_tiles import NO_SPLIT, TailSplit, split_tail_wave
from ejkernel_pallas.gpu.tiled_attention import backward
from ejkernel_pallas.gpu.tiled_attention.config import (
    BACKWARD_TILES,
    FORWARD_TILES,
    VALUE_HEAD_DIMS,
    HopperBackward,
    HopperForward,
    backward_tile,
)
from ejkernel_pallas.gpu.tiled_attention.forward import forward
from ejkernel_pallas.gpu.tiled_attention.kernels.split_combine import merge_split_tiles
from ejkernel_pallas.gpu.tiled_attention.plan.block_map import key_block_ranges, num_tiles, query_block_ranges
from ejkernel_pallas.gpu.tiled_attention.spec import make_spec


@pytest.mark.parametrize(
    ("tiles", "visits", "split"),
    [
        (4096, 64, TailSplit(4, 32)),  # B4 S8192 H16 D128
        (16, 256, TailSplit(16, 8)),  # fewer tiles than blocks
        (132, 64, NO_SPLIT),  # whole waves
        (116, 16, NO_SPLIT),  # parts would take more waves
        (4, 8, NO_SPLIT),  # less is saved than parts cost
        (4, 1, NO_SPLIT),
    ],
)
def test_the_tail_wave_is_split_if_that_saves_time(tiles, visits, split):
    assert split_tail_wave(tiles, 132, visits) == split


@pytest.mark.parametrize(("batch", "heads", "queries", "keys"), [(1, 5, 700, 8000), (2, 3, 128, 6000)])
def test_every_key_block_of_a_tile_is_in_exactly_one_item(batch, heads, queries, keys, monkeypatch):
    monkeypatch.setattr(tile_scheduler, "num_multiprocessors", lambda: 12)
    q, k = (jax.ShapeDtypeStruct((batch, n, heads, 128), jnp.bfloat16) for n in (queries, keys))
    spec = make_spec(TiledAttention(query=q, key=k, value=k, softmax_scale=1.0))
    table = key_block_ranges(spec, None, 128, 128)
    count = -(-keys // 128)
    rows, split = table.shape[1], split_tail_wave(batch * heads * table.shape[1], 12, count)
    plan = tile_scheduler.make_tile_schedule(
        rows,
        batch_size=batch,
        heads_per_batch_row=heads,
        reverses_tiles=False,
        head_bytes=2**20,
        heads_per_group=1,
        is_persistent=True,
        tail_split=split,
    )
    assert plan.tail_split.num_split_tiles
    found, parts, at = collections.Counter(), [], jnp.asarray(table)
    for number in range(plan.num_items):
        item = tile_scheduler.locate_work_tile(plan, jnp.int32(number))
        first, full_start, full_end, last = (int(x) for x in tile_scheduler.block_bounds(plan, at, jnp.int32(number)))
        assert first < last
        assert [n for n in range(first, last) if not full_start <= n < full_end] == (
            [count - 1] if last == count else []
        )
        found.update((int(item.batch_row), int(item.head), int(item.tile_in_head), n) for n in range(first, last))
        parts += [int(item.split_index)] if item.split_index >= 0 else []
    assert set(found.values()) == {1}
    assert len(found) == batch * heads * table.shape[1] * count
    assert parts == list(range(plan.tail_split.num_split_tiles * plan.tail_split.splits_per_tile))


def test_a_tile_has_at_most_as_many_splits_as_steps_per_head():
    assert split_tail_wave(2, 132, 8, heads_per_tile=4) == TailSplit(2, 8)


@pytest.mark.parametrize(
    ("size", "heads", "kv_heads", "queries", "keys"), [(128, 6, 2, 3000, 1300), (256, 4, 4, 6000, 900)]
)
def test_split_key_tiles_add_to_dq_once_and_in_order(size, heads, kv_heads, queries, keys, monkeypatch):
    """Those that add to a tile of queries do so in the order of their keys, and each adds once."""
    monkeypatch.setattr(tile_scheduler, "num_multiprocessors", lambda: 12)
    q = jax.ShapeDtypeStruct((2, queries, heads, size), jnp.bfloat16)
    k = jax.ShapeDtypeStruct((2, keys, kv_heads, size), jnp.bfloat16)
    spec = make_spec(TiledAttention(query=q, key=k, value=k, softmax_scale=1.0))
    tile = backward_tile(params_of(BACKWARD_TILES, size), spec)
    table = query_block_ranges(spec, None, tile.block_q, tile.block_kv)
    plan, at = backward._tile_schedule_maker(table, spec, tile)(2), jnp.asarray(table)
    assert plan.tail_split.num_split_tiles
    adding = collections.defaultdict(list)
    for number in range(plan.num_items):
        item = tile_scheduler.locate_work_tile(plan, jnp.int32(number))
        first, _, _, last = (int(x) for x in tile_scheduler.block_bounds(plan, at, jnp.int32(number)))
        assert first < last
        for n in range(first, last):
            adding[int(item.batch_row), int(item.head), n].append(int(item.tile_in_head))
    assert len(adding) == 2 * kv_heads * num_tiles(queries, tile.block_q)
    assert all(found == list(range(num_tiles(keys, tile.block_kv))) for found in adding.values())


def test_merged_splits_equal_the_whole_softmax():
    rng = np.random.default_rng(0)
    scores, values = rng.normal(size=(2, 7, 24)), rng.normal(size=(2, 24, 8))
    scores[1, :, :6] = scores[1, 3] = -np.inf  # a part that attends to nothing, and a query
    weights = np.exp(scores)
    row_sum = weights.sum(axis=-1)
    want = np.einsum("tqk,tkd->tqd", weights, values) / np.where(row_sum > 0, row_sum, 1)[..., None]
    masses = weights.reshape(2, 7, 4, 6).swapaxes(1, 2)
    sums = masses.sum(axis=-1)
    parts = np.einsum("tpqk,tpkd->tpqd", masses, values.reshape(2, 4, 6, 8)) / np.where(sums > 0, sums, 1)[..., None]
    with np.errstate(divide="ignore"):
        output, lse = merge_split_tiles(jnp.asarray(parts), jnp.asarray(np.log(sums)))
        np.testing.assert_allclose(lse, np.log(row_sum), rtol=1e-6)
    np.testing.assert_allclose(output, want, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("size", FORWARD_TILES)
def test_a_call_of_few_queries_has_its_keys_split(size, monkeypatch):
    monkeypatch.setattr(tile_scheduler, "num_multiprocessors", lambda: 132)
    value_size = VALUE_HEAD_DIMS[size][0]
    q, k, v = (
        jax.ShapeDtypeStruct((1, n, 8, d), jnp.bfloat16) for n, d in ((100, size), (4001, size), (4001, value_size))
    )
    sinks = jax.ShapeDtypeStruct((8,), jnp.float32)
    record = TiledAttention(query=q, key=k, value=v, softmax_scale=0.1, softmax_aux=sinks)
    text = lowered(lambda record: forward(record, params_of(FORWARD_TILES, size)), record)
    assert f"tensor<{8 * 16}x{FORWARD_TILES[size][0][0]}x{value_size}xf32>" in text


@pytest.mark.parametrize("size", BACKWARD_TILES)
def test_a_call_of_few_keys_has_its_queries_split(size, monkeypatch):
    monkeypatch.setattr(tile_scheduler, "num_multiprocessors", lambda: 132)
    value_size = VALUE_HEAD_DIMS[size][0]
    q = jax.ShapeDtypeStruct((1, 4001, 8, size), jnp.bfloat16)
    k, v = (jax.ShapeDtypeStruct((1, 100, 2, d), jnp.bfloat16) for d in (size, value_size))
    record = TiledAttention(query=q, key=k, value=v, softmax_scale=0.1)
    output, residuals = jax.eval_shape(lambda record: forward(record, params_of(FORWARD_TILES, size)), record)
    wanted = frozenset({"query", "key", "value"})
    pullback = Pullback(record=record, residuals=residuals, output=output, cotangent=output, grad_fields=wanted)
    text = lowered(lambda pullback: backward.backward(pullback, params_of(BACKWARD_TILES, size)), pullback)
    keys = BACKWARD_TILES[size][0][0]
    for d in (size, value_size):
        assert text.count(f"tensor<{2 * PARTS[size]}x{keys}x{d}xf32>") > (1 if size == value_size else 0)


PARTS = {64: 32, 128: 63, 192: 63, 256: 32}
"""Of a tile of 4001 queries, of four heads each."""


def params_of(table, size):
    """The configuration that comes first."""
    (first, second, stages), *_ = table[size]
    if table is FORWARD_TILES:
        return HopperForward(block_q=first, block_kv=second, stages=stages)
    return HopperBackward(block_kv=first, block_q=second, stages=stages)


def lowered(fun, given):
    text = jax.jit(fun).trace(given).lower(lowering_platforms=("cuda",)).as_text()
    assert "mosaic_gpu" in text
    return text
