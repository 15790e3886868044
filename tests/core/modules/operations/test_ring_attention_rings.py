"""`ring_attention` on rings of 1, 2, 4 and 8 devices: the numbers of `flash_attention` on one, in both passes."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import ring_calls
from jax.sharding import PartitionSpec as P
from ring_calls import FULL, OPTIONS, T, check, compiled, flash, graded, on, quickly, ring, spread

from ejkernel.modules import ring_attention
from ejkernel.types import MaskInfo


@functools.cache
def inputs():
    return tuple(x.astype(np.float32) for x in ring_calls.floats(**FULL))


@functools.cache
def wanted(name):
    return graded(functools.partial(flash, **OPTIONS[name]), inputs())


@functools.cache
def ringed(name, size):
    return graded(functools.partial(spread, **OPTIONS[name]), inputs(), **on(ring(size)))


@pytest.mark.parametrize(
    ("name", "size"),
    [*(("full", size) for size in (1, 2, 4, 8)), ("packed, causal, capped", 2), ("packed, causal, capped", 8)],
)
def test_values_and_all_gradients_are_those_of_one_device(name, size):
    check(ringed(name, size), wanted(name))


@pytest.mark.parametrize(
    ("name", "size"),
    [("window", 8), ("causal window", 8), ("open window", 4), ("positions", 4)],
)
def test_masks_compare_places_in_the_whole_sequence(name, size):
    check(ringed(name, size), wanted(name))


def test_t10_sinks_are_counted_once_whatever_the_ring_and_the_tiles():
    query, key, value, sinks, _ = inputs()
    want = quickly(flash, query, key, value, sinks, causal=True)
    for size, block in ((2, 16), (8, 2)):
        tiles = ring_calls.tiles(block, block)
        got = quickly(spread, query, key, value, sinks, causal=True, cfg=tiles, **on(ring(size)))
        np.testing.assert_allclose(got, want, rtol=2e-5, atol=2e-6)


@pytest.mark.parametrize("bias", [(1, 1, 1, T), (1, 4, T, 1)], ids=["keys", "rows"])
def test_t11_gradients_of_bias_and_sinks_are_true_whatever_they_are_shared_by(bias):
    query, key, value, _, _ = inputs()
    arrays = (query, key, value, *ring_calls.floats(bias=bias, sinks=(3,))[3:])
    arrays = tuple(np.asarray(x, np.float32) for x in arrays)
    (_, _), gradients = got = graded(spread, arrays, **on(ring(4)))
    check(got, graded(flash, arrays))
    assert all(float(jnp.abs(gradient).max()) > 0.01 for gradient in gradients)


def test_t18_rows_with_nothing_to_attend_are_zero_and_so_are_their_gradients():
    (_, output), gradients = ringed("mask and segments", 4)
    assert not np.asarray(output[:, 5]).any()  # the mask has no key for this row
    assert not np.asarray(output[0, 26:]).any()  # padding
    for gradient in gradients[:3]:
        assert not np.asarray(gradient[0, 26:]).any()
        assert np.isfinite(gradient).all()
    assert not np.asarray(gradients[0][:, 5]).any()


def test_t19_an_attention_mask_applies_together_with_bias_segments_and_sinks():
    check(ringed("mask and segments", 4), wanted("mask and segments"))
    causal = MaskInfo(_attention_mask=jnp.tril(jnp.ones((1, 1, T, T), bool)), causal_mask_baked_in=True)
    query, key, value, _, _ = inputs()
    got = quickly(spread, query, key, value, mask_info=causal, **on(ring(4)))
    np.testing.assert_allclose(got, quickly(flash, query, key, value, causal=True), rtol=2e-5, atol=2e-6)


def test_nan_in_padding_reaches_nothing_on_any_device():
    query, key, value, _, _ = (None if x is None else jnp.asarray(x) for x in inputs())
    ids = ring_calls.IDS < 0
    poisoned = [jnp.where(ids[..., None, None], jnp.nan, x) for x in (query, key, value)]
    info = OPTIONS["packed, causal, capped"]["mask_info"]
    run = compiled(functools.partial(spread, mask_info=info), (query, key, value), **on(ring(4)))
    (_, clean), want = run([query, key, value])
    (_, output), got = run(poisoned)
    np.testing.assert_allclose(output, clean, rtol=2e-5, atol=2e-6)
    for one, other in zip(got, want, strict=True):
        np.testing.assert_allclose(one, other, rtol=2e-5, atol=1e-5)


def test_chunks_go_by_positions_and_are_not_causal_by_themselves():
    query, key, value, _, _ = inputs()
    info = MaskInfo(q_positions=ring_calls.PLACES, kv_positions=jnp.arange(T)[None])
    alike = ring_calls.PLACES[0][:, None] // 6 == np.arange(T) // 6
    want = quickly(flash, query, key, value, mask_info=MaskInfo(_attention_mask=alike[None, None]))
    got = quickly(spread, query, key, value, chunk_size=6, mask_info=info, **on(ring(4)))
    np.testing.assert_allclose(got, want, rtol=2e-5, atol=2e-6)


@pytest.mark.parametrize("size", [1, 4])
@pytest.mark.parametrize("segments", [False, True])
def test_chunks_are_those_of_the_mask(size, segments):
    query, key, value, _, _ = inputs()
    ids = {"_q_segment_ids": ring_calls.IDS, "_kv_segment_ids": ring_calls.IDS} if segments else {}
    info = MaskInfo(**ids) if segments else None
    chunked = MaskInfo.create_chunked_attention_mask(5, T)
    explicit = MaskInfo(_attention_mask=jnp.broadcast_to(chunked, (1, 1, T, T)), **ids)
    want = quickly(flash, query, key, value, mask_info=explicit)
    call = functools.partial(spread, chunk_size=5, causal=True, mask_info=info)
    np.testing.assert_allclose(quickly(call, query, key, value, **on(ring(size))), want, rtol=2e-5, atol=2e-6)
    if segments and size > 1:  # devices that see only their own part number the chunks alike
        specs = (P(None, "sp"),) * 4
        inside = jax.shard_map(
            lambda q, k, v, ids: ring_attention(
                q,
                k,
                v,
                chunk_size=5,
                causal=True,
                axis_name="sp",
                mask_info=MaskInfo(_q_segment_ids=ids, _kv_segment_ids=ids),
            ),
            mesh=ring(size),
            in_specs=specs,
            out_specs=specs[0],
        )
        np.testing.assert_allclose(quickly(inside, query, key, value, ring_calls.IDS), want, rtol=2e-5, atol=2e-6)


def test_half_precision_is_merged_in_float32():
    arrays = tuple(jnp.asarray(x, jnp.bfloat16) for x in inputs()[:3])
    exact = quickly(flash, *(x.astype(jnp.float32) for x in arrays))
    errors = []
    for got in (quickly(spread, *arrays, **on(ring(8))), quickly(flash, *arrays)):
        assert got.dtype == jnp.bfloat16
        errors.append(float(jnp.abs(got.astype(jnp.float32) - exact).max()))
    assert errors[0] <= 1.2 * errors[1]  # eight parts round no more than one


def test_batch_and_heads_are_split_over_other_axes():
    mesh = jax.make_mesh((2, 2, 2), ("dp", "sp", "tp"))
    query = P("dp", "sp", "tp")
    placed = {"mesh": mesh, "in_specs": (query,) * 3, "out_specs": query, "axis_name": "sp"}
    check(graded(spread, inputs(), **placed), wanted("full"))
