"""The decided meanings of `flash_attention`, each by the pairs that attend, and the defects they protect from."""

import flash_calls
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from ejkernel.modules import FlashAttention, flash_attention
from ejkernel.types import MaskInfo

HEADS = 2


def attended(queries, keys, batch=1, **options):
    """Which pairs attend, bool [B, H, T, S]: scores are 0 and values unit vectors, so the output is the weights."""
    query = jnp.zeros((batch, queries, HEADS, 4))
    key = jnp.zeros((batch, keys, HEADS, 4))
    value = jnp.broadcast_to(jnp.eye(keys)[:, None], (batch, keys, HEADS, keys))
    positional = [options.pop(name, None) for name in flash_calls.POSITIONAL[3:]]

    def call(query):
        return flash_attention(query, key, value, *positional, cfg=flash_calls.SMALL_TILES, **options)

    output = jax.jit(call, compiler_options=flash_calls.QUICK)(query)
    assert not jnp.isnan(output).any()
    weights = np.asarray(output.transpose(0, 2, 1, 3))
    sums = weights.sum(-1)
    if "softmax_aux" not in options and positional[-1] is None:
        np.testing.assert_allclose(sums, np.where(sums > 0, 1, 0), atol=1e-6)
    return weights > 0


def grid(queries, keys):
    return np.arange(queries)[:, None], np.arange(keys)[None]


@pytest.mark.parametrize(("queries", "keys"), [(20, 20), (13, 21), (21, 13)])
def test_t14_causal_is_aligned_at_the_top_left(queries, keys):
    q, k = grid(queries, keys)
    assert (attended(queries, keys, causal=True) == (k <= q)).all()


@pytest.mark.parametrize(
    ("window", "causal", "want"),
    [
        (3, False, (3, 3)),
        (3, True, (3, 0)),
        ((4, 2), False, (4, 2)),
        ((4, 2), True, (4, 0)),
        ((None, 2), False, (99, 2)),
        ((5, None), True, (5, 0)),
        ((0, 0), False, (0, 0)),
        ((None, None), False, (99, 99)),
    ],
)
def test_t13_windows_include_both_ends(window, causal, want):
    q, k = grid(20, 20)
    left, right = want
    assert (attended(20, 20, sliding_window=window, causal=causal) == ((k >= q - left) & (k <= q + right))).all()


def test_t13_a_causal_window_of_w_keeps_w_keys_and_the_query_itself():
    assert (attended(20, 20, sliding_window=6, causal=True).sum(-1)[..., 6:] == 7).all()


def test_windows_beyond_the_keys_leave_rows_empty():
    q, k = grid(21, 13)
    assert (attended(21, 13, sliding_window=2) == (abs(k - q) <= 2)).all()


def test_t19_mask_applies_together_with_bias():
    mask = np.random.default_rng(0).random((1, HEADS, 20, 20)) < 0.5
    bias = jnp.zeros((1, HEADS, 20, 20))
    assert (attended(20, 20, bias=bias, mask_info=MaskInfo(_attention_mask=jnp.asarray(mask))) == mask).all()


def test_t19_mask_segments_positions_and_window_all_apply():
    rng = np.random.default_rng(0)
    mask = rng.random((1, 1, 20, 20)) < 0.8
    ids = np.minimum(np.arange(20) // 7, 1)[None].astype(np.int32) - np.where(np.arange(20) > 17, 5, 0)
    places = rng.permutation(20)[None].astype(np.int32)
    info = MaskInfo(
        _attention_mask=jnp.asarray(mask),
        _q_segment_ids=jnp.asarray(ids, jnp.int32),
        _kv_segment_ids=jnp.asarray(ids, jnp.int32),
        q_positions=jnp.asarray(places),
        kv_positions=jnp.asarray(places),
    )
    q, k = places[0][:, None], places[0][None]
    same = (ids[0][:, None] == ids[0]) & (ids[0][:, None] >= 0)
    got = attended(20, 20, mask_info=info, causal=True, sliding_window=(9, 0))
    assert (got == mask[0] & same & (k <= q) & (k >= q - 9)).all()


def test_t19_segments_of_mask_info_and_cumulative_lengths_both_apply():
    ids = jnp.asarray([[0] * 6 + [1] * 6 + [-1] * 2 + [1] * 6], jnp.int32)
    packed = np.array([0] * 4 + [1] * 12 + [2] * 3 + [-1])
    got = attended(20, 20, mask_info=MaskInfo.from_segments(ids), cum_seqlens_q=jnp.array([0, 4, 16, 19]))
    one, other = np.asarray(ids[0]), packed
    want = (one[:, None] == one) & (one[:, None] >= 0) & (other[:, None] == other) & (other[:, None] >= 0)
    assert (got == want).all()


def test_positions_of_one_side_meet_places_in_packed_sequences_on_the_other():
    info = MaskInfo(q_positions=jnp.asarray([[1] * 12], jnp.int32))
    got = attended(12, 12, mask_info=info, cum_seqlens_q=jnp.array([0, 5, 12]), causal=True)
    sequence, place = np.array([0] * 5 + [1] * 7), np.array([*range(5), *range(7)])
    assert (got == ((sequence[:, None] == sequence) & (place <= 1))).all()


def test_one_row_of_segments_serves_the_whole_batch():
    ids = jnp.asarray([[0] * 9 + [1] * 11], jnp.int32)
    got = attended(20, 20, batch=3, mask_info=MaskInfo(_q_segment_ids=ids, _kv_segment_ids=ids))
    assert (got == (np.asarray(ids[0])[:, None] == np.asarray(ids[0]))).all()


def test_packed_rows_need_not_be_full_and_padded_rows_hold_one_sequence_each():
    packed = attended(12, 12, cum_seqlens_q=jnp.array([0, 0, 5, 5, 9]), causal=True)
    sequence = np.array([0] * 5 + [1] * 4 + [-1] * 3)
    q, k = grid(12, 12)
    assert (packed == ((sequence[:, None] == sequence) & (sequence >= 0) & (k <= q))).all()
    lengths = np.array([12, 0, 7])
    padded = attended(12, 12, batch=3, cum_seqlens_q=jnp.asarray(np.concatenate([[0], lengths.cumsum()])))
    inside = np.arange(12) < lengths[:, None]
    assert (padded == (inside[:, None, :, None] & inside[:, None, None])).all()


def test_t10_sinks_are_counted_once_whatever_the_tiles():
    query, key = jnp.zeros((1, 48, HEADS, 4)), jnp.zeros((1, 48, HEADS, 4))
    value, sinks = jnp.ones((1, 48, HEADS, 4)), jnp.array([0.5, -1.0, 2.0])
    want = 48 / (48 + np.exp(sinks).sum())
    for size in (4, 16, 48):
        cfg = flash_calls.tiles(size, size)
        output = flash_attention(query, key, value, None, None, None, sinks, cfg=cfg)
        np.testing.assert_allclose(output, want, rtol=1e-6)


def test_sinks_are_neither_scaled_nor_capped_nor_masked():
    query, key, value = (jnp.zeros((1, 16, HEADS, 4)), jnp.zeros((1, 16, HEADS, 4)), jnp.ones((1, 16, HEADS, 4)))
    options = {"softmax_scale": 100.0, "logits_soft_cap": 0.1, "sliding_window": (0, 0)}
    output = flash_attention(query, key, value, None, None, None, jnp.array([3.0]), **options)
    np.testing.assert_allclose(output, 1 / (1 + np.exp(3.0)), rtol=1e-6)


def test_t11_bias_and_sink_gradients_are_true():
    rng = np.random.default_rng(0)
    bias, sinks = rng.normal(size=(1, HEADS, 9, 9)), rng.normal(size=(HEADS, 2))
    value = rng.normal(size=(1, 9, HEADS, 3))

    def plain(bias, sinks):  # with a query of 0 the bias is the score
        total = jnp.exp(bias).sum(-1, keepdims=True) + jnp.exp(sinks).sum(-1)[None, :, None, None]
        return jnp.sum(jnp.einsum("bhts,bshv->bthv", jnp.exp(bias) / total, value) ** 2)

    def ours(bias, sinks):
        zero = jnp.zeros((1, 9, HEADS, 4))
        cfg = flash_calls.tiles(4, 4)
        return jnp.sum(flash_attention(zero, zero, jnp.float32(value), bias, None, None, sinks, cfg=cfg) ** 2)

    got, want = (
        jax.jit(jax.grad(f, argnums=(0, 1)), compiler_options=flash_calls.QUICK)(jnp.float32(bias), jnp.float32(sinks))
        for f in (ours, plain)
    )
    for ours_, plain_ in zip(got, want, strict=True):
        assert jnp.abs(plain_).max() > 1e-2
        np.testing.assert_allclose(ours_, plain_, rtol=2e-5, atol=2e-6)


def empty_everything(kind):
    """Arguments that leave nothing to attend to in rows 5 to 7, or in any row."""
    rows = jnp.arange(12)
    gone = (rows >= 5) & (rows < 8)
    ids = jnp.where(gone, -1, 0)[None]
    return {
        "mask": {"mask_info": MaskInfo(_attention_mask=jnp.broadcast_to(~gone[:, None], (1, 1, 12, 12)))},
        "segments": {"mask_info": MaskInfo.from_segments(ids)},
        "unequal segments": {"mask_info": MaskInfo.from_segments(jnp.where(gone, 7, 0)[None], jnp.zeros_like(ids))},
        "positions": {"mask_info": MaskInfo(q_positions=jnp.where(gone, -1, rows)[None]), "causal": True},
        "bias of -inf": {"bias": jnp.where(gone[:, None], -jnp.inf, 0.0)[None, None]},
        "no sequence": {"cum_seqlens_q": jnp.array([0, 0, 0])},
    }[kind]


KINDS = ("mask", "segments", "unequal segments", "positions", "bias of -inf", "no sequence")


@pytest.mark.parametrize("with_sinks", [False, True], ids=["no sinks", "sinks"])
@pytest.mark.parametrize("kind", KINDS)
def test_t18_rows_with_nothing_to_attend_are_exactly_zero_and_so_are_their_gradients(kind, with_sinks):
    given = empty_everything(kind)
    bias, cum = given.pop("bias", None), given.pop("cum_seqlens_q", None)
    key, value = jax.random.normal(jax.random.key(1), (2, 1, 12, 1, 4))
    query = jax.random.normal(jax.random.key(2), (1, 12, HEADS, 4))

    def compute(query, key, value, sinks):
        output = flash_attention(query, key, value, bias, cum, None, sinks, cfg=flash_calls.SMALL_TILES, **given)
        return jnp.sum(output), output

    compute = jax.value_and_grad(compute, argnums=(0, 1, 2, 3) if with_sinks else (0, 1, 2), has_aux=True)
    compute = jax.jit(compute, compiler_options=flash_calls.QUICK)
    for sinks in (0.5, -jnp.inf) if with_sinks else (None,):
        (_, output), gradients = compute(query, key, value, None if sinks is None else jnp.array([sinks]))
        empty = slice(None) if kind == "no sequence" else slice(5, 8)
        assert (output[:, empty] == 0).all()
        assert (gradients[0][:, empty] == 0).all()
        assert all(jnp.isfinite(gradient).all() for gradient in gradients)
        if kind == "no sequence":
            assert all((gradient == 0).all() for gradient in gradients)
        else:
            assert (jnp.abs(output[:, :5]).max(-1) > 0).all()


def test_padding_may_hold_anything():
    ids = jnp.asarray([[0] * 9 + [-1] * 3], jnp.int32)
    clean = jax.random.normal(jax.random.key(0), (3, 1, 12, HEADS, 4))
    dirty = clean.at[:, :, 9:].set(jnp.nan)

    def compute(arrays):
        info = MaskInfo.from_segments(ids)
        output = flash_attention(*arrays, mask_info=info, cfg=flash_calls.SMALL_TILES)
        return jnp.sum(output[:, :9] ** 2), output

    graded = jax.jit(jax.value_and_grad(compute, has_aux=True), compiler_options=flash_calls.QUICK)
    ((_, want), wanted), ((_, got), gradient) = graded(clean), graded(dirty)
    np.testing.assert_array_equal(got, want)
    np.testing.assert_array_equal(gradient, wanted)


def test_t24_a_bias_belongs_to_the_query_head_also_where_heads_share_keys():
    # Four query heads, two KV heads; each query head is told by its bias to look at a key of its own.
    query, key = jnp.zeros((1, 1, 4, 4)), jnp.zeros((1, 6, 2, 4))
    value = jnp.broadcast_to(jnp.arange(6.0)[None, :, None, None], (1, 6, 2, 1))
    wanted = jnp.array([3, 0, 5, 2])
    bias = jnp.where(jnp.arange(6) == wanted[:, None], 0.0, -1e9)[None, :, None]
    output = flash_attention(query, key, value, bias)
    np.testing.assert_array_equal(output[0, 0, :, 0], wanted)


@pytest.mark.filterwarnings("ignore:dropout_seed")
def test_t24_no_seed_is_seed_0():
    query = jax.random.normal(jax.random.key(0), (1, 4, HEADS, 4))
    one, other = (flash_attention(query, query, query, dropout_prob=0.5, dropout_seed=seed) for seed in (None, 0))
    np.testing.assert_array_equal(one, other)


@pytest.mark.parametrize("dtype", [jnp.float16, jnp.bfloat16, jnp.float32])
def test_output_has_the_querys_dtype_and_float32_sums(dtype):
    # 4096 equal weights: a half-precision sum would stop growing long before the end.
    query, key = jnp.zeros((1, 2, 1, 8), dtype), jnp.zeros((1, 4096, 1, 8), dtype)
    output = flash_attention(query, key, jnp.ones((1, 4096, 1, 8), dtype))
    assert output.dtype == dtype
    np.testing.assert_array_equal(output.astype(jnp.float32), 1)


def test_kernel_class_takes_masks_and_segment_ids_themselves():
    attention, arrays = FlashAttention(), jax.random.normal(jax.random.key(0), (3, 1, 12, HEADS, 4))
    mask = jax.random.bernoulli(jax.random.key(1), 0.5, (1, 1, 12, 12))
    ids = jnp.asarray([[0] * 5 + [1] * 7], jnp.int32)
    want = flash_attention(*arrays, mask_info=MaskInfo(_attention_mask=mask, _q_segment_ids=ids, _kv_segment_ids=ids))
    got = attention.run(*arrays, attention_mask=mask.astype(jnp.int32), q_segment_ids=ids)
    np.testing.assert_array_equal(got, want)
    with pytest.raises(ValueError, match="mask_info: got a value with attention_mask or segment ids"):
        attention.run(*arrays, attention_mask=mask, mask_info=MaskInfo())
    with pytest.raises(ValueError, match="q_segment_ids: got None with kv_segment_ids"):
        attention.run(*arrays, kv_segment_ids=ids)


def test_unnormalised_output_is_relative_to_the_largest_score():
    scores = jnp.array([0.5, 3.0, -1.0])
    query, key = jnp.ones((1, 1, 1, 1)), scores[None, :, None, None]
    value = jnp.eye(3)[None, :, None]
    output = flash_attention(query, key, value, softmax_scale=1.0, normalize_output=False)
    np.testing.assert_allclose(output[0, 0, 0], np.exp(scores - 3), rtol=1e-6)
