"""What is decided before a Triton kernel starts: which tiles it visits, and which sizes they have. Needs no Triton."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from attended_pairs import attended
from hypothesis import given, settings
from hypothesis import strategies as st

from ejkernel.families.tiled_attention import TiledAttention
from ejkernel.families.tiled_attention.tile_pairs import padding_as_segments
from ejkernel.modules import FlashAttentionConfig, flash_attention
from ejkernel.ops import BwdParams
from ejkernel.ops.device import DeviceInfo
from ejkernel_triton.requirements import DEVICE_TOOLCHAIN
from ejkernel_triton.tiled_attention import batch_invariant, config, implementations, invariance_limits
from ejkernel_triton.tiled_attention.plan import plan_key_blocks, plan_query_blocks

H200 = DeviceInfo(platform="gpu", vendor="nvidia", kind="NVIDIA H200", compute_capability=9.0)


def record(queries, keys, size=16, dtype=jnp.bfloat16, **features):
    shapes = ((2, queries, 4, size), (2, keys, 2, size), (2, keys, 2, size))
    q, k, v = (jax.ShapeDtypeStruct(shape, dtype) for shape in shapes)
    return TiledAttention(query=q, key=k, value=v, softmax_scale=0.25, **features)


@st.composite
def calls(draw):
    queries, keys = draw(st.integers(1, 24)), draw(st.integers(1, 24))
    sides = st.none() | st.integers(0, 12)
    features = {"causal": draw(st.booleans()), "sliding_window": draw(st.none() | st.tuples(sides, sides))}
    rng = np.random.default_rng(draw(st.integers(0, 99)))
    if draw(st.booleans()):
        for name, n in (("q_segment_ids", queries), ("kv_segment_ids", keys)):
            features[name] = jnp.asarray(np.sort(rng.integers(-1, 3, (2, n)), axis=1), jnp.int32)
    if draw(st.booleans()):
        features["q_positions"] = jnp.asarray(rng.integers(0, keys, (2, queries)), jnp.int32)
    return record(queries, keys, **features)


@settings(max_examples=25, deadline=None)
@given(calls(), st.sampled_from([(4, 8), (8, 4), (16, 16)]))
def test_block_lists_contain_every_attending_pair_and_full_blocks_are_full(call, blocks):
    pairs = attended(call)
    tables = (
        (plan_key_blocks(call, *blocks).block_lists, pairs, blocks),
        (plan_query_blocks(call, *blocks).block_lists, pairs.swapaxes(1, 2), blocks[::-1]),
    )
    for table, wanted, (own, other) in tables:
        table = np.broadcast_to(np.asarray(table), (2, *table.shape[1:]))
        for b, tile in np.ndindex(table.shape[:2]):
            first, full_start, full_end, last = table[b, tile]
            assert first <= full_start <= full_end <= last
            rows = wanted[b, tile * own : (tile + 1) * own]
            assert not rows[:, : first * other].any()
            assert not rows[:, last * other :].any()
            full = rows[:, full_start * other : full_end * other]
            assert full.all()
            assert full.size == rows.shape[0] * (full_end - full_start) * other  # no tile that ends beyond the last key
            assert rows.shape[0] == own or full_start == full_end


def test_a_padding_mask_becomes_segment_ids():
    real = jnp.arange(40) < jnp.array([30, 40])[:, None]
    call = padding_as_segments(record(24, 40, mask=real[:, None, None]))
    assert call.mask is None
    assert (np.asarray(call.kv_segment_ids) == np.where(real, 0, -1)).all()
    assert (np.asarray(call.q_segment_ids) == 0).all()
    assert np.asarray(plan_key_blocks(call, 8, 8).block_lists)[0, 0].tolist() == [0, 0, 3, 4]


def test_segment_ids_of_queries_alone_are_dropped():
    assert padding_as_segments(record(8, 8, q_segment_ids=jnp.zeros((2, 8), jnp.int32))).q_segment_ids is None


@pytest.mark.parametrize("capability", [8.0, 8.6, 8.9, 9.0, 10.0, 12.0])
@pytest.mark.parametrize("size", [60, 128, 256])
def test_candidates_are_distinct_and_have_few_scores_per_warp(capability, size):
    device = DeviceInfo(platform="gpu", vendor="nvidia", kind="some", compute_capability=capability)
    for direction in ("forward", "backward"):
        found = config.candidates(record(4096, 4096, size, causal=True), device, direction)
        assert len(set(found)) == len(found) > 0
        assert found[0] == config.heuristic(record(4096, 4096, size, causal=True), device, direction)
        for part in found:
            chosen = [config.forward_tile(part)] if direction == "forward" else config.backward_tiles(part)
            assert all(tile.stationary_rows * tile.streamed_rows // tile.warps <= 2048 for tile in chosen)


def test_default_tiles_are_no_longer_than_the_sequences():
    part = config.heuristic(record(1, 100), H200, "forward")
    assert (part.block_q, part.block_kv) == (16, 128)


GOOD = {"block_q": 64, "block_kv": 64, "num_warps": 4, "num_stages": 2}
BAD = [("block_q", 100), ("block_kv", 8), ("num_warps", 3), ("num_stages", 0)]


@pytest.mark.parametrize(("name", "value"), BAD)
def test_an_invalid_config_field_is_named_in_the_error(name, value):
    bad = {**GOOD, name: value}
    with pytest.raises(ValueError, match=f"cfg: got {name}={value}"):
        config.forward_tile(config.TritonForward(**bad))
    good, bad = config.GradientTile(**GOOD), config.GradientTile(**bad)
    with pytest.raises(ValueError, match=rf"cfg: got dkv\.{name}={value}"):
        config.backward_tiles(config.TritonBackward(dkv=bad, dq=good))
    with pytest.raises(ValueError, match=rf"cfg: got dq\.{name}={value}"):
        config.backward_tiles(config.TritonBackward(dkv=good, dq=bad))


def test_public_tile_sizes_apply_to_both_backward_kernels():
    implementation, _ = implementations()
    rule = config.heuristic(record(256, 256), H200, "backward")
    public = BwdParams(q_blocksize=16, num_stages=4)
    found = implementation.config.complete_part(rule, public, "backward")
    for kernel in ("dkv", "dq"):
        wanted = dataclasses.replace(getattr(rule, kernel), block_q=16, num_stages=4)
        assert getattr(found, kernel) == wanted
    assert implementation.config.unread_fields(BwdParams(blocksize_k=2), "backward") == ["blocksize_k"]


@pytest.mark.parametrize(
    ("stationary_rows", "streamed_rows", "warps"), [(128, 64, 8), (64, 64, 4), (16, 32, 4), (32, 64, 8)]
)
def test_query_gradient_warps_follow_the_longer_tile_side(stationary_rows, streamed_rows, warps):
    assert config.query_gradient_warps(stationary_rows, streamed_rows) == warps


def scores_of_a_warp(call, device):
    """Of the three kernels."""
    found = [config.forward_tile(config.heuristic(call, device, "forward"))]
    found += config.backward_tiles(config.heuristic(call, device, "backward"))
    return [tile.stationary_rows * tile.streamed_rows // tile.warps for tile in found]


@pytest.mark.parametrize("capability", [8.0, 8.9, 9.0, 10.0, 12.0])
@pytest.mark.parametrize("size", [64, 128, 256])
def test_features_that_take_registers_do_not_increase_scores_per_warp(capability, size):
    device = DeviceInfo(platform="gpu", vendor="nvidia", kind="some", compute_capability=capability)
    ids = jax.ShapeDtypeStruct((2, 4096), jnp.int32)
    plain = scores_of_a_warp(record(4096, 4096, size, causal=True), device)
    for features in ({"q_segment_ids": ids, "kv_segment_ids": ids}, {"logits_soft_cap": 30.0}):
        scores = scores_of_a_warp(record(4096, 4096, size, causal=True, **features), device)
        assert all(a <= b for a, b in zip(scores, plain, strict=True))


def test_float32_keys_are_held_whole_on_hopper_without_features_that_take_registers():
    ids = jax.ShapeDtypeStruct((2, 4096), jnp.int32)
    for features, whole in (({}, True), ({"logits_soft_cap": 30.0}, False), ({"q_segment_ids": ids}, False)):
        call = record(4096, 4096, 128, jnp.float32, causal=True, **features)
        keys, _ = config.backward_tiles(config.heuristic(call, H200, "backward"))
        assert (keys.stationary_rows >= keys.streamed_rows) == whole


def test_triton_is_refused_by_name_without_its_toolchain_or_device():
    array = jax.ShapeDtypeStruct((1, 16, 2, 16), jnp.float32)
    with pytest.raises(NotImplementedError, match=r"triton .* refused .*needs amd or nvidia"):
        jax.eval_shape(lambda x: flash_attention(x, x, x, platform="triton", cfg=FlashAttentionConfig()), array)
    implementation, _ = implementations()
    assert implementation.requires.modules == DEVICE_TOOLCHAIN


def test_one_configuration_serves_all_calls_of_a_batch_invariant_block():
    """A short call, a long one and a chunk with positions had different tiles."""
    calls = [record(1, 1, 64), record(700, 700, 64)]
    calls.append(dataclasses.replace(calls[1], q_positions=jax.ShapeDtypeStruct((1, 700), jnp.int32)))
    assert len({batch_invariant(call, H200, "forward") for call in calls}) == 1
    assert [list(invariance_limits(call)) for call in calls] == [[], [], []]
    (reason,) = invariance_limits(dataclasses.replace(calls[1], sliding_window=(3, 0)))
    assert reason.startswith("a window: ")
