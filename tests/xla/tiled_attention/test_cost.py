"""What tiled attention in XLA costs, without measuring time: memory, tiles visited, sizes chosen."""

import dataclasses
import functools
import math
import re
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from tiled_attention_cases import abstract, attend

from ejkernel.families.tiled_attention import TiledAttention
from ejkernel_xla.tiled_attention.config import ChunkedSoftmax, candidates, heuristic
from ejkernel_xla.tiled_attention.kernels.key_tiles import find_key_tiles
from ejkernel_xla.tiled_attention.plan import SCORES_PER_STEP, make_plan

CPU = SimpleNamespace(platform="cpu")


@functools.cache
def compiled(length: int, causal: bool) -> jax.stages.Compiled:
    record = abstract(length, causal=causal)

    def loss(query, key, value):
        return jnp.sum(attend(dataclasses.replace(record, query=query, key=key, value=value)) ** 2)

    return jax.jit(jax.grad(loss, (0, 1, 2))).lower(record.query, record.key, record.value).compile()


@pytest.mark.parametrize("causal", [False, True])
def test_memory_of_the_gradient_is_small_and_linear(causal):
    small, large = (compiled(n, causal).memory_analysis().temp_size_in_bytes for n in (8192, 16384))
    assert small <= 64e6
    assert large <= 2.1 * small


def test_no_buffer_holds_all_query_key_pairs():
    length = 8192
    sizes = {
        math.prod(map(int, dims.split(",")))
        for dims in re.findall(r"(?:f32|bf16|f16|s32|u32|pred)\[([\d,]+)\]", compiled(length, True).as_text())
    }
    assert max(sizes) < length**2 / 8


@pytest.mark.parametrize("broadcast", [(1, 8, 1, 4096), (1, 1, 4096, 1)])
def test_bias_gradient_is_never_larger_than_the_bias(broadcast):
    record = abstract(4096)

    def loss(query, bias):
        return jnp.sum(attend(dataclasses.replace(record, query=query, key=query, value=query, bias=bias)))

    memory = (
        jax.jit(jax.grad(loss, 1))
        .lower(record.query, jax.ShapeDtypeStruct(broadcast, jnp.float32))
        .compile()
        .memory_analysis()
    )
    assert memory.temp_size_in_bytes <= 64e6


def visited(record: TiledAttention, block: int = 512) -> float:
    """Part of all tile pairs that is visited."""
    plan = make_plan(record, block, block)
    key_tiles = find_key_tiles(record, plan)
    tiles = np.asarray(key_tiles.last - key_tiles.first)
    return float(tiles.sum() / (tiles.shape[0] * plan.queries.tiles * plan.keys.tiles))


@pytest.mark.parametrize(
    ("options", "limit"),
    [
        ({}, 1.0),
        ({"causal": True}, 0.54),
        ({"causal": True, "sliding_window": (511, None)}, 0.13),
        ({"sliding_window": (512, 512)}, 0.181),
        ({"sliding_window": (0, 0)}, 0.0626),
    ],
)
def test_fully_masked_tiles_are_not_computed(options, limit):
    assert visited(abstract(8192, **options)) <= limit


def test_only_partial_tiles_apply_a_mask():
    record = abstract(8192, causal=True)
    key_tiles = find_key_tiles(record, make_plan(record, 512, 512))
    masked = (key_tiles.last - key_tiles.first) - (key_tiles.full_end - key_tiles.full_start)
    assert masked.sum() == 16  # the diagonal
    assert not find_key_tiles(abstract(8192), make_plan(abstract(8192), 512, 512)).any_partial


def test_packed_segments_cost_the_sum_of_their_squares():
    lengths = np.array([700, 1800, 1500, 100, 2000, 2092])
    ids = jnp.asarray(np.repeat(np.arange(6), lengths)[None], jnp.int32)
    packed = abstract(8192, q_segment_ids=ids, kv_segment_ids=ids)
    squares = float((lengths**2).sum() / 8192**2)
    assert visited(packed, 128) <= 1.3 * squares
    assert visited(dataclasses.replace(packed, causal=True), 128) <= 0.75 * squares


def test_batch_rows_skip_tiles_by_their_own_segments():
    ids = jnp.asarray(np.stack([np.arange(256) // 64, np.zeros(256)]), jnp.int32)
    query = jax.ShapeDtypeStruct((2, 256, 2, 8), jnp.float32)
    record = TiledAttention(
        query=query, key=query, value=query, softmax_scale=1.0, q_segment_ids=ids, kv_segment_ids=ids
    )
    key_tiles = find_key_tiles(record, make_plan(record, 64, 64))
    np.testing.assert_array_equal(key_tiles.last - key_tiles.first, [[1] * 4, [4] * 4])
    np.testing.assert_array_equal(key_tiles.full_end - key_tiles.full_start, [[1] * 4, [4] * 4])


@pytest.mark.parametrize("heads", [(8, 8), (32, 1), (64, 8)])
def test_default_tiles_stay_within_the_budget(heads):
    record = abstract(8192, *heads)
    for direction in ("forward", "backward"):
        chosen = heuristic(record, CPU, direction)
        plan = make_plan(record, chosen.block_q, chosen.block_kv)
        rows = plan.batch * plan.heads * plan.group * plan.queries.block
        assert rows * plan.keys.block <= SCORES_PER_STEP


def test_tiles_are_no_longer_than_the_sequences():
    query, key = (jax.ShapeDtypeStruct((1, n, 2, 8), jnp.float32) for n in (3, 700))
    record = TiledAttention(query=query, key=key, value=key, softmax_scale=1.0)
    assert heuristic(record, CPU, "forward") == ChunkedSoftmax(block_q=3, block_kv=512)
    assert all(c.block_q == 3 and c.block_kv <= 700 for c in candidates(record, CPU, "backward"))
