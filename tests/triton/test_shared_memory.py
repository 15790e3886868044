"""No heuristic and no candidate asks for more shared memory than its chip has, by the bounds that heuristics use.

`test_shared_memory_lowering.py` holds the bounds against what Triton compiles.
"""

import dataclasses
import itertools

import jax
import jax.numpy as jnp
import pytest
from recurrence_grid import delta_launches, delta_record
from shared_memory_grid import (
    DEVICES,
    DTYPES,
    HEADS,
    ROWS,
    SHAPE,
    SIZES,
    every_paged_call,
    every_term,
    latent,
    paged,
)
from triton_chips import H200

from ejkernel.families.grouped_matmul import GroupedMatmul
from ejkernel.families.paged_attention import PagedAttention
from ejkernel.families.paged_attention.shared_prefix import split_prefix
from ejkernel.families.selected_attention import SelectedAttention
from ejkernel.families.tiled_attention import TiledAttention
from ejkernel.ops import chips
from ejkernel.ops.chips import gpu_of
from ejkernel.ops.device import target_device
from ejkernel_triton import paged_attention, selected_attention
from ejkernel_triton.grouped_matmul import config as grouped
from ejkernel_triton.linear_recurrence.delta import config as delta_config
from ejkernel_triton.paged_attention import config as paged_config
from ejkernel_triton.paged_attention.config import query_heads_per_tile, shared_memory_bytes, shrink_to_shared_memory
from ejkernel_triton.paged_attention.fixed_splits import config as fixed_splits
from ejkernel_triton.paged_attention.plan import prefix_config
from ejkernel_triton.selected_attention import config as selected_config
from ejkernel_triton.selected_attention.config import shared_memory_bytes as of_selected
from ejkernel_triton.tiled_attention import config as tiled_config


@pytest.mark.parametrize("target", DEVICES)
def test_paged_attention_fits_or_is_refused(target):
    device, chip = DEVICES[target], chips.gpu_named(target)
    for name, record in every_paged_call():
        if paged_config.shared_memory_refusal(record, device):
            # A latent vector of 512 numbers in float32, twice for the queries, is more than 99 KiB hold.
            assert record.latent is not None, name
            assert record.query.dtype == jnp.float32 or record.key_pages.dtype == jnp.float32, name
            assert chip.shared_memory < 128 * 1024, name
            continue
        for choice in (
            paged_config.heuristic(record, device, "forward"),
            *paged_config.candidates(record, device, "forward"),
        ):
            assert shared_memory_bytes(record, choice, chip) <= chip.shared_memory, (name, choice)


@pytest.mark.parametrize("target", DEVICES)
def test_tiles_in_a_batch_invariant_block_fit_and_have_as_many_keys_for_all_query_rows(target):
    for heads, sizes, dtypes in itertools.product(HEADS, SIZES, DTYPES):
        calls = [paged(rows, heads, sizes, dtypes) for rows in ROWS]
        chosen = [fixed_splits.batch_invariant(record, DEVICES[target], "forward") for record in calls]
        assert len({tile.block_kv for tile in chosen}) == 1, (heads, sizes, dtypes)
        if gpu_of(DEVICES[target]).architecture != "hopper" or len({*dtypes}) > 1 or dtypes[0] == jnp.float32:
            # Elsewhere, tiles with other rows may sum in other steps.
            assert len({(tile.block_q, tile.num_warps) for tile in chosen}) == 1, (heads, sizes, dtypes)
        with target_device(DEVICES[target]):
            limits = [bool([*fixed_splits.invariance_limits(record)]) for record in calls]
        sizes_of_tiles = [
            shared_memory_bytes(*call, gpu_of(DEVICES[target])) for call in zip(calls, chosen, strict=True)
        ]
        assert len(set(limits)) == 1
        assert limits[0] or max(sizes_of_tiles) <= gpu_of(DEVICES[target]).shared_memory, (heads, sizes, dtypes)


@pytest.mark.parametrize("heads", [5, 12, 20, 40])
def test_default_tiles_have_at_most_the_maximum_of_score_rows(heads):
    """Query rows are rounded down to a power of two: rounded up, 20 heads had 80 rows, which are padded to 128."""
    for record in (
        latent(64, heads, (512, 64), (jnp.float16, jnp.int8)),
        paged(64, heads, (64, 64), (jnp.float32,) * 2),
    ):
        rows = paged_config.heuristic(record, H200, "forward").block_q * query_heads_per_tile(record, gpu_of(H200))
        assert rows <= paged_config.MAX_SCORE_ROWS


@pytest.mark.parametrize("target", DEVICES)
def test_the_tiles_of_a_shared_prefix_fit(target):
    device, chip = DEVICES[target], gpu_of(DEVICES[target])
    decoding = paged(None, 4, (256, 256), (jnp.float32, jnp.float32), **every_term(4, None))
    calls = [(name, record) for name, record in every_paged_call() if record.shared_prefix is not None]
    for name, record in [("decoding", decoding), *calls[::7]]:
        if paged_config.shared_memory_refusal(record, device):
            continue
        with target_device(device):
            prefix = jax.eval_shape(lambda record: split_prefix(record)[0].record, record)
            chosen = prefix_config(prefix)
        assert shared_memory_bytes(prefix, chosen, chip) <= chip.shared_memory, name


def test_a_configuration_that_fits_stays_as_it_is():
    record = paged(None, 8, (128, 128), (jnp.bfloat16, jnp.bfloat16))
    chosen = paged_config.heuristic(record, H200, "forward")
    assert shrink_to_shared_memory(record, chosen, gpu_of(H200)) == chosen
    large = dataclasses.replace(chosen, block_kv=1024)
    assert shrink_to_shared_memory(record, large, gpu_of(H200)).block_kv < 1024


def test_calls_without_a_fitting_tile_are_refused_with_the_sizes():
    record = latent(None, 16, (512, 64), (jnp.float32, jnp.float32))
    with target_device(DEVICES["sm_120"]):
        (reason,) = paged_attention._refusal_reasons(record)
    assert "bytes of shared memory, and sm_120 has 101376" in reason
    with target_device(H200):
        assert not list(paged_attention._refusal_reasons(record))
    assert isinstance(record, PagedAttention)


def test_the_delta_rule_has_fewer_stages_where_shared_memory_is_small():
    """Heads of 256 asked for 254,472 bytes with three stages, of 232,448 that an H200 has."""
    calls = delta_launches(delta_record("heads", jnp.bfloat16), H200)
    assert {call.num_stages for call in calls if call.kernel.__name__ == "chunk_fwd_h_kernel"} == {2}
    calls = delta_launches(delta_record("heads", jnp.bfloat16, size=128), H200)
    assert {call.num_stages for call in calls if call.kernel.__name__ == "chunk_fwd_h_kernel"} == {3}
    calls = delta_launches(delta_record("heads", jnp.float32), DEVICES["sm_120"])
    assert {call.num_stages for call in calls if call.kernel.__name__ == "chunk_fwd_h_kernel"} == {1}


@pytest.mark.parametrize("target", DEVICES)
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_delta_rule_candidates_fit_a_state_and_a_chunk_in_shared_memory(target, dtype):
    record, memory = delta_record("heads", dtype), chips.gpu_named(target).shared_memory
    size, parts = dtype.dtype.itemsize, 2 if dtype == jnp.float32 and target != "gfx942" else 1
    for choice in delta_config.candidates(record, DEVICES[target], "forward"):
        columns = max(choice.state_block_v, choice.dh_block_v)
        assert 256 * (parts * columns + choice.chunk) * size <= memory, choice


@pytest.mark.parametrize("out_dtype", [jnp.bfloat16, jnp.float32])
def test_flattened_loops_fit_operands_and_output_in_shared_memory(out_dtype):
    """Of a float32 output three stages asked for 278,528 bytes of 232,448; of bfloat16 they fit."""
    record = GroupedMatmul(
        lhs=SHAPE((32768, 2048), jnp.bfloat16),
        rhs=SHAPE((64, 2048, 1408), jnp.bfloat16),
        group_sizes=SHAPE((64,), jnp.int32),
        out_dtype=jnp.dtype(out_dtype),
        left_over="zero",
    )
    flat = [x for x in grouped.candidates(record, H200, "forward") if x.flatten]
    assert bool(flat) == (out_dtype == jnp.bfloat16)
    for x in flat:
        copied = x.num_stages * (x.block_m + x.block_n) * x.block_k * 2
        assert copied + x.block_m * x.block_n * record.out_dtype.itemsize <= gpu_of(H200).shared_memory


def selected_record(heads, size, dtype):
    """Selected attention with a number of query heads per KV head."""
    rows, group = (1, 2048, 2 * heads), (1, 2048, 2)
    return SelectedAttention(
        query=SHAPE((*rows, size), dtype),
        key=SHAPE((*group, size), dtype),
        value=SHAPE((*group, size), dtype),
        block_indices=SHAPE((*group, 16), jnp.int32),
        softmax_scale=0.1,
        block_size=64,
    )


@pytest.mark.parametrize("target", DEVICES)
def test_selected_attention_fits_or_is_refused(target):
    """With 64 heads of 256 per KV head, float32 asked for 327,680 bytes on an H200, bfloat16 for 139,264 of 101,376."""
    device, chip = DEVICES[target], chips.gpu_named(target)
    for heads, size, dtype in itertools.product((1, 4, 16, 48, 64), (64, 128, 256), (jnp.float32, jnp.bfloat16)):
        record = selected_record(heads, size, dtype)
        if selected_config.shared_memory_refusal(record, device):
            assert dtype == jnp.float32
            assert heads >= 48
            continue
        for direction in ("forward", "backward"):
            for choice in selected_config.candidates(record, device, direction):
                assert of_selected(record, choice, chip) <= chip.shared_memory, (heads, size, dtype, choice)


def test_many_heads_in_float32_are_refused_with_the_sizes():
    with target_device(H200):
        (reason,) = selected_attention._refusal_reasons(selected_record(64, 256, jnp.float32))
    assert reason.startswith("64 query heads a KV head take up to")
    assert reason.endswith("bytes of shared memory, and sm_90 has 232448")


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_candidates_with_a_bias_have_shared_memory_for_its_tiles(dtype):
    """Tiles of 128 by 128 with three stages asked for 360,448 bytes of an H200's 232,448."""
    array, length = SHAPE((2, 2048, 4, 128), jnp.bfloat16), 2048
    record = TiledAttention(
        query=array, key=array, value=array, softmax_scale=0.1, bias=SHAPE((1, 4, length, length), dtype)
    )
    sizes = {(x.block_q, x.block_kv) for x in tiled_config.candidates(record, H200, "forward")}
    assert (64, 64) in sizes
    assert (128, 128) not in sizes
    assert (128, 128) in {
        (x.block_q, x.block_kv)
        for x in tiled_config.candidates(dataclasses.replace(record, bias=None), H200, "forward")
    }
