"""Positions, segment ids, windows and chunk sizes at and beyond the ends of int32, against loops over Python's ints."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from dense_functions import DENSE

import ejkernel.modules as m
from ejkernel.types import MaskInfo
from ejkernel.types.integers import NO_LIMIT, clamp_positions, clamp_to_int32, exact_segment_ids
from ejkernel.types.sparse_masks import CausalMask, ChunkedCausalMask, LocalMask

T, H, D = 6, 2, 8
MOST, LEAST = 2**31 - 1, -(2**31)
Q, K, V = (np.asarray(x) for x in jax.random.normal(jax.random.key(0), (3, 1, T, H, D)))
HUGE = (NO_LIMIT, 2**31 - 1, 2**31, 2**40)


def attend(allowed):
    """Softmax attention in float64 where `allowed(i, j)`; rows with nothing to attend are 0."""
    output = np.zeros((1, T, H, D))
    for i in range(T):
        keys = [j for j in range(T) if allowed(i, j)]
        for h in range(H):
            weights = np.exp([Q[0, i, h].astype(np.float64) @ K[0, j, h] * D**-0.5 for j in keys])
            if keys:
                output[0, i, h] = weights / weights.sum() @ V[0, keys, h].astype(np.float64)
    return output


@pytest.mark.parametrize("name", DENSE)
@pytest.mark.parametrize("window", [(None, 1), (2, None), (1, 1), None])
def test_positions_at_the_ends_of_int32(name, window):
    queries, keys = [0, 1, 2, MOST, LEAST, -1], [0, 1, MOST, 2, 3, LEAST]
    info = MaskInfo(q_positions=jnp.array([queries]), kv_positions=jnp.array([keys]))
    options = {"causal": True} if window is None else {"sliding_window": window}
    left, right = (None, 0) if window is None else window

    def allowed(i, j):
        step = keys[j] - queries[i]
        return (left is None or step >= -left) and (right is None or step <= right)

    output = DENSE[name](Q, K, V, mask_info=info, **options)
    np.testing.assert_allclose(output, attend(allowed), rtol=2e-5, atol=2e-5)


def test_positions_of_64_bits_do_not_wrap_around():
    positions = np.array([[0, 1, 2, 2**32 + 1, 2**40, -(2**40)]])
    info = MaskInfo.from_segments(np.zeros((1, T), np.int64), q_positions=positions, kv_positions=positions)
    for mask_info in (info, MaskInfo(q_positions=positions, kv_positions=positions)):
        output = m.flash_attention(Q, K, V, causal=True, mask_info=mask_info)
        wants = attend(lambda i, j: min(positions[0, j], 2**29) <= min(positions[0, i], 2**29))
        np.testing.assert_allclose(output, wants, rtol=2e-5, atol=2e-5)
    assert info.apply_causal().attention_mask[0, 0, 2].tolist() == [True, True, True, False, False, True]
    assert clamp_positions(jnp.array([MOST, LEAST, 5])).tolist() == [2**29, -(2**29), 5]


UNSIGNED = np.array([[0, 0, 2**31, 2**31, 2**32 - 1, 5]], np.uint32)
LONG = np.array([[1, 2**32 + 1, 2**32 + 1, 1, -(2**40), -1]])


@pytest.mark.parametrize("ids", [UNSIGNED, jnp.asarray(UNSIGNED), LONG], ids=["uint32", "uint32 of JAX", "int64"])
@pytest.mark.parametrize("name", DENSE)
def test_segment_ids_beyond_int32(name, ids):
    known = np.asarray(ids)
    wants = attend(lambda i, j: known[0, i] == known[0, j] >= 0)
    for info in (MaskInfo.from_segments(ids), MaskInfo(_q_segment_ids=ids, _kv_segment_ids=ids)):
        np.testing.assert_allclose(DENSE[name](Q, K, V, mask_info=info), wants, rtol=2e-5, atol=2e-5)
        assert info.q_segment_ids.dtype == jnp.int32
    np.testing.assert_array_equal(info.attention_mask[0, 0], np.equal.outer(known[0], known[0]) & (known[0] >= 0))


def test_traced_segment_ids_beyond_int32():
    @jax.jit
    def call(q_ids, kv_ids):
        return m.flash_attention(Q, K, V, mask_info=MaskInfo.from_segments(q_ids, kv_ids))

    np.testing.assert_allclose(
        call(UNSIGNED, UNSIGNED), attend(lambda i, j: UNSIGNED[0, i] == UNSIGNED[0, j]), rtol=2e-5, atol=2e-5
    )
    signed = np.array([[-1, 0, 5, 5, MOST, LEAST]], np.int32)
    wants = attend(lambda i, j: int(UNSIGNED[0, i]) == int(signed[0, j]))
    np.testing.assert_allclose(call(UNSIGNED, signed), wants, rtol=2e-5, atol=2e-5)


def test_ids_that_int32_holds_keep_their_values():
    for dtype in (np.int64, np.uint32, np.int16):
        ids = exact_segment_ids(np.array([[7, 3]], dtype), np.array([[3]], dtype))
        assert [x.tolist() for x in ids] == [[[7, 3]], [[3]]]
    assert exact_segment_ids(jnp.array([[7, 3]], jnp.uint32), jnp.array([[3]]))[0].tolist() == [[7, 3]]
    assert clamp_to_int32(np.array([2**40, -(2**40), 5])).tolist() == [MOST, LEAST, 5]
    both = exact_segment_ids(np.array([[2**63, 2**32, 0]], np.uint64), np.array([[2**32, -(2**62)]]))
    assert [x.tolist() for x in both] == [[[2, 1, 0]], [[1, -1]]]


def test_ids_that_cannot_be_renumbered_alike_are_refused_by_name():
    with pytest.raises(ValueError, match="q_segment_ids: got a NumPy array of int64 with ids that exceed int32"):
        MaskInfo(_q_segment_ids=LONG, _kv_segment_ids=jnp.zeros((1, T), jnp.int32))
    mesh = jax.make_mesh((2,), ("x",), axis_types=(jax.sharding.AxisType.Auto,))
    spec = jax.sharding.PartitionSpec(None, "x")
    of_shards = jax.shard_map(
        lambda ids: MaskInfo.from_segments(ids).q_segment_ids, mesh=mesh, in_specs=spec, out_specs=spec
    )
    with pytest.raises(ValueError, match="q_segment_ids: got uint32 in shard_map, wants int32"):
        of_shards(jnp.asarray(UNSIGNED))


@pytest.mark.parametrize("ids", [UNSIGNED, jnp.asarray(UNSIGNED), LONG], ids=["uint32", "uint32 of JAX", "int64"])
def test_segment_ids_of_the_delta_rule_beyond_int32(ids):
    known = np.asarray(ids)[0]
    small = np.array([[-1 if one < 0 else sorted(set(known)).index(one) for one in known]], np.int32)
    beta, decay = np.full((2, 1, T, H), 0.5, np.float32) * np.array([1, -1], np.float32).reshape(2, 1, 1, 1)
    call = functools.partial(m.gated_delta_rule, Q, K, V, beta, decay)
    np.testing.assert_array_equal(call(ids), call(small))


def test_token_types_beyond_int32():
    info = MaskInfo.from_segments(np.zeros((1, 3), np.int32))
    types = np.array([[2**32, 0, 2**33]])
    mask = info.apply_token_type_ids(types, combine="replace", zero_policy="none").attention_mask
    assert mask[0, 0].tolist() == np.eye(3, dtype=bool).tolist()
    assert not info.apply_token_type_ids(types, combine="replace", zero_policy="both").attention_mask[0, 0, 1].any()


def paged(rows):
    """The arguments of the paged operations: two sequences of 5 and 3 tokens, with pages of 4."""
    cache = jax.random.normal(jax.random.key(1), (4, 4, 1, D))
    return {"cache": cache, "lens": jnp.array([5, 3]), "tables": jnp.array([[1, 0], [2, 3]]), "rows": rows}


def window_calls():
    """A call of every operation with a window, as a function of the window."""
    p, x = paged(4), jax.random.normal(jax.random.key(2), (4, H, D))
    new, starts = jax.random.normal(jax.random.key(3), (4, 1, D)), jnp.array([0, 3, 4])
    pair = jnp.stack([p["cache"], p["cache"]], axis=3).reshape(4, 4, 2, D)
    three = jnp.zeros((4, 4, 2, 1, 128))
    latent = jax.random.normal(jax.random.key(4), (2, 9, 16))
    weights = jax.random.normal(jax.random.key(5), (2, 16, H, D))
    one_row = x[:2]
    packed = (p["lens"], p["tables"], starts)
    calls = {
        **{name: functools.partial(call, Q, K, V) for name, call in DENSE.items()},
        "unified_attention": functools.partial(m.unified_attention, x, p["cache"], p["cache"], *packed, causal=False),
        "chunked_prefill_paged_decode": functools.partial(
            m.chunked_prefill_paged_decode, x, new, new, p["cache"], p["cache"], *packed
        ),
        "page_attention": functools.partial(
            m.page_attention, one_row, p["cache"], p["cache"], *packed[:2], kv_layout="pshd"
        ),
        "decode_attention": functools.partial(
            m.decode_attention, one_row, *(p["cache"].reshape(16, 1, D),) * 2, p["tables"], p["lens"], page_size=4
        ),
        "prefill_page_attention": functools.partial(
            m.prefill_page_attention, x[:3], *(p["cache"],) * 2, p["lens"][:1], p["tables"][0], kv_layout="pshd"
        ),
        "ragged_page_attention_v2": functools.partial(m.ragged_page_attention_v2, x, pair, *packed, jnp.array([2])),
        "ragged_page_attention_v3": functools.partial(
            m.ragged_page_attention_v3, x, new, new, three, *packed, jnp.array([0, 0, 2]), kv_layout="interleaved"
        ),
        "mla_decode": functools.partial(m.mla_decode, one_row, latent, None, weights[0], weights[1], jnp.array([5, 9])),
    }
    return {name: lambda window, call=call: call(sliding_window=window) for name, call in calls.items()}


WINDOWS = window_calls()


@pytest.mark.parametrize("name", WINDOWS)
def test_a_window_that_no_two_positions_exceed_is_no_limit(name):
    call = WINDOWS[name]
    for window, same in (((None, 2**31 - 1), None), ((2**40, 2**31), None), ((2**31, 0), (None, 0))):
        for got, wants in zip(jax.tree.leaves(call(window)), jax.tree.leaves(call(same)), strict=True):
            np.testing.assert_array_equal(got, wants)
    for size in HUGE:  # an int is both sides, or the newest keys
        np.testing.assert_array_equal(jax.tree.leaves(call(size))[0], jax.tree.leaves(call(HUGE[0]))[0])


def test_a_ragged_decode_window_that_no_two_positions_exceed_is_no_limit():
    keys = jax.random.normal(jax.random.key(2), (2, 9, 1, D))
    call = functools.partial(m.ragged_decode_attention, Q[0, :2], keys, keys, jnp.array([0, 2]), jnp.array([5, 9]))
    np.testing.assert_array_equal(call(sliding_window=(2**40, None)), call())


@pytest.mark.parametrize("size", HUGE)
@pytest.mark.parametrize("name", ["blocksparse_attention", "ring_attention"])
def test_a_chunk_that_holds_every_position_is_no_limit(name, size):
    info = MaskInfo(q_positions=jnp.arange(T)[None] - 2, kv_positions=jnp.arange(T)[None])
    np.testing.assert_array_equal(
        DENSE[name](Q, K, V, chunk_size=size, mask_info=info), DENSE[name](Q, K, V, mask_info=info)
    )


@pytest.mark.parametrize("size", HUGE)
def test_blocks_and_windows_of_native_sparse_attention_without_limit(size):
    gates = jnp.full((1, T, H), 0.5)
    key, value = K[:, :, :1], V[:, :, :1]
    for packed in ({}, {"cu_seqlens": jnp.array([0, 2, T])}):

        def call(block, window, packed=packed):
            return m.native_sparse_attention(
                Q, key, value, gates, gates, None, 2, g_swa=gates, block_size=block, window_size=window, **packed
            )

        np.testing.assert_array_equal(call(size, size), call(100, 100))


@pytest.mark.parametrize("size", HUGE)
def test_pools_that_hold_every_token(size):
    x = jax.random.normal(jax.random.key(0), (1, T, 3))
    for packed in (None, jnp.array([0, 2, T])):
        np.testing.assert_array_equal(
            m.mean_pooling(x, packed, chunk_size=size), m.mean_pooling(x, packed, chunk_size=100)
        )


@pytest.mark.parametrize("size", HUGE)
def test_masks_without_limit(size):
    info = MaskInfo.from_segments(np.zeros((1, 4), np.int32))
    everything, causal = np.ones((4, 4), bool), np.tril(np.ones((4, 4), bool))
    np.testing.assert_array_equal(info.apply_sliding_window(size).attention_mask[0, 0], everything)
    np.testing.assert_array_equal(info.apply_sliding_window((size, 0)).attention_mask[0, 0], causal)
    np.testing.assert_array_equal(info.apply_chunked(size).attention_mask[0, 0], causal)
    np.testing.assert_array_equal(MaskInfo.create_chunked_attention_mask(size, 4), causal)
    for mask, wants in (
        (LocalMask((4, 4), (size, size)), everything),
        (LocalMask((4, 4), (size, 0)), causal),
        (ChunkedCausalMask((4, 4), size), causal),
        (CausalMask((4, 4), size), everything),
    ):
        np.testing.assert_array_equal(mask.allowed(0, 0, (4, 4)), wants)
        query, key = Q[:, :4].swapaxes(1, 2), K[:, :4].swapaxes(1, 2)
        got = m.blocksparse_attention(query, key, key, mask_builder=lambda *_, mask=mask: mask)
        reference = m.blocksparse_attention(query, key, key, attention_mask=jnp.asarray(wants)[None, None])
        np.testing.assert_allclose(got, reference, rtol=1e-5, atol=1e-6)


def test_a_page_number_beyond_int32_is_no_page():
    p = paged(2)
    tables = np.array([[1, 2**32], [2, 3]])
    with jax.enable_x64(True):
        query, cache = Q[0, :2], np.asarray(p["cache"])
        wants = m.unified_attention(query, cache, cache, p["lens"], np.array([[1, -1], [2, 3]]), jnp.array([0, 1, 2]))
        got = m.unified_attention(query, cache, cache, p["lens"], tables, jnp.array([0, 1, 2]))
    np.testing.assert_array_equal(got, wants)
