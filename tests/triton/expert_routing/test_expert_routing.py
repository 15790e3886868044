"""Expert routing in Triton: its numbers in the interpreter, and what its kernels take of a chip."""

import jax
import jax.numpy as jnp
import pytest
from triton_chips import CHIPS, H200, assert_conforms, assert_fits_and_spills_nothing

from ejkernel.families.expert_routing import ExpertRouting
from ejkernel.ops import dispatch
from ejkernel.ops.device import target_device
from ejkernel.ops.plugins import registry
from ejkernel_triton import launch
from ejkernel_triton.expert_routing import config
from ejkernel_triton.expert_routing.forward import forward

TESTS = "(test_value and not eager) or test_vmap"


def test_conformance():
    assert_conforms(["expert_routing"], TESTS)


def record_of(experts):
    """8192 tokens with 8 experts each."""
    return ExpertRouting(logits=jax.ShapeDtypeStruct((8192, experts), jnp.bfloat16), top_k=8)


@pytest.mark.parametrize(("chip", "experts"), [("sm_80", 128), ("sm_90", 128), ("gfx942", 128), ("sm_90", 384)])
def test_kernels_fit_the_chip_and_spill_nothing(chip, experts):
    device, record = CHIPS[chip], record_of(experts)
    tiles = config.heuristic(record, device, "forward")
    with target_device(device), launch.collect_launches() as calls:
        jax.eval_shape(lambda record: forward(record, tiles)[0], record)
    assert [call.kernel.__name__ for call in calls] == ["topk_kernel", "expert_offsets_kernel", "sorted_rows_kernel"]
    assert_fits_and_spills_nothing(calls, chip)


def test_priority_is_above_xla():
    op = registry().ops["expert_routing"]
    found = dispatch.choose(op, record_of(128), H200, "auto", "forward")
    names = [verdict.implementation.name for verdict in found.verdicts]
    assert names.index("triton") < names.index("xla")
