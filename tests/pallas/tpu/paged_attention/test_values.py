"""The paged-attention kernel's numbers, interpreted, against the family's meaning; and what it refuses."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from tpu_paged_records import QUICKLY, case, lowered
from tpu_records import close, interpreted

from ejkernel.families.paged_attention import reference
from ejkernel.modules.operations.cases import paged_inputs
from ejkernel.modules.operations.cases.paged_inputs import PagedSizes
from ejkernel.ops.device import DeviceInfo, target_device
from ejkernel_pallas.tpu.paged_attention import MAX_TABLE_SMEM_WORDS, config, reasons
from ejkernel_pallas.tpu.paged_attention.config import TpuPaged
from ejkernel_pallas.tpu.paged_attention.forward import forward
from ejkernel_pallas.tpu.paged_attention.plan import ITEM_FIELDS
from ejkernel_pallas.tpu.paged_attention.spec import make_spec

V2, V3 = "ragged_page_attention_v2", "ragged_page_attention_v3"
TILES = TpuPaged(block_q=8, block_kv=128, parts=2)
SINGLE = TpuPaged(block_q=1, block_kv=128)
CASES = {
    "joined heads, sinks": (V2, "sinks, lse, bfloat16", SINGLE),
    "tiles of prefill and decode, rounded operands": (V2, "rounded operands", TILES),
    "written, window, soft cap": (V3, "window and soft cap", TILES),
    "written in lanes": (V3, "head size 64 in lanes, bfloat16", SINGLE),
    "written in 8 bits, padded heads": (V3, "padded heads, float8", TILES),
    "written in int8, scales": (V3, "int8, scales", SINGLE),
    "pages of two heads": ("page_attention", "wide table, bfloat16", SINGLE),
    "heads first": ("prefill_page_attention", "window", TILES),
}


def check(record, params):
    with interpreted():
        got = jax.jit(lambda record: forward(record, params)[0], compiler_options=QUICKLY)(record)
    for x, wanted in zip(got, reference(record)[0], strict=True):
        assert x.dtype == wanted.dtype
        close(x, wanted, record.query.dtype)


@pytest.mark.parametrize("name", CASES)
def test_values(name):
    op, which, params = CASES[name]
    check(case(op, which), params)


SLOPES = np.array([0.5, -0.25, 0.125, 1.0], np.float32)
TERMS = {
    "slopes, soft cap, sinks": (TILES, {"alibi_slopes": SLOPES, "logits_soft_cap": 1.5, "softmax_aux": SLOPES}),
    "chunks, window, slopes": (TILES, {"chunk_size": 40, "sliding_window": (30, 4), "alibi_slopes": SLOPES}),
    "chunks, not causal": (TILES, {"chunk_size": 48, "causal": False, "sliding_window": (60, 30)}),
    "decoding with slopes": (SINGLE, {"alibi_slopes": SLOPES}),
    "decoding with chunks, not causal": (SINGLE, {"chunk_size": 48, "causal": False}),
}


@pytest.mark.parametrize("name", TERMS)
def test_alibi_slopes_and_attention_chunks(name):
    """Several blocks of keys, tiles of queries that two chunks share, and heads that share a product."""
    params, fields = TERMS[name]
    q_lens = (20, 1, 33) if params is TILES else (1, 1, 1)
    sizes = PagedSizes(kv_lens=(300, 40, 130), q_lens=q_lens, dtype=jnp.bfloat16, g=2, h=4)
    record = lowered(V2, paged_inputs.v2_inputs, sizes)
    arrays = {name: jnp.asarray(x) if isinstance(x, np.ndarray) else x for name, x in fields.items()}
    record = dataclasses.replace(record, **arrays)
    assert not list(reasons(record))
    check(record, params)


@pytest.mark.parametrize(("op", "make", "params", "fields"), [
    ("unified_attention", paged_inputs.packed_inputs, TILES, {"causal": False, "sliding_window": (60, 30)}),
    (V2, paged_inputs.v2_inputs, SINGLE, {}),
])  # fmt: skip
def test_absent_pages_have_no_keys(op, make, params, fields):
    sizes = PagedSizes(kv_lens=(150, 40, 70), q_lens=(20, 1, 1), dtype=jnp.bfloat16, g=2, h=4)
    tables = sizes.block_tables()
    tables[0, [1, 4, 8]], tables[1, :], tables[2, 3] = -1, 10_000, -5
    record = lowered(op, make, sizes, block_tables=jnp.asarray(tables), **fields)
    check(with_nan_elsewhere(record, tables, sizes.kv_lens), params)


def with_nan_elsewhere(record, tables, lens):
    """The record with NaN in every slot of the cache that holds no token of a sequence."""
    pages, slots = (record.key_pages.shape[record.kv_layout.index(axis)] for axis in "ps")
    empty = np.ones((pages, slots), bool)
    for table, length in zip(tables, lens, strict=True):
        page, slot = table[np.arange(length) // slots], np.arange(length) % slots
        present = (page >= 0) & (page < pages)
        empty[page[present], slot[present]] = False
    axes = zip(record.kv_layout, record.key_pages.shape, strict=True)
    places = empty.reshape([size if axis in "ps" else 1 for axis, size in axes])
    caches = {name: getattr(record, name) for name in ("key_pages", "value_pages")}
    return dataclasses.replace(
        record, **{name: jnp.where(places, jnp.nan, x) for name, x in caches.items() if x is not None}
    )


@pytest.mark.parametrize("kind", ["TPU v6 lite", "TPU7x"])
def test_decoding_while_the_block_ahead_is_copied(kind):
    """Blocks that all attend, ahead of such, of a part of one, of another sequence's, and of nothing."""
    sizes = PagedSizes(kv_lens=(520, 384, 40, 256), q_lens=(1, 1, 1, 1), dtype=jnp.bfloat16, g=2, h=4)
    record = lowered(V2, paged_inputs.v2_inputs, sizes)
    with target_device(DeviceInfo(platform="tpu", vendor="google", kind=kind)):
        spec = make_spec(record, config.tile_sizes_of(SINGLE))
        assert spec.copy_slices
        assert spec.stores_score_limits == ("7x" in kind)
        check(record, SINGLE)


def test_large_products_in_slices():
    """Of 144 rows, which are no whole slices of 64; and a sink of -inf, which is none, also where there are no keys."""
    sizes = PagedSizes(kv_lens=(300, 40), q_lens=(48, 40), dtype=jnp.bfloat16, g=2, h=6)
    record = lowered(V2, paged_inputs.v2_inputs, sizes)
    record = dataclasses.replace(record, softmax_aux=jnp.array([0.5, -jnp.inf, 2.0, -1.0, -jnp.inf, 0.0]))
    tables = np.array(record.block_tables)
    tables[1, :] = -1
    record = dataclasses.replace(record, block_tables=jnp.asarray(tables))
    params = TpuPaged(block_q=48, block_kv=128)
    assert make_spec(record, config.tile_sizes_of(params)).row_block == 144
    check(record, params)


def test_new_tokens_fill_whole_pages_and_parts_of_them():
    sizes = PagedSizes(kv_lens=(40, 16, 9), q_lens=(37, 16, 1), h=2, g=2, d=128, s=8, dtype=jnp.bfloat16)
    record = lowered(V3, paged_inputs.v3_inputs, sizes, softmax_scale=None)
    tables = np.array(record.block_tables)
    tables[0, 2] = -1  # what is written there is dropped
    check(dataclasses.replace(record, block_tables=jnp.asarray(tables)), TILES)


def paged(dtype=jnp.float32, layout="pshd", slots=16, heads=4, size=64, **fields):
    places = {"p": 6, "s": slots, "h": heads, "d": size}
    pages = jax.ShapeDtypeStruct(tuple(places[x] for x in layout), dtype)
    record = case("page_attention", "lengths 0 to 64")
    return dataclasses.replace(record, key_pages=pages, value_pages=pages, kv_layout=layout, **fields)


def with_slopes(record):
    """The slopes need one more word of scalar memory per sequence: the table alone would just fit."""
    entries = MAX_TABLE_SMEM_WORDS - record.kv_lens.size * len(ITEM_FIELDS)
    tables = jax.ShapeDtypeStruct((record.kv_lens.size, entries // record.kv_lens.size), jnp.int32)
    record = dataclasses.replace(record, block_tables=tables)
    assert not list(reasons(record))
    return dataclasses.replace(record, alibi_slopes=jax.ShapeDtypeStruct((4,), jnp.float32))


def written(dtype, heads, size):
    """A call that writes new tokens to one cache of keys and values."""
    sizes = PagedSizes(kv_lens=(16,), q_lens=(4,), h=2, g=2, d=128, s=8, dtype=jnp.bfloat16)
    record = lowered(V3, paged_inputs.v3_inputs, sizes, softmax_scale=None)
    return dataclasses.replace(record, key_pages=jax.ShapeDtypeStruct((4, 8, heads, 2, size), dtype))


@pytest.mark.parametrize(("record", "word"), [
    (lambda: paged(jnp.float16), "float16"),
    (lambda: paged(heads=3), "3 rows"),
    (lambda: paged(jnp.bfloat16, heads=1), "1 rows"),
    (lambda: written(jnp.int8, 1, 128), "a multiple of 4"),
    (lambda: written(jnp.bfloat16, 1, 64), "a multiple of 2"),
    (lambda: paged(size=192), "above 128"),
    (lambda: paged(slots=1000), "whole pages of 1000"),
    (lambda: paged(jnp.bfloat16, "phsd", slots=8), "pages of 8 slots"),
    (lambda: paged(block_tables=None), "without pages"),
    (lambda: paged(block_tables=jax.ShapeDtypeStruct((4, 2**16), jnp.int32)), "scalar memory"),
    (lambda: paged(compute_dtype=jnp.float16), "compute_dtype"),
    (lambda: with_slopes(paged()), "scalar memory"),
])  # fmt: skip
def test_refusals_name_what_is_refused(record, word):
    (reason,) = reasons(record())
    assert word in reason


def test_what_is_served_is_not_refused():
    assert not list(reasons(paged()))
    assert not list(reasons(paged(jnp.bfloat16, "hpsd", size=192)))
    assert not list(reasons(written(jnp.int8, 2, 128)))
    assert not list(reasons(written(jnp.bfloat16, 1, 128)))
