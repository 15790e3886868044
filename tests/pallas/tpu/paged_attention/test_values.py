"""The paged-attention kernel's numbers, interpreted, against the family's meaning; and what it refuses."""

import dataclasses
import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from tpu_paged_records import QUICKLY, case, lowered
from tpu_records import close, interpreted

from ejkernel.families.paged_attention import reference
from ejkernel.families.paged_attention.shared_prefix import split_prefix
from ejkernel.modules.operations.cases import paged_inputs
from ejkernel.modules.operations.cases.paged_inputs import PagedSizes
from ejkernel.ops.device import DeviceInfo, target_device
from ejkernel.types.pair_functions import score_function
from ejkernel_pallas.tpu.mosaic.launch import DEFAULT_VMEM_LIMIT_BYTES, MIN_COMPILER_VMEM_BYTES
from ejkernel_pallas.tpu.mosaic.paged_layout import caches_as_stored
from ejkernel_pallas.tpu.paged_attention import MAX_TABLE_SMEM_WORDS, config, refusal_reasons
from ejkernel_pallas.tpu.paged_attention.config import TpuPaged
from ejkernel_pallas.tpu.paged_attention.forward import _resident_operands, forward, kernel_scratch
from ejkernel_pallas.tpu.paged_attention.plan import ITEM_FIELDS, make_work_list
from ejkernel_pallas.tpu.paged_attention.spec import PagedTiles, RowTerms, make_spec

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
    assert not list(refusal_reasons(record))
    check(record, params)


def tree(*shape):
    """A bias that hides pairs, some of them by the least number that there is, which hides like -inf."""
    random = np.random.default_rng(3)
    bias = random.normal(size=shape).astype(np.float32)
    bias[random.random(shape) < 0.3] = -np.inf
    bias.reshape(-1)[::7] = np.finfo(np.float32).min
    return bias


COMMON = {"shared_prefix": np.int32(37)}
TREES_AND_PREFIXES = {
    "one tree for all, rows without a column": (TILES, {"qq_bias": tree(16, 16)}),
    "a tree per sequence, soft cap, sinks": (
        TILES,
        {"qq_bias": tree(3, 24, 24), "logits_soft_cap": 0.25, "softmax_aux": SLOPES},
    ),
    "packed trees, not causal, slopes": (
        TILES,
        {"qq_bias": tree(20**2 + 1 + 33**2), "causal": False, "alibi_slopes": SLOPES},
    ),
    "tiles of one token": (SINGLE, {"qq_bias": tree(3, 40, 40), "causal": False}),
    "prefix that ends within a page, sinks": (TILES, COMMON | {"softmax_aux": SLOPES}),
    "prefix, slopes, soft cap": (SINGLE, COMMON | {"alibi_slopes": SLOPES, "logits_soft_cap": 1.5}),
    "prefix, chunks, window, tree, slopes": (
        TILES,
        COMMON | {"chunk_size": 24, "sliding_window": (90, 2), "qq_bias": tree(3, 24, 24), "alibi_slopes": SLOPES},
    ),
}


@pytest.mark.parametrize("name", TREES_AND_PREFIXES)
def test_trees_and_prefixes(name):
    """Contexts and queries that begin anywhere in blocks, pages and lanes.

    Without a prefix, most keys of the last sequence are new tokens, so that hidden pairs matter.
    """
    params, fields = TREES_AND_PREFIXES[name]
    q_lens = (20, 1, 33) if "qq_bias" in fields or params is TILES else (1, 1, 1)
    kv_lens = (300, 40, 130 if "shared_prefix" in fields else 36)
    sizes = PagedSizes(kv_lens=kv_lens, q_lens=q_lens, dtype=jnp.bfloat16, g=2, h=4)
    record = lowered(V2, paged_inputs.v2_inputs, sizes)
    fields = {name: jnp.asarray(x) if isinstance(x, np.ndarray | np.int32) else x for name, x in fields.items()}
    record = dataclasses.replace(record, **fields)
    assert not list(refusal_reasons(record))
    check(record, params)


@pytest.mark.parametrize("queries", [1, 8])
def test_work_items_begin_where_copies_may_begin(queries):
    """The compiler divides the first row by the rows of a copy; and two results are never copied to one row."""
    sizes = PagedSizes(kv_lens=(300, 40, 36), q_lens=(20, 1, 33), dtype=jnp.bfloat16, g=2, h=4)
    record = lowered(V2, paged_inputs.v2_inputs, sizes)
    record = dataclasses.replace(record, qq_bias=jnp.asarray(tree(3, 40, 40)))
    spec = make_spec(record, PagedTiles(queries=queries, keys=128, parts=1))
    fields = np.asarray(make_work_list(record, spec).work_items).reshape(len(ITEM_FIELDS), -1)
    fields = dict(zip(ITEM_FIELDS, fields, strict=True))
    rows = fields["first_row"][fields["num_tokens"] > 0]
    assert len(rows) >= 4
    assert not np.any(rows % spec.query_rows_per_copy)
    assert np.all(np.diff(rows) >= spec.query_rows_per_copy)


@pytest.mark.parametrize("prefix", [36, 128])
def test_tables_without_entries_of_a_prefix_and_a_sequence_without_tokens(prefix):
    """The pages of the prefix are those of the first sequence, and no row attends to what another table lists there.

    The query row of the sequence without tokens holds NaN.
    """
    sizes = PagedSizes(kv_lens=(300, 0, 140), dtype=jnp.bfloat16, g=2, h=4)
    record = lowered("page_attention", paged_inputs.page_inputs, sizes)
    tables = np.array(record.block_tables)
    pages = prefix // record.key_pages.shape[record.kv_layout.index("s")]
    tables[1:, :pages] = -1
    query = record.query.at[1].set(jnp.nan)
    record = dataclasses.replace(record, query=query, block_tables=jnp.asarray(tables), shared_prefix=jnp.int32(prefix))
    check(record, SINGLE)


def test_new_tokens_after_a_prefix_and_between_draft_tokens():
    """The call that is written to has scales of 8 bits, too; the part of the prefix is read after the write."""
    sizes = PagedSizes(kv_lens=(41, 25, 60), q_lens=(3, 4, 5), h=4, g=2, d=128, s=8)
    record = lowered(
        V3, paged_inputs.v3_int8_inputs, sizes, q_scale=0.03, k_scale=0.01, v_scale=0.02, softmax_scale=None
    )
    check(dataclasses.replace(record, shared_prefix=jnp.int32(20), qq_bias=jnp.asarray(tree(3, 5, 5))), TILES)


def test_a_mapped_call_has_trees_and_prefixes_of_its_own():
    sizes = PagedSizes(kv_lens=(60, 40), q_lens=(5, 3), h=2, g=1, d=32, v=32, s=16)
    record = lowered("unified_attention", paged_inputs.packed_inputs, sizes)
    biases, prefixes = jnp.asarray(tree(2, 5, 5)), jnp.array([16, 24], jnp.int32)

    def attend(bias, prefix):
        return forward(dataclasses.replace(record, qq_bias=bias, shared_prefix=prefix), TILES)[0]

    with interpreted():
        got = jax.jit(jax.vmap(attend), compiler_options=QUICKLY)(biases, prefixes)
    for n in range(2):
        wanted = reference(dataclasses.replace(record, qq_bias=biases[n], shared_prefix=prefixes[n]))[0]
        for x, y in zip(got, wanted, strict=True):
            close(x[n], y, jnp.float32)


@pytest.mark.parametrize(("op", "make", "params", "fields"), [
    ("unified_attention", paged_inputs.packed_inputs, TILES, {"causal": False, "sliding_window": (60, 30)}),
    (V2, paged_inputs.v2_inputs, SINGLE, {}),
])  # fmt: skip
def test_missing_pages_have_no_keys(op, make, params, fields):
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
def test_decoding_while_the_next_block_is_copied(kind):
    """Blocks that all attend, ahead of such, of a part of one, of another sequence's, and of nothing."""
    sizes = PagedSizes(kv_lens=(520, 384, 40, 256), q_lens=(1, 1, 1, 1), dtype=jnp.bfloat16, g=2, h=4)
    record = lowered(V2, paged_inputs.v2_inputs, sizes)
    with target_device(DeviceInfo(platform="tpu", vendor="google", kind=kind)):
        spec = make_spec(record, config.tile_sizes_of(SINGLE))
        assert spec.num_copy_slices
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
    assert make_spec(record, config.tile_sizes_of(params)).unmasked_product_rows == 144
    check(record, params)


def test_new_tokens_fill_whole_pages_and_parts_of_them():
    sizes = PagedSizes(kv_lens=(40, 16, 9), q_lens=(37, 16, 1), h=2, g=2, d=128, s=8, dtype=jnp.bfloat16)
    record = lowered(V3, paged_inputs.v3_inputs, sizes, softmax_scale=None)
    tables = np.array(record.block_tables)
    tables[0, 2] = -1  # what is written there is dropped
    check(dataclasses.replace(record, block_tables=jnp.asarray(tables)), TILES)


def vmem_bytes(record, spec):
    """What the kernel takes, without the compiler's own use of VMEM."""
    stored = dict(zip(("keys", "values"), jax.eval_shape(caches_as_stored, record), strict=False))
    scratch = jax.tree.leaves(
        kernel_scratch(spec, spec.rows_per_tile, stored, False), is_leaf=lambda x: hasattr(x, "shape")
    )
    arrays = [x for x in scratch if jnp.issubdtype(x.dtype, jnp.number)]
    assert len(arrays) > 10
    arrays += jax.eval_shape(functools.partial(_resident_operands, spec=spec), record).values()
    return sum(jnp.dtype(x.dtype).itemsize * math.prod(x.shape) for x in arrays)


@pytest.mark.parametrize("prefix", [False, True])
@pytest.mark.parametrize("terms", ["no pairs", "tree", "functions"])
@pytest.mark.parametrize(
    ("heads", "kv_heads", "size"), [(32, 8, 128), (8, 8, 128), (8, 1, 128), (1, 1, 64), (16, 8, 256)]
)
def test_default_tiles_with_sinks_slopes_trees_and_a_prefix_fit_vmem(heads, kv_heads, size, terms, prefix):
    shapes = {"query": (2048, heads, size), "key_pages": (2048, 16, kv_heads, 2, size), "block_tables": (4, 128)}
    shapes |= {"kv_lens": (4,), "query_start": (5,), "softmax_aux": (heads,), "alibi_slopes": (heads,)}
    shapes |= ({"qq_bias": (2048, 2048)} if terms == "tree" else {}) | ({"shared_prefix": ()} if prefix else {})
    dtypes = dict.fromkeys(("query", "key_pages"), jnp.bfloat16)
    dtypes |= dict.fromkeys(("qq_bias", "softmax_aux", "alibi_slopes"), jnp.float32)
    arrays = {name: jax.ShapeDtypeStruct(x, dtypes.get(name, jnp.int32)) for name, x in shapes.items()}
    if terms == "functions":
        arrays["score_mod"] = score_function("score_mod", lambda s, b, h, q, k: s * 2.0**h + b * q - k, jnp.float32)
    record = dataclasses.replace(case(V2, "rounded operands"), compute_dtype=None, num_seqs=None, **arrays)
    device = DeviceInfo(platform="tpu", vendor="google", kind="TPU v5 lite")
    with target_device(device):
        params = config.heuristic(record, device, "forward")
        spec = make_spec(record, config.tile_sizes_of(params), output_dtype=jnp.float32 if prefix else None)
        runs = [(record, spec)]
        if prefix:
            record = jax.eval_shape(lambda x: split_prefix(x, masks_empty_sequences=False)[0].record, record)
            tiles = config.tile_sizes_of(config.prefix_config(record))
            runs.append((record, make_spec(record, tiles, row_terms=RowTerms(True, True), output_dtype=jnp.float32)))
    for record, spec in runs:
        assert vmem_bytes(record, spec) <= DEFAULT_VMEM_LIMIT_BYTES - MIN_COMPILER_VMEM_BYTES // 2


def paged(dtype=jnp.float32, layout="pshd", slots=16, heads=4, size=64, **fields):
    places = {"p": 6, "s": slots, "h": heads, "d": size}
    pages = jax.ShapeDtypeStruct(tuple(places[x] for x in layout), dtype)
    record = case("page_attention", "lengths 0 to 64")
    return dataclasses.replace(record, key_pages=pages, value_pages=pages, kv_layout=layout, **fields)


def with_contexts(record, **fields):
    """Slopes and trees need one more word of scalar memory per sequence: the table alone would just fit."""
    entries = MAX_TABLE_SMEM_WORDS - record.kv_lens.size * len(ITEM_FIELDS)
    tables = jax.ShapeDtypeStruct((record.kv_lens.size, entries // record.kv_lens.size), jnp.int32)
    record = dataclasses.replace(record, block_tables=tables)
    assert not list(refusal_reasons(record))
    return dataclasses.replace(record, **fields)


def written(dtype, heads, size):
    """A call that writes new tokens to one cache of keys and values."""
    sizes = PagedSizes(kv_lens=(16,), q_lens=(4,), h=2, g=2, d=128, s=8, dtype=jnp.bfloat16)
    record = lowered(V3, paged_inputs.v3_inputs, sizes, softmax_scale=None)
    return dataclasses.replace(record, key_pages=jax.ShapeDtypeStruct((4, 8, heads, 2, size), dtype))


def with_prefix(record):
    return dataclasses.replace(record, shared_prefix=jnp.int32(4))


@pytest.mark.parametrize(("record", "word"), [
    (lambda: paged(jnp.float16), "float16"),
    (lambda: paged(heads=3), "3 rows"),
    (lambda: paged(jnp.bfloat16, heads=1), "1 rows"),
    (lambda: written(jnp.int8, 1, 128), "a multiple of 4"),
    (lambda: written(jnp.bfloat16, 1, 64), "a multiple of 2"),
    (lambda: with_prefix(written(jnp.bfloat16, 3, 128)), "with new keys, key_pages: 6 rows"),
    (lambda: with_prefix(written(jnp.bfloat16, 4, 64)), "would copy the cache"),
    (lambda: paged(size=192), "above 128"),
    (lambda: paged(slots=1000), "whole pages of 1000"),
    (lambda: paged(jnp.bfloat16, "phsd", slots=8), "pages of 8 slots"),
    (lambda: paged(block_tables=None), "without pages"),
    (lambda: paged(block_tables=jax.ShapeDtypeStruct((4, 2**16), jnp.int32)), "scalar memory"),
    (lambda: paged(compute_dtype=jnp.float16), "compute_dtype"),
    (lambda: with_contexts(paged(), alibi_slopes=jax.ShapeDtypeStruct((4,), jnp.float32)), "scalar memory"),
    (lambda: with_contexts(paged(), qq_bias=jax.ShapeDtypeStruct((1, 1), jnp.float32)), "scalar memory"),
])  # fmt: skip
def test_refusals_name_what_is_refused(record, word):
    (reason,) = refusal_reasons(record())
    assert word in reason


def test_supported_calls_are_not_refused():
    assert not list(refusal_reasons(paged()))
    assert not list(refusal_reasons(paged(jnp.bfloat16, "hpsd", size=192)))
    assert not list(refusal_reasons(written(jnp.int8, 2, 128)))
    assert not list(refusal_reasons(written(jnp.bfloat16, 3, 128)))
    assert not list(refusal_reasons(with_prefix(written(jnp.bfloat16, 8, 128))))
    assert not list(refusal_reasons(written(jnp.bfloat16, 1, 128)))
