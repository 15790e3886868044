"""The cross-entropy in Triton: its numbers in the interpreter, and what its kernels take of a chip."""

import dataclasses

import jax
import jax.numpy as jnp
import pytest
from triton_chips import CHIPS, H200, assert_conforms, assert_fits_and_spills_nothing, run_interpreted

from ejkernel.families.cross_entropy import CrossEntropy
from ejkernel.ops import dispatch
from ejkernel.ops.device import target_device
from ejkernel.ops.plugins import registry
from ejkernel.types.pullback import Pullback, run_both_passes
from ejkernel_triton import ahead, launch
from ejkernel_triton.cross_entropy import config, extra_reasons
from ejkernel_triton.cross_entropy.backward import backward
from ejkernel_triton.cross_entropy.forward import forward
from ejkernel_triton.cross_entropy.ordered.forward import forward as ordered_forward

TESTS = "(test_value and not eager) or test_gradients or test_gives_gradient or test_vmap"


def test_conformance():
    assert_conforms(["fused_cross_entropy"], TESTS)


def test_ordered_logits_are_invariant_to_the_batch_and_match_the_reference():
    assert_conforms(
        ["fused_cross_entropy"], "test_batch_invariance or (test_value and head and not eager)", "triton_ordered"
    )


def test_vocabularies_over_devices_impossible_entries_and_overlapping_blocks():
    """Of the divergence, too."""
    flags = "--xla_force_host_platform_device_count=4"
    assert run_interpreted("cross_entropy/losses_process.py", XLA_FLAGS=flags) == "right\n"


def record_of(tokens, entries, channels=None, dtype=jnp.bfloat16, **options):
    shape = jax.ShapeDtypeStruct
    return CrossEntropy(
        inputs=shape((tokens, entries if channels is None else channels), dtype),
        targets=shape((tokens,), jnp.int32),
        weights=shape((tokens,), jnp.float32),
        lm_head=None if channels is None else shape((channels, entries), dtype),
        sum_over_tokens=True,
        **options,
    )


def both_passes(tiles, fields=("inputs",)):
    """A function of a record that runs both passes."""

    def run(record):
        numbers = jnp.zeros(record.weights.shape[0])
        cotangent = (jnp.ones(1), numbers, numbers, numbers)
        start = Pullback(record=record, residuals=None, output=None, cotangent=cotangent, grad_fields=frozenset(fields))
        return run_both_passes(forward, backward, start, tiles)

    return run


@pytest.mark.parametrize("tokens", [1, 4096])
def test_ordered_logits_are_products_of_the_grouped_matmul_whatever_the_tokens(tokens):
    record = dataclasses.replace(record_of(tokens, 32768, 256), sum_over_tokens=False)
    tiles = config.heuristic(record, H200, "forward")
    with target_device(H200), launch.collect_launches() as calls:
        jax.eval_shape(lambda record: ordered_forward(record, tiles), record)
    assert [call.kernel.__name__ for call in calls] == ["grouped_gemm_kernel", "cross_entropy_fwd_kernel"]
    assert_fits_and_spills_nothing(calls, "sm_90")


def launches_of(record, device):
    tiles = config.heuristic(record, device, "forward")
    with target_device(device), launch.collect_launches() as calls:
        jax.eval_shape(both_passes(tiles), record)
    return calls


TERMS = {
    "logits_soft_cap": 30.0,
    "label_smoothing": 0.1,
    "lm_head_bias": jax.ShapeDtypeStruct((50257,), jnp.float32),
    "soft_targets": jax.ShapeDtypeStruct((2048, 50257), jnp.float32),
}
"""All terms together, for a vocabulary whose rows are not aligned."""


@pytest.mark.parametrize(("chip", "channels"), [*((chip, 4096) for chip in CHIPS), ("sm_90", None)])
def test_kernels_fit_the_chip_and_spill_nothing(chip, channels):
    calls = launches_of(record_of(8192, 128256, channels), CHIPS[chip])
    names = [call.kernel.__name__ for call in calls]
    of_logits = ["cross_entropy_fwd_kernel", "cross_entropy_bwd_kernel"]
    assert names == (of_logits if channels is None else ["cross_entropy_fwd_bwd_kernel"])
    # The gradient has the memory of the logits.
    assert calls[-1].aliases == {2 if channels is None else 3: 0}
    assert_fits_and_spills_nothing(calls, chip)
    if chip.startswith("sm_"):
        assert all("global.v4" in ahead.compile_for_chip(call, chip).assembly for call in calls)


def test_kernels_of_all_terms_fit_the_chip_and_spill_nothing():
    calls = launches_of(record_of(2048, 50257, 512, jnp.float32, **TERMS), H200)
    assert_fits_and_spills_nothing(calls, "sm_90")


def test_blocks_of_tokens_are_equal_shares():
    tiles = config.heuristic(record_of(32768, 128256, 4096), H200, "forward")
    assert tiles.block_t * 128256 * 2 <= config.BLOCK_LOGITS_BYTES
    assert 32768 % tiles.block_t == 0
    assert config.heuristic(record_of(5000, 128256, 4096), H200, "forward").block_t == 2560
    assert config.heuristic(record_of(100, 128256, 4096), H200, "forward").block_t == 100


def test_sums_of_64_bits_are_refused():
    with jax.enable_x64(True):
        record = record_of(8, 16, 4, lm_head_bias=jax.ShapeDtypeStruct((16,), jnp.float64))
        assert list(extra_reasons(record)) == ["lm_head_bias of float64, and sums are float32"]
    assert not list(extra_reasons(record_of(2048, 50257, 4, **TERMS)))


def test_a_block_has_tokens():
    with pytest.raises(ValueError, match="block_t: got 0"):
        config.LossTiles(block_t=0, block_v=32, num_warps=1)


@pytest.mark.parametrize("direction", ["forward", "backward"])
def test_priority_is_above_xla(direction):
    op = registry().ops["fused_cross_entropy"]
    found = dispatch.choose(op, record_of(64, 1000, 128), H200, "auto", direction)
    names = [verdict.implementation.name for verdict in found.verdicts]
    assert names.index("triton") < names.index("xla")
