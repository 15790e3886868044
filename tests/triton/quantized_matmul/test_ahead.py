"""Kernels of the quantised matmul, compiled for chips that are not here."""

import jax
import jax.numpy as jnp
import pytest
from triton_chips import CHIPS, assert_fits_and_spills_nothing

from ejkernel.families.quantized_matmul import QuantizedMatmul
from ejkernel.ops.device import target_device
from ejkernel.planning.quantized_formats import make_format
from ejkernel_triton import launch
from ejkernel_triton.quantized_matmul import config
from ejkernel_triton.quantized_matmul.forward import forward


@pytest.mark.parametrize(
    ("chip", "transpose", "mode"),
    [
        *((chip, transpose, "affine") for chip in ("sm_80", "sm_90", "gfx942") for transpose in (False, True)),
        ("sm_90", True, "symmetric"),
        ("sm_90", True, "fp8"),
    ],
)
def test_decoding_fits_the_chip_and_spills_nothing(chip, transpose, mode):
    device, form, shape = CHIPS[chip], make_format(mode, None, 64), jax.ShapeDtypeStruct
    rows, columns = (14336, 4096) if transpose else (4096, 14336)
    record = QuantizedMatmul(
        x=shape((16, 4096), jnp.bfloat16),
        packed=shape((rows, form.words_per_row(columns)), jnp.uint32),
        scales=shape((rows, columns // 64), form.scale_dtype),
        zeros=shape((rows, columns // 64), jnp.float16) if mode == "affine" else None,
        format=form,
        transpose=transpose,
    )
    tiles = config.heuristic(record, device, "forward")
    with target_device(device), launch.collect_launches() as calls:
        jax.eval_shape(lambda record: forward(record, tiles), record)
    assert len(calls) == 1
    assert_fits_and_spills_nothing(calls, chip)
