"""Values and gradients of tiled attention in XLA against the family's reference."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tiled_attention_cases import (
    OPTIONS,
    assert_close,
    cotangent_of,
    covering,
    differentiable,
    expected,
    make,
    tiled,
)

from ejkernel.families.tiled_attention import TiledAttention

SIDES = st.none() | st.integers(0, 9) | st.just(2**31 - 1)


def check(record: TiledAttention, blocks: tuple[int, int], tolerance: float = 2e-5) -> None:
    grad_fields, cotangent = differentiable(record), cotangent_of(record)
    actual = tiled(record, cotangent, blocks=blocks, grad_fields=grad_fields)
    assert_close(actual, expected(record, cotangent, grad_fields=grad_fields), tolerance)


@pytest.mark.parametrize("case", covering(OPTIONS), ids=lambda case: "-".join(map(str, case.values())))
def test_output_residuals_and_every_gradient(case):
    blocks = case["blocks"]
    check(make(**{name: value for name, value in case.items() if name != "blocks"}), blocks)


@pytest.mark.parametrize(("dtype", "tolerance"), [(jnp.bfloat16, 2e-2), (jnp.float16, 3e-3)])
def test_low_precision(dtype, tolerance):
    record = make(dtype=dtype, bias="keys", band={"causal": True}, extra={"softmax_aux": True})
    check(dataclasses.replace(record, precision=jax.lax.Precision.HIGHEST), (16, 16), tolerance)


def test_logits_dtype():
    check(make(extra={"logits_dtype": jnp.dtype(jnp.bfloat16)}), (16, 16), 2e-2)


def test_bias_of_minus_infinity_masks():
    record = make(bias="pairs")
    bias = record.bias.at[:, :, 3].set(-jnp.inf).at[..., 5:20].set(-jnp.inf)
    for normalize in (True, False):
        case = dataclasses.replace(record, bias=bias, normalize_output=normalize)
        outcome = tiled(case, cotangent_of(case), blocks=(16, 16), grad_fields=differentiable(case))
        assert_close(outcome, expected(case, cotangent_of(case), grad_fields=differentiable(case)))


@pytest.mark.parametrize("normalize", [True, False])
def test_rows_with_nothing_to_attend_give_zero(normalize):
    record = make(mask="pairs", extra={"normalize_output": normalize})
    record = dataclasses.replace(record, mask=record.mask.at[:, :, 10:25].set(False))
    output, residuals, grads = tiled(record, cotangent_of(record), blocks=(8, 16), grad_fields=differentiable(record))
    assert not output[:, 10:25].any()
    assert not grads["query"][:, 10:25].any()
    assert (residuals.lse[..., 10:25] == -jnp.inf).all()
    assert all(np.isfinite(x).all() for x in (output, *grads.values()))


def test_no_keys_at_all():
    record = make((5, 0, 4, 4), extra={"softmax_aux": True})
    output, residuals, grads = tiled(record, cotangent_of(record), blocks=(8, 8), grad_fields=differentiable(record))
    assert not output.any()
    assert_close(residuals.lse, jnp.broadcast_to(record.softmax_aux[:, None], residuals.lse.shape))
    assert not any(x.any() for x in grads.values())
    no_queries = make((0, 5, 4, 4))
    tiled(no_queries, cotangent_of(no_queries), blocks=(8, 8), grad_fields=differentiable(no_queries))


@pytest.mark.parametrize("padding", ["segments", "mask"])
def test_nan_in_padding_stays_there(padding):
    t, s = 19, 41
    record = make((t, s, 8, 6), segments=padding == "segments", extra={"dropout_prob": 0.2, "softmax_aux": True})
    if padding == "segments":
        q, k = record.q_segment_ids < 0, record.kv_segment_ids < 0
    else:
        q, k = jnp.zeros((2, t), bool), jnp.arange(s) >= jnp.array([[30], [0]])
        record = dataclasses.replace(record, mask=~k[:, None, None])
    assert k.any()
    poisoned = dataclasses.replace(
        record,
        query=jnp.where(q[..., None, None], jnp.nan, record.query),
        key=jnp.where(k[..., None, None], jnp.nan, record.key),
        value=jnp.where(k[..., None, None], jnp.nan, record.value),
    )
    cotangent = cotangent_of(record)
    clean = tiled(record, cotangent, blocks=(8, 16), grad_fields=differentiable(record))
    cotangent = jnp.where(q[..., None, None], jnp.nan, cotangent)
    dirty = tiled(poisoned, cotangent, blocks=(8, 16), grad_fields=differentiable(record))
    assert_close(dirty, clean, 0)


def test_value_does_not_depend_on_the_tiles():
    record = make((70, 90, 8, 8), band={"causal": True}, extra={"dropout_prob": 0.4, "softmax_aux": True})
    grad_fields, cotangent = differentiable(record), cotangent_of(record)
    whole = tiled(record, cotangent, blocks=(512, 512), grad_fields=grad_fields)
    for blocks in ((70, 1), (64, 89)):
        assert_close(tiled(record, cotangent, blocks=blocks, grad_fields=grad_fields), whole)


def test_dropout_of_a_shard_is_the_dropout_of_the_whole():
    record = make((32, 48, 8, 8), extra={"dropout_prob": 0.5})
    grad_fields, cotangent = frozenset({"query"}), cotangent_of(record)
    whole = tiled(record, cotangent, blocks=(16, 16), grad_fields=grad_fields)[0]
    shard = dataclasses.replace(
        record,
        query=record.query[1:, 20:, 2:],
        key=record.key[1:, :, 1:],
        value=record.value[1:, :, 1:],
        dropout_origin=jnp.array([1, 2, 20, 0], jnp.int32),
    )
    part = tiled(shard, cotangent[1:, 20:, 2:], blocks=(16, 16), grad_fields=grad_fields)[0]
    assert_close(part, whole[1:, 20:, 2:])


def test_only_requested_gradients_are_returned():
    record = make(bias="pairs", extra={"softmax_aux": True})
    everything = tiled(record, cotangent_of(record), blocks=(16, 16), grad_fields=differentiable(record))[2]
    for grad_fields in ({"value"}, {"bias"}, {"query", "softmax_aux"}):
        grads = tiled(record, cotangent_of(record), blocks=(16, 16), grad_fields=frozenset(grad_fields))[2]
        assert_close(grads, {name: everything[name] for name in grad_fields})


@pytest.mark.parametrize(
    "options",
    [
        {"bias": "rows", "extra": {"logits_soft_cap": 2.0, "softmax_aux": True}, "band": {"causal": True}},
        {"segments": True, "bias": "pairs", "extra": {"normalize_output": False, "dropout_prob": 0.3}},
    ],
)
def test_gradients_are_those_of_finite_differences(options):
    with jax.enable_x64(True):
        record = make((11, 13, 4, 3), dtype=jnp.float64, **options)
        grad_fields, cotangent = differentiable(record), cotangent_of(record)
        output, residuals, grads = tiled(record, cotangent, blocks=(4, 8), grad_fields=grad_fields)
        assert output.dtype == residuals.lse.dtype == jnp.float64
        random, step = np.random.default_rng(1), 1e-5
        for name in sorted(grad_fields - {"softmax_aux"}):  # float32 by contract: too coarse for differences
            direction = jnp.asarray(random.normal(size=getattr(record, name).shape))
            up, down = (
                dataclasses.replace(record, **{name: getattr(record, name) + sign * step * direction})
                for sign in (1, -1)
            )
            up, down = (tiled(end, cotangent, blocks=(4, 8), grad_fields=grad_fields)[0] for end in (up, down))
            slope = jnp.vdot(up - down, cotangent) / (2 * step)
            np.testing.assert_allclose(slope, jnp.vdot(grads[name], direction), rtol=1e-6)


@settings(max_examples=40, deadline=None)
@given(
    shape=st.sampled_from([(9, 23, 4, 4), (24, 16, 4, 4)]),
    kind=st.sampled_from(["plain", "causal", "window"]),
    rows=st.data(),
)
def test_any_segments_positions_and_masks(shape, kind, rows):
    t, s = shape[:2]
    ids, spots = st.integers(-2, 3), st.integers(-30, 30)
    band = {"plain": {}, "causal": {"causal": True}, "window": {"sliding_window": (4, None)}}[kind]

    def draw(values: st.SearchStrategy, n: int) -> np.ndarray:
        return np.array(rows.draw(st.lists(values, min_size=n, max_size=n)))

    record = dataclasses.replace(
        make(shape, (2, 1), batch=1, band=band),
        q_segment_ids=jnp.asarray(draw(ids, t)[None], jnp.int32),
        kv_segment_ids=jnp.asarray(draw(ids, s)[None], jnp.int32),
        q_positions=jnp.asarray(draw(spots, t)[None], jnp.int32),
        kv_positions=jnp.asarray(draw(spots, s)[None], jnp.int32),
        mask=jnp.asarray(draw(st.booleans(), s)[None, None, None]),
    )
    check(record, (8, 8))


@settings(max_examples=6, deadline=None)
@given(
    lengths=st.tuples(st.integers(1, 40), st.integers(1, 40)),
    blocks=st.tuples(st.integers(1, 24), st.integers(1, 24)),
    window=st.tuples(SIDES, SIDES),
    heads=st.sampled_from([(1, 1), (4, 2)]),
)
def test_any_lengths_blocks_and_windows(lengths, blocks, window, heads):
    check(make((*lengths, 3, 2), heads, batch=1, band={"sliding_window": window}), blocks)
