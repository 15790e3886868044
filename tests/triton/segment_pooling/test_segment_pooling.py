"""Segment pooling in Triton: its numbers in the interpreter, and what its kernels take of a chip."""

import jax
import jax.numpy as jnp
import pytest
from triton_chips import CHIPS, assert_conforms, run_interpreted

from ejkernel.families.segment_pooling import SegmentPooling
from ejkernel.ops import chips, dispatch
from ejkernel.ops.device import target_device
from ejkernel.ops.plugins import registry
from ejkernel.types.pullback import Pullback
from ejkernel_triton import ahead, launch
from ejkernel_triton.segment_pooling import config
from ejkernel_triton.segment_pooling.backward import backward
from ejkernel_triton.segment_pooling.forward import forward

TESTS = "(test_value and not eager) or test_gradients or test_gives_gradient or test_padding or test_candidates"


def test_conformance():
    assert_conforms(["mean_pooling"], f"({TESTS}) or (test_vmap_shared and packed)")


def test_pools_of_every_length_and_position():
    """Empty, of one token, as long as blocks, ending and beginning with them, over several, and gaps between."""
    run_interpreted("segment_pooling/pooling_process.py")


def record_of(kind, dtype=jnp.bfloat16):
    """A pooling of 65536 tokens of 2048 channels."""
    shape = jax.ShapeDtypeStruct
    if kind == "documents":
        values, ranges = shape((1, 65536, 1, 2048), dtype), shape((64, 2), jnp.int32)
        return SegmentPooling(values=values, chunk_size=65536, ranges=ranges)
    values = shape((8, 8192, 16, 128), dtype)
    if kind == "padded rows":
        return SegmentPooling(values=values, chunk_size=8192, lengths=shape((8,), jnp.int32))
    return SegmentPooling(values=values, chunk_size=32)


@pytest.mark.parametrize(
    ("chip", "kind", "dtype"),
    [
        *((chip, "documents", jnp.bfloat16) for chip in CHIPS),
        ("sm_90", "documents", jnp.float32),
        ("sm_90", "padded rows", jnp.bfloat16),
        ("sm_80", "chunks", jnp.bfloat16),
    ],
)
def test_kernels_fit_the_chip_and_spill_nothing(chip, kind, dtype):
    device, record = CHIPS[chip], record_of(kind, dtype)

    def run(record):
        output, residuals = forward(record, config.heuristic(record, device, "forward"))
        wanted = frozenset({"values"})
        saved = Pullback(record=record, residuals=residuals, output=output, cotangent=output, grad_fields=wanted)
        return backward(saved, config.heuristic(record, device, "backward"))

    with target_device(device), launch.collect_launches() as calls:
        jax.eval_shape(run, record)
    # Chunks that lie in one block each need no second kernel.
    combined = [] if kind == "chunks" else ["split_combine_kernel"]
    assert [call.kernel.__name__ for call in calls] == ["pool_fwd_kernel", *combined, "pool_bwd_kernel"]
    for call in calls:
        took = ahead.compile_for_chip(call, chip)
        assert took.spilled_bytes == 0, (took.kernel, took.registers, took.spilled_bytes)
        assert took.shared_memory_bytes <= chips.GPUS[chip].shared_memory
        if chip.startswith("sm_") and took.kernel != "split_combine_kernel":
            assert "global.v4" in took.assembly, took.kernel


def test_priority_is_above_xla():
    op, device = registry().ops["mean_pooling"], CHIPS["sm_90"]
    for direction in ("forward", "backward"):
        found = dispatch.choose(op, record_of("documents"), device, "auto", direction)
        names = [verdict.implementation.name for verdict in found.verdicts]
        assert names.index("triton") < names.index("xla")


def test_candidates_that_prefetch_spill_nothing():
    device, record = CHIPS["sm_90"], record_of("documents")
    for tiles in (x for x in config.candidates(record, device, "forward") if x.prefetch):
        with target_device(device), launch.collect_launches() as calls:
            jax.eval_shape(lambda record, tiles=tiles: forward(record, tiles), record)
        took = ahead.compile_for_chip(calls[0], "sm_90")
        assert took.spilled_bytes == 0, (tiles, took.registers)
