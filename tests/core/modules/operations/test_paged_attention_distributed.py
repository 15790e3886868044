"""The operations over paged caches on eight forced host devices: the numbers of the unsharded call."""

import jax
import jax.numpy as jnp
import numpy as np
import paged_calls
import paged_loop
import pytest
from jax.sharding import PartitionSpec as P
from paged_calls import DECODING, OPS, QUICK, Paged

import ejkernel.modules as ej

MIXED = paged_loop.make((17, 9, 0, 1), (5, 9, 0, 1), heads=(8, 4))
DECODE = paged_loop.make((17, 9, 0, 1), (1, 1, 1, 1), heads=(8, 4))
CHUNK = paged_loop.make((17,), (5,), heads=(8, 4))
SINKS = np.linspace(-1, 2, 8)

ROWS, CACHE = P(None, "tp", None), P(None, None, "tp", None)
DENSE, BATCH = P("dp", None, "tp", None), P("dp")
# Specs of the positional arguments, and of the outputs.
HEADS = {
    "page_attention": ((P("dp", "tp"), CACHE, CACHE, BATCH, P("dp", None)), P("dp", "tp", None)),
    "decode_attention": ((P("dp", "tp"), ROWS, ROWS, P("dp", None), BATCH), (P("dp", "tp", None), P("dp", "tp"))),
    "ragged_decode_attention": ((P("dp", "tp"), DENSE, DENSE, BATCH, BATCH), P("dp", "tp", None)),
    "prefill_page_attention": ((ROWS, P("tp"), P("tp"), None, None), ROWS),
    "unified_attention": ((ROWS, CACHE, CACHE, None, None, None, None, None, P("tp")), ROWS),
    "chunked_prefill_paged_decode": ((ROWS, ROWS, ROWS, CACHE, CACHE, None, None, None), (ROWS, CACHE, CACHE)),
    "ragged_page_attention_v2": ((ROWS, CACHE, None, None, None, None, P("tp")), ROWS),
    "ragged_page_attention_v3": (
        (ROWS, ROWS, ROWS, P(None, None, "tp", None, None), None, None, None, None),
        (ROWS, P(None, None, "tp", None, None)),
    ),
}


def mesh_of(dp, tp):
    return jax.make_mesh((dp, tp), ("dp", "tp"), (jax.sharding.AxisType.Auto,) * 2, devices=jax.devices()[: dp * tp])


def prepared(op):
    batch = DECODE if op in DECODING else CHUNK if op == "prefill_page_attention" else MIXED
    paged = Paged(batch)
    positional, keywords = paged_calls.keywords(op, paged, {"sinks": SINKS, "window": 6})
    return paged_calls.arguments(op, paged) + positional, keywords, paged_loop.packed(batch, sinks=SINKS, window=6)


def test_there_are_eight_devices():
    assert jax.device_count() == 8


@pytest.mark.parametrize("op", OPS)
def test_heads_and_sequences_can_be_split(op):
    args, keywords, want = prepared(op)
    in_specs, out_specs = HEADS[op]
    placed = {"mesh": mesh_of(2, 4), "in_specs": in_specs, "out_specs": out_specs}
    call = jax.jit(lambda *args: getattr(ej, op)(*args, **keywords, **placed), compiler_options=QUICK)
    returned = call(*args)
    output = returned[0] if isinstance(returned, tuple) else returned
    np.testing.assert_allclose(output, want, rtol=2e-5, atol=2e-6)
    assert "tp" in output.sharding.spec
    if isinstance(returned, tuple) and op != "decode_attention":
        alone = jax.jit(lambda *args: getattr(ej, op)(*args, **keywords), compiler_options=QUICK)(*args)
        for ours, theirs in zip(returned[1:], alone[1:], strict=True):
            np.testing.assert_array_equal(ours, theirs)  # NaN slots included


def test_the_heads_of_a_cache_are_split_where_its_layout_has_them():
    query, key, value, lens, tables = paged_calls.arguments("page_attention", Paged(DECODE))
    want = ej.page_attention(query, key, value, lens, tables, kv_layout="pshd")
    arrays = (query, key.swapaxes(1, 2), value.swapaxes(1, 2), lens, tables)

    def split(cache):
        specs = (P(None, "tp"), cache, cache, P(), P())
        placed = {"mesh": mesh_of(1, 2), "in_specs": specs, "out_specs": P(None, "tp")}
        return ej.page_attention(*arrays, kv_layout="phsd", **placed)

    np.testing.assert_allclose(split(P(None, "tp")), want, rtol=1e-6, atol=1e-6)
    with pytest.raises(ValueError, match="axis 's' of key_cache cannot be split"):
        split(CACHE)


@pytest.mark.parametrize(
    ("heads", "dtype", "reason"),
    [(3, jnp.bfloat16, "does not divide"), (6, jnp.float8_e4m3fn, "padded heads cannot be split")],
)
def test_padded_heads_cannot_be_split(heads, dtype, reason):
    queries, keys = jnp.ones((2, 2 * heads, 64), jnp.bfloat16), jnp.ones((2, heads, 64), dtype)
    cache = jnp.zeros((3, 4, 2, 4 // jnp.dtype(dtype).itemsize, 128), dtype)
    rest = jnp.array([2]), jnp.array([1]), jnp.array([0, 2]), jnp.array([0, 0, 1])
    cached = P(None, None, "tp", None, None)
    specs = (ROWS, P(), P(), cached, None, None, None, None)
    placed = {"mesh": mesh_of(1, 2), "in_specs": specs, "out_specs": (ROWS, cached)}
    with pytest.raises(ValueError, match=reason):
        ej.ragged_page_attention_v3(queries, keys, keys, cache, *rest, kv_layout="lanes", **placed)


def test_tokens_cannot_be_split():
    args, keywords, _ = prepared("unified_attention")
    placed = {"mesh": mesh_of(2, 1), "in_specs": (P("dp"), *(P(),) * 5), "out_specs": P("dp")}
    with pytest.raises(ValueError, match="'t' of queries cannot be split over devices in unified_attention"):
        ej.unified_attention(*args, **keywords, **placed)
