"""Selected attention in Triton: its numbers in the interpreter, its lists, and what its kernels take of a chip."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from triton_chips import CHIPS, assert_conforms, assert_fits_and_spills_nothing, run_interpreted

from ejkernel.families import tiled_attention
from ejkernel.families.selected_attention import BranchResiduals, SelectedAttention
from ejkernel.families.tiled_attention import TiledAttention
from ejkernel.ops.device import target_device
from ejkernel.ops.nested import dispatched_backward
from ejkernel.types.pullback import Pullback
from ejkernel_triton import ahead, launch
from ejkernel_triton.selected_attention import config, plan
from ejkernel_triton.selected_attention.backward import selected_gradients
from ejkernel_triton.selected_attention.forward import attend_to_selected_blocks, select_blocks

VALUES = "test_value and not shapes and not residuals and not eager"
GRADIENTS = "test_gradients and not determinism"
PAGED = "native_sparse_attention and pages"  # the kernels read keys in rows
VMAP = "test_vmap and packed and not shared"

KERNELS = {
    "selected_fwd_kernel",
    "selected_bwd_dq_kernel",
    "selected_bwd_dkdv_kernel",
    "split_combine_kernel",
    "block_topk_kernel",
}
# In addition to heads of 128 in bfloat16, on each chip.
DEMANDING = [("sm_90", 192, 128, jnp.bfloat16), ("sm_80", 128, 128, jnp.float32), ("sm_90", 64, 64, jnp.float32)]


def test_conformance():
    tests = f"(({VALUES}) or ({GRADIENTS}) or ({VMAP}) or (test_request and packed)) and not ({PAGED})"
    assert_conforms(("native_sparse_attention",), tests)


def test_awkward_sizes_in_the_interpreter():
    assert run_interpreted("selected_attention/selected_process.py").count("same") == 2


def record(indices, **fields):
    """A record whose arrays but for the indices have shapes alone."""
    batch, tokens, heads, _ = indices.shape
    array = jax.ShapeDtypeStruct((batch, tokens, heads, 16), jnp.float32)
    rest = {"query": array, "key": array, "value": array, "softmax_scale": 0.1, "block_size": 8}
    return SelectedAttention(**{**rest, "block_indices": jnp.asarray(indices, jnp.int32), **fields})


@pytest.mark.parametrize("flat", [True, False], ids=["flat sort", "sort by row"])
def test_splits_of_lists_have_every_query_of_a_block_once_and_in_order(flat, monkeypatch):
    if not flat:  # as where one number cannot hold row, block and query
        monkeypatch.setattr(plan, "UINT32_RANGE", 0)
    rng, length = np.random.default_rng(0), 4
    indices = rng.permuted(np.tile(np.arange(-2, 5), (2, 40, 3, 1)), axis=3)[..., :3].clip(-1)
    indices[0, :, 0] = np.where(indices[0, :, 0] == 0, -1, indices[0, :, 0])
    indices[0, :, 0, 0] = 0  # a list with every query
    found = jax.tree.map(np.asarray, plan.invert_block_lists(record(indices), length))
    assert found.list_splits.shape[2] == 5 + 40 * 3 // length
    for b, h in np.ndindex(2, 3):
        read = {block: [] for block in range(5)}
        slots = {block: [] for block in range(5)}
        for block, begin, end, slot in found.list_splits[b, h]:
            if block >= 0:
                assert end - begin <= length
                read[block] += list(found.tokens[b, h, begin:end])
                slots[block] += [slot]
        for block, tokens in read.items():
            assert tokens == sorted(np.nonzero((indices[b, :, h] == block).any(axis=-1))[0])
            first, count = found.sum_slots[b, h, block]
            several = len(slots[block]) > 1
            assert slots[block] == (list(range(first, first + count)) if several else [-1])
        used = [slot for numbers in slots.values() for slot in numbers if slot >= 0]
        assert len(set(used)) == len(used)
        assert max(used, default=0) < found.num_sum_slots


def test_padding_queries_are_in_no_list():
    ids = jnp.where(jnp.arange(40) < 13, 0, -1)[None]
    indices = np.zeros((1, 40, 1, 1), np.int32)
    found = plan.invert_block_lists(record(indices, q_segment_ids=ids, kv_segment_ids=ids), 64)
    assert list(found.list_splits[0, 0, 0]) == [0, 0, 13, -1]


def test_a_block_ends_where_the_next_begins():
    starts = jnp.array([0, 8, 11, 19, 37, 37], jnp.int32)  # the last two are not there
    ends = plan.block_ends(record(np.zeros((1, 40, 1, 1)), block_starts=starts))
    assert list(ends[0]) == [8, 11, 19, 27, 37, 40]


def test_gradients_of_the_compressed_branch_are_the_sum_over_query_splits(monkeypatch):
    keys = jax.random.split(jax.random.key(0), 5)
    q, do = (jax.random.normal(k, (2, 37, 4, 16)) for k in keys[:2])
    k, v = (jax.random.normal(k, (2, 6, 2, 16)) for k in keys[2:4])
    ids = jnp.where(jnp.arange(37) < jnp.array([[37], [20]]), 0, -1)
    given = {
        "q_segment_ids": ids,
        "kv_segment_ids": ids[:, ::7],
        "q_positions": jnp.arange(37, dtype=jnp.int32)[None],
        "kv_positions": jnp.arange(6, 43, 7, dtype=jnp.int32)[None],
    }
    dense = TiledAttention(query=q, key=k, value=v, softmax_scale=0.3, causal=True, **given)
    output, residuals = tiled_attention.reference(dense)
    wanted = frozenset({"query", "key", "value"})
    pullback = Pullback(record=dense, residuals=residuals, output=output, cotangent=do, grad_fields=wanted)
    whole = dispatched_backward("flash_attention", pullback)
    monkeypatch.setattr(plan, "query_splits", lambda record: 3)
    split = plan.backward_with_query_splits(pullback)
    assert split.keys() == whole.keys()
    for name, gradient in split.items():
        np.testing.assert_allclose(gradient, whole[name], atol=2e-5, err_msg=name)


def launches(chip, size, value_size, dtype):
    """What a call with all branches launches on a chip for its selected branch, in both passes."""
    device, shape, tokens = CHIPS[chip], jax.ShapeDtypeStruct, 2048
    rows, group = (1, tokens, 32), (1, tokens, 2)
    given = SelectedAttention(
        query=shape((*rows, size), dtype),
        key=shape((*group, size), dtype),
        value=shape((*group, value_size), dtype),
        block_indices=None,
        softmax_scale=0.1,
        block_size=64,
        selected_blocks=16,
        compressed_key=shape((1, tokens // 64, 2, size), dtype),
        compressed_value=shape((1, tokens // 64, 2, value_size), dtype),
    )
    branch = BranchResiduals(output=shape((*rows, value_size), dtype), lse=shape((1, 32, tokens), jnp.float32))

    def run(given, branch):
        listed = dataclasses.replace(given, block_indices=select_blocks(given, branch))
        made = attend_to_selected_blocks(listed, config.heuristic(given, device, "forward"))
        shared = frozenset({"query", "key", "value"})
        part = config.heuristic(given, device, "backward")
        return selected_gradients(listed, made, made.output, shared, part)

    with target_device(device), launch.collect_launches() as calls:
        jax.eval_shape(run, given, branch)
    return calls


@pytest.mark.parametrize(
    ("chip", "size", "value_size", "dtype"), [*((chip, 128, 128, jnp.bfloat16) for chip in CHIPS), *DEMANDING]
)
def test_default_tiles_fit_the_chip_and_spill_nothing(chip, size, value_size, dtype):
    calls = launches(chip, size, value_size, dtype)
    assert {call.kernel.__name__ for call in calls} == KERNELS
    assert_fits_and_spills_nothing(calls, chip)


def test_hopper_kernels_use_wgmma_where_queries_are_many():
    (call,) = (x for x in launches("sm_90", 128, 128, jnp.bfloat16) if x.kernel.__name__ == "selected_bwd_dkdv_kernel")
    assert "wgmma" in ahead.compile_for_chip(call, "sm_90").assembly
