"""What caches of pages make easy to get wrong: layouts, windows, padding of tables, lengths, sinks, order of terms."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import paged_calls
import paged_loop
import pytest
from paged_calls import DECODING, PACKED, QUICK, Paged

import ejkernel.modules as ej
from ejkernel.modules import (
    flash_attention,
    page_attention,
    prefill_page_attention,
    ragged_decode_attention,
    ragged_page_attention_v2,
    ragged_page_attention_v3,
)

SINKS = np.array([0.5, -1.0, 2.0, 0.0])
MIXED = paged_loop.make((17, 9, 0, 1), (5, 9, 0, 1))
DECODE = paged_loop.make((17, 9, 0, 1), (1, 1, 1, 1))
CHUNK = paged_loop.make((17,), (5,))


def batch_for(op):
    return DECODE if op in DECODING else CHUNK if op == "prefill_page_attention" else MIXED


def close(got, want, tolerance=2e-5):
    np.testing.assert_allclose(np.asarray(got, np.float64), want, rtol=tolerance, atol=tolerance)


def quickly(function, *args, **keywords):
    return jax.jit(lambda *args: function(*args, **keywords), compiler_options=QUICK)(*args)


@pytest.mark.parametrize("op", ["page_attention", "ragged_decode_attention", "ragged_page_attention_v2"])
def test_t10_each_head_has_its_own_sink_and_counts_it_once_however_many_tiles(op):
    # As many sinks as heads; with shared sinks all heads would get all of them. Three keys a tile.
    got = paged_calls.output(op, Paged(batch_for(op)), sinks=SINKS, cfg=paged_calls.tiles(op, 4, 3, 2))
    close(got, paged_loop.packed(batch_for(op), sinks=SINKS))


def test_t12_dense_decoding_shares_a_row_of_sinks_between_heads_and_takes_a_matrix_by_head():
    args = paged_calls.arguments("ragged_decode_attention", Paged(DECODE))
    joined = np.full(4, np.log(np.exp(SINKS).sum()))
    close(quickly(ragged_decode_attention, *args, jnp.asarray(SINKS)[None]), paged_loop.packed(DECODE, sinks=joined))
    two = np.stack((SINKS, SINKS - 1), axis=1)
    close(
        quickly(ragged_decode_attention, *args, jnp.asarray(two)), paged_loop.packed(DECODE, sinks=np.logaddexp(*two.T))
    )


@pytest.mark.parametrize("op", ["page_attention", "prefill_page_attention", *PACKED])
def test_t13_a_window_of_one_is_the_own_key(op):
    batch = batch_for(op)
    got, first = paged_calls.output(op, Paged(batch), window=1), 0
    for query, value in zip(batch.queries, batch.values, strict=True):
        own = value[len(value) - len(query) :] if len(value) >= len(query) else np.zeros((len(query), 2, 8))
        close(got[first : first + len(query)], np.repeat(own, 2, axis=1))
        first += len(query)


@pytest.mark.parametrize("op", ["ragged_page_attention_v2", "ragged_page_attention_v3"])
def test_t15_every_row_of_a_prefill_has_its_own_window(op):
    # From the last row's window, the first rows would miss keys.
    batch = paged_loop.make((29,), (29,))
    close(paged_calls.output(op, Paged(batch), window=4), paged_loop.packed(batch, window=4))


@pytest.mark.parametrize("op", ["ragged_page_attention_v3", "chunked_prefill_paged_decode"])
def test_t16_padding_of_tables_is_never_written_through(op):
    batch = paged_loop.make((3,), (3,))
    args = paged_calls.arguments(op, Paged(batch, slots=4, entries=5))
    ragged = op.startswith("ragged")
    caches, table = (slice(3, 4), 5) if ragged else (slice(3, 5), 6)
    args[caches] = [jnp.arange(x.size, dtype=x.dtype).reshape(x.shape) for x in args[caches]]
    scale = {"softmax_scale": None} if ragged else {}
    call = jax.jit(lambda *args: getattr(ej, op)(*args, **scale), compiler_options=QUICK)
    for padding in (0, -1, 10**6):
        # Page 0 belongs to the sequence, and with 0 the rest of its table, padding, names it too.
        args[table] = jnp.full(args[table].shape, padding, jnp.int32).at[..., 0].set(0)
        output, *news = call(*args)
        close(output, paged_loop.packed(batch))
        for old, new in zip(args[caches], news, strict=True):
            np.testing.assert_array_equal(new[1:], old[1:])
            np.testing.assert_array_equal(new[0, 3:], old[0, 3:])
        if ragged:
            written = news[0][0, :3].reshape(3, 2, 2, 128)
            news = [written[None, :, :, 0, :8], written[None, :, :, 1, :8]]
            assert not np.any(written[..., 8:])  # lanes that only pad
        close(news[0][0, :3], batch.keys[0])
        close(news[1][0, :3], batch.values[0])


@pytest.mark.parametrize("entries", [70, 100])
def test_t17_tables_with_any_number_of_pages_are_followed(entries):
    batch = paged_loop.make((2 * entries, 5), (3, 1))
    got = paged_calls.output("ragged_page_attention_v2", Paged(batch, slots=2, entries=entries), window=40)
    close(got, paged_loop.packed(batch, window=40))


def test_t17_a_window_leaves_no_trace_of_blocks_before_it():
    # Whole tiles before the window are masked: their exponentials must not be of -inf minus -inf.
    batch = paged_loop.make((129, 100), (1, 1))
    cfg = paged_calls.tiles("ragged_page_attention_v2", 1, 8, 2)
    got = paged_calls.output("ragged_page_attention_v2", Paged(batch), window=3, cfg=cfg)
    close(got, paged_loop.packed(batch, window=3))


@pytest.mark.parametrize("op", DECODING)
def test_t18_sequences_without_tokens_give_zero_and_not_a_mean_of_junk(op):
    batch = paged_loop.make((0, 0), (1, 1))
    paged = Paged(batch)
    assert not paged_calls.output(op, paged).any()
    if op == "decode_attention":
        _, lse = paged_calls.run(op, paged)
        assert np.isneginf(lse).all()


def test_rows_of_no_sequence_are_zero():
    queries, pages, lens, tables, starts, _ = paged_calls.arguments("ragged_page_attention_v2", Paged(MIXED))
    rows = jnp.concatenate((queries, jnp.full((3, 4, 8), jnp.nan)))
    # Two sequences are live: the starts after theirs mean nothing, not even that they increase.
    starts = starts.at[3:].set(jnp.array([2, 900]))
    got = quickly(ragged_page_attention_v2, rows, pages, lens, tables, starts, 2)
    close(got[:14], paged_loop.packed(MIXED)[:14])
    assert not np.any(got[14:])


@pytest.mark.parametrize("layout", ["pshd", "phsd", "hpsd"])
def test_t27_a_cache_is_read_in_the_layout_that_is_said_and_no_other_is_guessed(layout):
    # One page of two slots and two KV heads: the axes could be anything.
    batch = paged_loop.make((2,), (1,))
    query, key, value, lens, tables = paged_calls.arguments("page_attention", Paged(batch, slots=2))
    order = ["pshd".index(axis) for axis in layout]
    caches = [x[tables[0, :1]].transpose(order) for x in (key, value)]
    got = quickly(page_attention, query, *caches, lens, jnp.zeros((1, 1), jnp.int32), kv_layout=layout)
    close(got, paged_loop.packed(batch))
    chunk = quickly(prefill_page_attention, query, *caches, lens, jnp.zeros(1, jnp.int32), kv_layout=layout)
    close(chunk, paged_loop.packed(batch))


def test_t27_a_cache_that_does_not_fit_its_layout_is_an_error_that_names_it():
    query, key, value, lens, tables = paged_calls.arguments("page_attention", Paged(DECODE, slots=3))
    with pytest.raises(ValueError, match=r"kv_layout='phsd'"):
        page_attention(query, key, value, lens, tables, kv_layout="phsd")
    with pytest.raises(ValueError, match=r"kv_layout: got str 'shpd', wants one of"):
        page_attention(query, key, value, lens, tables, kv_layout="shpd")


def test_t27_page_attention_honours_window_and_soft_cap():
    plain, window, capped = (
        paged_calls.output("page_attention", Paged(DECODE), **options) for options in ({}, {"window": 3}, {"cap": 0.5})
    )
    assert not np.allclose(plain, window)
    assert not np.allclose(plain, capped)
    close(window, paged_loop.packed(DECODE, window=3))
    close(capped, paged_loop.packed(DECODE, cap=0.5))


def test_t33_page_attention_takes_the_shapes_of_a_model():
    query, *rest = paged_calls.arguments("page_attention", Paged(DECODE))
    got = jax.jit(functools.partial(page_attention, kv_layout="pshd"))(query[:, None], *rest)
    assert got.shape == (4, 1, 4, 8)
    close(got[:, 0], paged_loop.packed(DECODE))


def test_t29_biases_join_the_score_before_the_soft_cap():
    # A slope that exceeds the cap by far: added afterwards, it would dominate.
    options = {"alibi": np.array([3.0, 3.0, 0.0, 0.0]), "cap": 0.5}
    close(paged_calls.output("unified_attention", Paged(MIXED), **options), paged_loop.packed(MIXED, **options))


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
@pytest.mark.parametrize("kv_heads", [2, 3])
def test_t32_both_layouts_of_head_size_64_agree(dtype, kv_heads):
    pack = 4 // jnp.dtype(dtype).itemsize
    rng = np.random.default_rng(0)
    queries, keys, values = (
        jnp.asarray(rng.normal(size=(6, heads, 64)), dtype) for heads in (2 * kv_heads, kv_heads, kv_heads)
    )
    shapes = ((-(-2 * kv_heads // pack), pack, 128), (-(-kv_heads // pack), pack, 128))
    rest = jnp.array([4, 2]), jnp.array([3, 0, 1, 0]), jnp.array([0, 4, 6]), jnp.array([0, 0, 2])
    outputs = []
    for shape in shapes:
        cache = jnp.ones((5, 4, *shape), dtype)
        output, cache = quickly(ragged_page_attention_v3, queries, keys, values, cache, *rest, softmax_scale=None)
        outputs.append(output)
    close(outputs[0], np.asarray(outputs[1], np.float64))
    heads = np.asarray(cache, np.float32).reshape(5, 4, -1, 128)  # lanes: K in the first 64, V in the others
    close(heads[3, :4, :kv_heads, :64], np.asarray(keys[:4], np.float64))
    close(heads[1, :2, :kv_heads, 64:], np.asarray(values[4:], np.float64))
    assert np.all(heads[3, :4, kv_heads:] == 0)
    assert np.all(heads[4] == 1)


def test_t32_a_cache_whose_shape_fits_two_layouts_needs_kv_layout():
    # bfloat16 and one KV head: [P, S, 1, 2, 128] is either.
    queries, tokens = jnp.ones((2, 2, 64), jnp.bfloat16), jnp.ones((2, 1, 64), jnp.bfloat16)
    cache = jnp.zeros((3, 4, 1, 2, 128), jnp.bfloat16)
    rest = jnp.array([2]), jnp.array([1]), jnp.array([0, 2]), jnp.array([0, 0, 1])
    with pytest.raises(ValueError, match="fits several layouts; pass kv_layout=, one of interleaved, lanes"):
        ragged_page_attention_v3(queries, tokens, tokens, cache, *rest)
    for layout in ("interleaved", "lanes"):
        output, new = quickly(ragged_page_attention_v3, queries, tokens, tokens, cache, *rest, kv_layout=layout)
        assert np.all(output == 1)
        assert np.count_nonzero(new) == 2 * 2 * 64
        place = new[1, 0, 0] if layout == "interleaved" else new[1, 0, 0, :1].reshape(2, 64)
        assert np.all(place[:, :64] == 1)


@pytest.mark.parametrize("name", ["float8_e4m3fn", "int8"])
def test_caches_of_8_bits_are_read_with_their_scales(name):
    rng, dtype = np.random.default_rng(0), jnp.dtype(name)
    queries, keys, values = (jnp.asarray(rng.normal(size=(5, heads, 128)), jnp.float32) for heads in (4, 2, 2))
    cache, rest = (
        jnp.zeros((3, 4, 1, 4, 128), dtype),
        (jnp.array([5]), jnp.array([2, 0]), jnp.array([0, 5]), jnp.array([0, 0, 1])),
    )
    scales = {"q_scale": 0.02, "k_scale": 0.01, "v_scale": 0.03}

    def stored(x, scale):
        if dtype != jnp.int8:
            return (x / scale).astype(dtype)
        return jnp.asarray(np.clip(np.rint(np.asarray(x / scale)), -128, 127), dtype)

    tokens = [stored(keys, scales["k_scale"]), stored(values, scales["v_scale"])]
    got, _ = quickly(ragged_page_attention_v3, queries, *tokens, cache, *rest, **scales, softmax_scale=None)
    rounded = [
        stored(x, scale).astype(jnp.float32) * scale
        for x, scale in zip((queries, keys, values), scales.values(), strict=True)
    ]
    want = flash_attention(*(x[None] for x in rounded), causal=True)[0]
    close(got, np.asarray(want, np.float64), 1e-5)


@pytest.mark.parametrize("lens", [(0, 1, 48), (0, 2, 83)])
def test_an_empty_sequence_and_a_long_chunk_under_a_window_read_only_their_own_slots(lens):
    """Unused slots are NaN and unused table entries garbage; the chunk crosses pages, the window ends inside of one."""
    batch = paged_loop.make(lens, (0, 1, 35), (6, 3), 16)
    sinks = np.random.default_rng(1).normal(size=6)
    got = paged_calls.output("chunked_prefill_paged_decode", Paged(batch, slots=16, entries=9), sinks=sinks, window=47)
    close(got, paged_loop.packed(batch, sinks=sinks, window=47))
