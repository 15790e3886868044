"""Paged attention in Triton: its numbers in the interpreter, its work list, and what its kernels take of a chip."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from triton_chips import CHIPS, H200, assert_conforms, assert_fits, assert_fits_and_spills_nothing, run_interpreted

from ejkernel.families.paged_attention import PagedAttention
from ejkernel.families.paged_attention.work import WorkList, distribute_key_tiles
from ejkernel.ops.device import target_device
from ejkernel_triton import launch, paged_attention
from ejkernel_triton.paged_attention import config as paged_config
from ejkernel_triton.paged_attention.forward import _packed_bias_table_ranges, forward

VALUES = "test_value and not shapes and not residuals and not eager"
# Of the values, those that differ in layout, dtype or writing.
LAYOUTS = ("page_attention", "prefill_page_attention")
TERMS = ("unified_attention", "ragged_decode_attention")
OTHERS = ("ragged_page_attention_v3", "multi_latent_ragged_page_attention")
PARTS = (
    "(not ragged and not unified and not wide and not functions)",
    "((unified or ragged_decode) and (bias or window or sinks or trees))",
    "(ragged_page_attention_v3 and (int8 or float8 or decode))",
    "multi_latent",
)


def test_conformance():
    operations = (*LAYOUTS, *TERMS, *OTHERS)
    assert_conforms(operations, f"{VALUES} and ({' or '.join(PARTS)})")


def test_every_pair_of_features_matches_a_loop_in_numpy():
    """Chunks, trees per sequence, and a prefix in calls that write tokens or have a query row per sequence were
    refused.
    """
    run_interpreted("paged_attention/serving_features_process.py")


def test_a_shared_prefix_of_8_bits_is_copied_in_the_dtype_of_queries():
    """Each of 32 tiles of query rows converted the whole prefix: 1.14 times the slowest feature alone."""
    run_interpreted("paged_attention/shared_prefix_process.py")


def test_rows_keep_their_bits_however_splits_are_shared():
    run_interpreted("paged_attention/fixed_splits_process.py")


def test_float8_e4m3fn_is_refused_where_triton_cannot_read_it():
    """An A100 accepted such a cache, and Triton's compiler raised an error."""
    shape = jax.ShapeDtypeStruct
    pages = shape((8, 64, 2, 128), jnp.float8_e4m3fn)
    record = PagedAttention(
        query=shape((8, 8, 128), jnp.bfloat16),
        key_pages=pages,
        value_pages=pages,
        block_tables=shape((8, 4), jnp.int32),
        kv_lens=shape((8,), jnp.int32),
        query_start=None,
        softmax_scale=0.1,
        kv_layout="pshd",
        kv_heads=None,
    )
    with target_device(CHIPS["sm_80"]):
        (reason,) = paged_attention._refusal_reasons(record)
    assert reason.startswith("key_pages: Triton reads float8_e4m3fn from compute capability 8.9 on")
    with target_device(H200):
        assert not list(paged_attention._refusal_reasons(record))


@pytest.mark.parametrize("rows", [[65536], [46341], [1, 65536], [2**16] * 3])
def test_packed_biases_without_a_table_of_every_pair_are_not_read(rows):
    """The square of 65536 rows is 0 in int32, so that a table of one bias counted as large enough."""
    shape = jax.ShapeDtypeStruct
    record = PagedAttention(
        query=shape((sum(rows), 1, 16), jnp.float32),
        key_pages=shape((4, 8, 1, 16), jnp.float32),
        value_pages=shape((4, 8, 1, 16), jnp.float32),
        block_tables=shape((len(rows), 1), jnp.int32),
        kv_lens=jnp.asarray(rows, jnp.int32),
        query_start=jnp.asarray(np.cumsum([0, *rows]), jnp.int32),
        softmax_scale=1.0,
        kv_layout="pshd",
        kv_heads=None,
        qq_bias=jnp.zeros(1, jnp.float32),
    )
    table_rows = _packed_bias_table_ranges(record)[:, 1]
    assert table_rows.tolist() == [n if n == 1 else 0 for n in rows]


def test_conformance_of_dense_latent_caches():
    tests = f"({VALUES} and not rotary) or (test_padding and two) or (test_vmap and 80)"
    assert_conforms(("mla_decode",), tests, "triton_latent")


def test_work_list_of_the_kernel_equals_that_of_xla():
    run_interpreted("paged_attention/work_list_process.py")


@given(
    highs=st.lists(st.integers(0, 70), min_size=1, max_size=6),
    block=st.sampled_from([1, 16]),
    heads=st.integers(1, 3),
    programs=st.integers(1, 9),
)
@settings(deadline=None, max_examples=40)
def test_every_key_tile_is_assigned_to_exactly_one_program(highs, block, heads, programs):
    high = jnp.asarray(highs, jnp.int32)
    rows = jnp.asarray([1] * (len(highs) - 1) + [0], jnp.int32)  # the last entry is not real
    zero = jnp.zeros_like(high)
    work = WorkList(jnp.sum(rows), zero, zero, rows, zero, zero, low=high // 3, high=high)
    dealt = jax.tree.map(np.asarray, distribute_key_tiles(work, block, heads, programs))
    ends = np.append(dealt.begin[1:], dealt.total)
    assert np.all(ends - dealt.begin <= dealt.tiles_per_program)
    assert dealt.begin[0] == 0
    assert np.all(ends >= dealt.begin)
    assert ends[-1] == dealt.total
    for begin, end, entry in zip(dealt.begin, ends, dealt.entry, strict=True):
        if begin < end:  # a program begins inside of the entry that it is given
            assert dealt.start[entry] <= begin < dealt.start[entry] + dealt.tiles_per_head[entry] * heads
    assert np.all(dealt.tiles_per_head[:-1] >= 1)
    assert dealt.tiles_per_head[-1] == 0
    needed = [-(-h // block) - (h // 3) // block if h > h // 3 else 0 for h in highs[:-1]]
    assert list(dealt.tiles_per_head[:-1]) == [max(n, 1) for n in needed]
    assert dealt.total == dealt.tiles_per_head.sum() * heads


def latent_launches(device, heads):
    """What decoding over pages of latent vectors launches."""
    shape, sequences = jax.ShapeDtypeStruct, 8
    record = PagedAttention(
        query=shape((sequences, heads, 576), jnp.bfloat16),
        key_pages=shape((sequences * 128, 64, 640), jnp.bfloat16),
        value_pages=None,
        block_tables=shape((sequences, 128), jnp.int32),
        kv_lens=shape((sequences,), jnp.int32),
        query_start=None,
        softmax_scale=0.1,
        kv_layout="psd",
        kv_heads=None,
        latent=(512, 512),
    )
    with target_device(device), launch.collect_launches() as calls:
        jax.eval_shape(lambda record: forward(record, paged_config.heuristic(record, device, "forward")), record)
    return calls


def launches(device, rows, dtype=jnp.bfloat16):
    """What decoding, or a prefill of `rows` query rows, launches on a device."""
    shape, sequences = jax.ShapeDtypeStruct, 8
    pages = shape((sequences * 128, 64, 8, 128), dtype)
    record = PagedAttention(
        query=shape((rows or sequences, 32, 128), dtype),
        key_pages=pages,
        value_pages=pages,
        block_tables=shape((sequences, 128), jnp.int32),
        kv_lens=shape((sequences,), jnp.int32),
        query_start=None if rows is None else shape((sequences + 1,), jnp.int32),
        softmax_scale=0.1,
        kv_layout="pshd",
        kv_heads=None,
    )
    with target_device(device), launch.collect_launches() as calls:
        jax.eval_shape(lambda record: forward(record, paged_config.heuristic(record, device, "forward")), record)
    return calls


@pytest.mark.parametrize("chip", ["sm_80", "sm_90", "gfx942"])
def test_decoding_fits_the_chip_and_spills_nothing(chip):
    calls = launches(CHIPS[chip], None)
    assert {call.kernel.__name__ for call in calls} == {
        "work_list_kernel",
        "paged_attention_kernel",
        "split_combine_kernel",
    }
    assert_fits_and_spills_nothing(calls, chip)


def test_prefill_compiles_and_fits():
    assert_fits(launches(H200, 4096), "sm_90")


def test_latent_decoding_with_few_heads_fits_and_spills_nothing():
    assert_fits_and_spills_nothing(latent_launches(H200, 16), "sm_90")


def test_latent_decoding_with_many_heads_reads_keys_once_for_two_programs():
    (call,) = (call for call in latent_launches(H200, 128) if call.kernel.__name__ == "paged_attention_kernel")
    assert call.constants["spec"].HEAD_TILES_PER_KV_HEAD == 2
    assert call.grid == 132
    assert_fits([call], "sm_90")


@pytest.mark.parametrize("chip", ["sm_80", "gfx942"])
def test_latent_decoding_fits_other_chips(chip):
    for heads in (16, 128):
        assert_fits(latent_launches(CHIPS[chip], heads), chip)
