"""Dense attention in a `batch_invariant` block: what the bits of a row could depend on, and which kernel serves it."""

import dataclasses

import jax
import jax.numpy as jnp
import pytest

from ejkernel.families.tiled_attention import TiledAttention
from ejkernel.ops import dispatch
from ejkernel.ops.config.selection import Request
from ejkernel.ops.device import DeviceInfo
from ejkernel.ops.plugins import registry
from ejkernel.types.sparse_masks import LocalMask
from ejkernel_pallas.gpu.hopper.split_tiles import NO_SPLIT
from ejkernel_pallas.gpu.tiled_attention import batch_invariant, config, forward, implementations
from ejkernel_pallas.gpu.tiled_attention.spec import make_spec

H200 = DeviceInfo(platform="gpu", vendor="nvidia", kind="NVIDIA H200", compute_capability=9.0)
IMPLEMENTATION, FUNCTIONS = implementations()
POSITIONS = jax.ShapeDtypeStruct((1, 256), jnp.int32)


def make(batch=5, queries=1100, keys=6016, size=128, heads=4, dtype=jnp.bfloat16, **fields):
    query, key = (jax.ShapeDtypeStruct((batch, n, heads, size), dtype) for n in (queries, keys))
    return TiledAttention(query=query, key=key, value=key, softmax_scale=0.1, **fields)


def schedules(record, monkeypatch, in_block):
    """The schedules of a call's kernels."""
    found, launch = [], forward.launch_forward_kernel

    def launched(spec, tile, schedule, *arguments):
        found.append(schedule)
        return launch(spec, tile, schedule, *arguments)

    monkeypatch.setattr(forward, "launch_forward_kernel", launched)
    params = dataclasses.replace(config.heuristic(record, H200, "forward"), batch_invariant=in_block)
    text = jax.jit(lambda x: forward.forward(x, params)).trace(record).lower(lowering_platforms=("cuda",)).as_text()
    assert text.count("custom_call @mosaic_gpu") == 1
    return found


def test_keys_of_the_last_tiles_are_split_outside_of_the_block_only(monkeypatch):
    """The number of splits follows from the number of tiles, and so from the batch."""
    with monkeypatch.context() as patch:
        many, few = (schedules(make(batch), patch, False)[0].tail_split for batch in (5, 1))
    assert many != few
    assert NO_SPLIT not in (many, few)
    for batch in (5, 1):
        with monkeypatch.context() as patch:
            assert schedules(make(batch), patch, True)[0].tail_split == NO_SPLIT


@pytest.mark.parametrize("size", [64, 128, 192, 256])
def test_a_soft_cap_is_not_fused_in_the_block(size):
    """Fused, the bits of a weight depend on the scores of the other rows of a warp."""
    spec = make_spec(make(size=size, logits_soft_cap=30.0))
    assert spec.fuses_soft_cap == (size <= 128)
    assert not dataclasses.replace(spec, is_batch_invariant=True).fuses_soft_cap


@pytest.mark.parametrize("soft_cap", [None, 30.0])
@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16])
@pytest.mark.parametrize("size", [64, 128, 192, 256])
def test_no_length_and_no_position_changes_the_configuration_in_the_block(size, dtype, soft_cap):
    calls = ({"causal": True}, {"batch": 1, "queries": 1, "keys": 70}, {"queries": 300, "q_positions": POSITIONS})
    records = [make(size=size, dtype=dtype, logits_soft_cap=soft_cap, **fields) for fields in calls]
    parts = {batch_invariant(record, H200, "forward") for record in records}
    assert len(parts) == 1
    assert parts.pop().batch_invariant
    request = Request(
        op=registry().op("flash_attention"),
        implementation=IMPLEMENTATION,
        direction="forward",
        device=H200,
        record=records[0],
        batch_invariant=True,
    )
    wish = config.HopperForward(block_q=64, block_kv=192, stages=2)
    rule = request.heuristic()
    assert request.complete_with_heuristic(wish) == dataclasses.replace(
        wish, block_kv=rule.block_kv, batch_invariant=True
    )


def test_prompts_chunks_and_decoding_have_one_kernel_in_the_block():
    """Outside of it, calls with positions go to Triton's kernel."""
    op, prompt = registry().op("flash_attention"), make(2, 256, 256, causal=True)
    chunk = dataclasses.replace(prompt, q_positions=POSITIONS, kv_positions=POSITIONS)
    decoding = make(2, 1, 256)
    for record in (prompt, chunk, decoding):
        choice = dispatch.choose(op, record, H200, "auto", "forward", batch_invariant=True)
        verdict = next(x for x in choice.verdicts if x.implementation.name == "mosaic_gpu")
        assert not [x for x in verdict.reasons if "batch_invariant" in x]
    priorities = [IMPLEMENTATION.priority_for(record, H200, "forward") for record in (prompt, chunk, decoding)]
    assert priorities == [20, -1, 20]
    assert IMPLEMENTATION.invariant_priority == 20


def test_packed_rows_are_served_in_the_block():
    op, record = registry().op("flash_attention"), make(1, 256, 256, q_segment_ids=POSITIONS, kv_segment_ids=POSITIONS)
    choice = dispatch.choose(op, record, H200, "auto", "forward", batch_invariant=True)
    verdict = next(x for x in choice.verdicts if x.implementation.name == "mosaic_gpu")
    assert not [x for x in verdict.reasons if "batch_invariant" in x]
    spec = dataclasses.replace(make_spec(record), is_batch_invariant=True)
    assert spec.lists_first_keys
    assert not dataclasses.replace(spec, is_batch_invariant=False).lists_first_keys


@pytest.mark.parametrize(
    ("fields", "word"),
    [
        ({"dropout_prob": 0.1, "dropout_seed": jax.ShapeDtypeStruct((), jnp.uint32)}, "dropout_prob"),
        ({"pattern": LocalMask((256, 256), window_size=(40, 0))}, "pattern"),
    ],
)
def test_what_depends_on_the_rest_of_a_call_is_refused_in_the_block(fields, word):
    op, record = registry().op("flash_attention"), make(1, 256, 256, causal=True, **fields)
    choice = dispatch.choose(op, record, H200, "auto", "forward", batch_invariant=True)
    verdict = next(x for x in choice.verdicts if x.implementation.name == "mosaic_gpu")
    assert any("batch_invariant" in reason and word in reason for reason in verdict.reasons)


def test_functions_of_pairs_claim_no_invariance():
    assert not FUNCTIONS.invariant_to
    assert FUNCTIONS.config.batch_invariant is None
