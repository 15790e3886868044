"""The gated grouped matmul in Triton: its numbers in the interpreter, and what its kernel takes of a chip."""

import jax
import jax.numpy as jnp
import pytest
from triton_chips import CHIPS, assert_conforms, assert_fits_and_spills_nothing

from ejkernel.families.gated_grouped_matmul import GatedGroupedMatmul
from ejkernel.ops.device import target_device
from ejkernel_triton import launch
from ejkernel_triton.gated_grouped_matmul import config
from ejkernel_triton.gated_grouped_matmul.forward import forward

TESTS = "test_value and not eager"


def test_conformance():
    assert_conforms(["gated_grouped_matmul"], TESTS, serves_all=False)


@pytest.mark.parametrize(
    ("chip", "rows", "dtype"),
    [
        *((chip, 65536, jnp.bfloat16) for chip in ("sm_80", "sm_90", "gfx942")),
        ("sm_90", 1024, jnp.bfloat16),
        ("sm_90", 65536, jnp.float32),
    ],
)
def test_the_kernel_fits_the_chip_and_spills_nothing(chip, rows, dtype):
    shape, device = jax.ShapeDtypeStruct, CHIPS[chip]
    record = GatedGroupedMatmul(
        lhs=shape((8192, 2048), dtype),
        rhs=shape((128, 2048, 1536), dtype),
        group_sizes=shape((128,), jnp.int32),
        indices=shape((rows,), jnp.int32),
        left_over="zero",
    )
    with target_device(device), launch.collected() as calls:
        tiles = config.heuristic(record, device, "forward")
        jax.eval_shape(lambda record: forward(record, tiles)[0], record)
    assert_fits_and_spills_nothing(calls, chip)
