"""The selective scan in Triton: its numbers in the interpreter, and what its kernels take of a chip."""

import jax
import jax.numpy as jnp
import pytest
from triton_chips import CHIPS, assert_conforms, assert_fits_and_spills_nothing, run_interpreted

from ejkernel.families.selective_scan import SelectiveScan
from ejkernel.ops.device import target_device
from ejkernel.types.pullback import Pullback
from ejkernel_triton import ahead, launch
from ejkernel_triton.selective_scan import config
from ejkernel_triton.selective_scan.backward import backward
from ejkernel_triton.selective_scan.forward import forward

# Sequences of several intervals are walked in two parts.
VALUES = "test_value and (three or one) and not shapes and not eager"
GRADIENTS = "test_gradients and (three or token or gate) and not after"


def test_conformance():
    assert_conforms(("state_space_v1",), f"({VALUES}) or ({GRADIENTS}) or (test_request and packed)")


def scan_record(rows=8, size=16, dtype=jnp.bfloat16, tokens=4096):
    """The shapes of a scan."""
    shape, channels = jax.ShapeDtypeStruct, 4096
    return SelectiveScan(
        x=shape((rows, tokens, channels), dtype),
        step=shape((rows, tokens, channels), dtype),
        decay=shape((channels, size), jnp.float32),
        write=shape((rows, tokens, size), dtype),
        read=shape((rows, tokens, size), dtype),
        skip=shape((channels,), jnp.float32),
    )


def launches(device, rows=8, size=16, dtype=jnp.bfloat16, tiles=None):
    """What a scan and its gradients launch on a device; `tiles` are those of the backward scan."""
    record = scan_record(rows, size, dtype)
    wanted = frozenset({"x", "step", "decay", "write", "read", "skip"})

    def run(record):
        output, residuals = forward(record, config.heuristic(record, device, "forward"))
        saved = Pullback(record=record, residuals=residuals, output=output, cotangent=output, grad_fields=wanted)
        return backward(saved, tiles or config.heuristic(record, device, "backward"))

    with target_device(device), launch.collect_launches() as calls:
        jax.eval_shape(run, record)
    return calls


@pytest.mark.parametrize(
    ("chip", "size", "dtype"),
    [*((chip, 16, jnp.bfloat16) for chip in CHIPS), ("sm_90", 16, jnp.float32), ("sm_90", 32, jnp.bfloat16)],
)
def test_kernels_fit_the_chip_and_spill_nothing(chip, size, dtype):
    calls = launches(CHIPS[chip], 8, size, dtype)
    assert {call.kernel.__name__ for call in calls} >= {"selective_scan_fwd_kernel", "selective_scan_bwd_kernel"}
    assert_fits_and_spills_nothing(calls, chip)


def test_a_thread_has_all_state_elements_of_its_channels():
    """No program of 16 numbers needs shared memory, which is where layouts that do not fit would be exchanged."""
    assert [ahead.compile_for_chip(call, "sm_90").shared_memory_bytes for call in launches(CHIPS["sm_90"], rows=1)] == [
        0
    ] * 4


def test_few_channels_are_scanned_in_segments():
    kernels = [call.kernel.__name__ for call in launches(CHIPS["sm_90"], rows=1)]
    assert kernels == [
        "segment_end_states_kernel",
        "selective_scan_fwd_kernel",
        "segment_end_states_kernel",
        "selective_scan_bwd_kernel",
    ]


def ahead_candidates(size):
    """Forward candidates that load columns ahead."""
    found = config.candidates(scan_record(size=size), CHIPS["sm_90"], "forward")
    return [tiles for tiles in found if tiles.bc_prefetch_distance and tiles.splits == 1]


def test_candidates_that_prefetch_spill_nothing_with_16_state_elements():
    tried = ahead_candidates(16)
    assert len(tried) == 5
    for tiles in tried:
        with target_device(CHIPS["sm_90"]), launch.collect_launches() as calls:
            jax.eval_shape(lambda record, tiles=tiles: forward(record, tiles)[0], scan_record())
        assert_fits_and_spills_nothing(calls, "sm_90")
        assert ahead.compile_for_chip(calls[0], "sm_90").shared_memory_bytes == 0
    found = config.candidates(scan_record(), CHIPS["sm_90"], "backward")
    for tiles in (x for x in found if x.prefetch_states or x.prefetch_recomputed_b):
        assert_fits_and_spills_nothing(launches(CHIPS["sm_90"], tiles=tiles), "sm_90")


def test_partial_blocks_and_small_states_spill_nothing_on_hopper():
    """Masked loads take registers, of which columns loaded ahead leave few."""
    for tokens, size in ((4095, 16), (4092, 13), (4096, 3)):
        record = scan_record(size=size, tokens=tokens)
        with target_device(CHIPS["sm_90"]), launch.collect_launches() as calls:
            tiles = config.heuristic(record, CHIPS["sm_90"], "forward")
            jax.eval_shape(lambda record, tiles=tiles: forward(record, tiles)[0], record)
        assert_fits_and_spills_nothing(calls, "sm_90")


def test_candidates_that_prefetch_match_the_reference():
    said = run_interpreted("selective_scan/prefetch_process.py").splitlines()
    assert sum(line.endswith("right") for line in said) == 8
    assert sum(line.endswith("gradients right") for line in said) == 2
