"""The divergences in Triton: their numbers in the interpreter, and what their kernels take of a chip."""

import jax
import jax.numpy as jnp
import pytest
from triton_chips import CHIPS, assert_conforms, assert_fits_and_spills_nothing, on_chips

from ejkernel.families.kl_divergence import DIRECTIONS, KLDivergence
from ejkernel.ops.device import target_device
from ejkernel.types.pullback import Pullback, run_both_passes
from ejkernel_triton import launch
from ejkernel_triton.kl_divergence import config, extra_reasons
from ejkernel_triton.kl_divergence.backward import backward
from ejkernel_triton.kl_divergence.forward import forward

TESTS = "(test_value and not eager) or test_gradients or test_gives_gradient or test_vmap"


def test_conformance():
    assert_conforms(["fused_kl_divergence"], TESTS)


def record_of(direction, dtype=jnp.bfloat16, teacher_dtype=None):
    shape = jax.ShapeDtypeStruct
    return KLDivergence(
        student=shape((4096, 128256), dtype),
        teacher=shape((4096, 128256), teacher_dtype or dtype),
        token_mask=shape((4096,), jnp.bool_),
        direction=direction,
        temperature=2.0,
        beta=0.5,
        vocab_axis=None,
    )


@pytest.mark.parametrize(("direction", "chip"), on_chips(DIRECTIONS))
def test_kernels_fit_the_chip_and_spill_nothing(direction, chip):
    device, record = CHIPS[chip], record_of(direction)
    tiles = config.heuristic(record, device, "both")

    def run(record):
        numbers = jnp.zeros(record.token_mask.shape)
        fields = frozenset({"student"})
        start = Pullback(record=record, residuals=None, output=None, cotangent=(numbers, numbers), grad_fields=fields)
        return run_both_passes(forward, backward, start, tiles)

    with target_device(device), launch.collect_launches() as calls:
        jax.eval_shape(run, record)
    mixture = ["mixture_divergence_kernel"] if direction == "jsd" else []
    assert [call.kernel.__name__ for call in calls] == ["kl_statistics_kernel", *mixture, "kl_bwd_kernel"]
    assert calls[-1].aliases == {0: 0}
    assert_fits_and_spills_nothing(calls, chip)


def test_a_teacher_of_64_bits_is_refused():
    with jax.enable_x64(True):
        record = record_of("forward", jnp.float32, jnp.float64)
        assert list(extra_reasons(record)) == ["teacher of float64, and sums are float32"]
    assert not list(extra_reasons(record_of("forward", jnp.bfloat16, jnp.float32)))
