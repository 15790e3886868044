"""Kernels of the quantised matmul, compiled for chips that are not here."""

import jax
import jax.numpy as jnp
import pytest

from ejkernel.families.quantized_matmul import QuantizedMatmul
from ejkernel.ops.device import DeviceInfo, target_device
from ejkernel.planning.quantized_formats import make_format
from ejkernel_triton import ahead, chips, launch
from ejkernel_triton.quantized_matmul import config, passes

pytest.importorskip("triton")

CHIPS = {
    "sm_80": DeviceInfo(platform="gpu", vendor="nvidia", kind="NVIDIA A100", compute_capability=8.0),
    "sm_90": DeviceInfo(platform="gpu", vendor="nvidia", kind="NVIDIA H200", compute_capability=9.0),
    "gfx942": DeviceInfo(platform="gpu", vendor="amd", kind="AMD Instinct MI300X"),
}


@pytest.mark.parametrize("transpose", [False, True])
@pytest.mark.parametrize("chip", CHIPS)
def test_decoding_fits_the_chip_and_spills_nothing(chip, transpose):
    device, form, shape = CHIPS[chip], make_format("affine", 4, 64), jax.ShapeDtypeStruct
    rows, columns = (14336, 4096) if transpose else (4096, 14336)
    record = QuantizedMatmul(
        x=shape((16, 4096), jnp.bfloat16),
        packed=shape((rows, columns // 8), jnp.uint32),
        scales=shape((rows, columns // 64), jnp.float16),
        zeros=shape((rows, columns // 64), jnp.float16),
        format=form,
        transpose=transpose,
    )
    tiles = config.heuristic(record, device, "forward")
    with target_device(device), launch.collected() as calls:
        jax.eval_shape(lambda record: passes.forward(record, tiles), record)
    (call,) = calls
    took = ahead.compile_for(call, chip)
    assert took.spilled == 0, (took.registers, took.spilled)
    assert took.shared <= chips.CHIPS[chip].shared_memory
