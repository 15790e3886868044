"""A call that names its platform is refused by the kernels of every other."""

import jax
import jax.numpy as jnp
import pytest

from ejkernel import explain
from ejkernel.modules import flash_attention
from ejkernel.ops.device import target_device


@pytest.mark.parametrize("platform", ["xla", "triton", "pallas", "cuda"])
def test_kernels_of_other_platforms_are_refused_for_the_explicit_platform(platform):
    x = jax.ShapeDtypeStruct((1, 128, 4, 64), jnp.bfloat16)
    with target_device("h200"):
        choice = explain(flash_attention, x, x, x, platform=platform).forward
    said = {
        verdict.implementation: f"platform={platform!r} was asked for" in verdict.reasons for verdict in choice.verdicts
    }
    assert said == {implementation: implementation.platform != platform for implementation in said}
    assert len({implementation.platform for implementation in said}) > 2
