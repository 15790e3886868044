"""Kernels of the quantised matmul, compiled for chips that are not here."""

import jax
import jax.numpy as jnp
import pytest
from triton_chips import CHIPS, assert_fits_and_spills_nothing

from ejkernel.families.quantized_matmul import QuantizedMatmul
from ejkernel.ops.device import target_device
from ejkernel.planning.quantized_formats import make_format
from ejkernel_triton import launch
from ejkernel_triton.quantized_matmul import config, ordered
from ejkernel_triton.quantized_matmul.forward import forward
from ejkernel_triton.quantized_matmul.ordered.forward import forward as ordered_forward


@pytest.mark.parametrize(
    ("chip", "transpose", "mode"),
    [
        *((chip, transpose, "affine") for chip in ("sm_80", "sm_90", "gfx942") for transpose in (False, True)),
        ("sm_90", True, "symmetric"),
        ("sm_90", True, "fp8"),
    ],
)
def test_decoding_fits_the_chip_and_spills_nothing(chip, transpose, mode):
    record = record_of(16, transpose, mode)
    calls = launches_of(forward, config.heuristic(record, CHIPS[chip], "forward"), record, chip)
    assert len(calls) == 1
    assert_fits_and_spills_nothing(calls, chip)


@pytest.mark.parametrize(
    ("chip", "rows", "transpose", "mode", "dtype", "kernels"),
    [
        *(("sm_90", rows, transpose, "affine", jnp.bfloat16, 1) for rows in (1, 32, 64) for transpose in (False, True)),
        ("sm_90", 64, False, "fp8", jnp.bfloat16, 1),
        ("sm_90", 16, True, "nf4", jnp.float16, 1),
        *(("sm_90", 65, transpose, "affine", jnp.bfloat16, 2) for transpose in (False, True)),
        ("sm_90", 4096, True, "nf4", jnp.float16, 2),
        *(("sm_90", 4096, transpose, "affine", jnp.float32, 1) for transpose in (False, True)),
        ("sm_80", 4096, False, "affine", jnp.bfloat16, 1),
        ("gfx942", 16, True, "affine", jnp.bfloat16, 1),
    ],
)
def test_kernels_that_add_in_the_matrix_order_spill_nothing(chip, rows, transpose, mode, dtype, kernels):
    record = record_of(rows, transpose, mode, dtype)
    tiles = ordered.config.batch_invariant(record, CHIPS[chip], "forward")
    calls = launches_of(ordered_forward, tiles, record, chip)
    assert len(calls) == kernels
    assert_fits_and_spills_nothing(calls, chip)


def record_of(m, transpose, mode, dtype=jnp.bfloat16):
    """The record of a layer of 4096 x 14336."""
    form, shape = make_format(mode, None, 64), jax.ShapeDtypeStruct
    rows, columns = (14336, 4096) if transpose else (4096, 14336)
    return QuantizedMatmul(
        x=shape((m, 4096), dtype),
        packed=shape((rows, form.words_per_row(columns)), jnp.uint32),
        scales=shape((rows, columns // 64), form.scale_dtype),
        zeros=shape((rows, columns // 64), jnp.float16) if mode == "affine" else None,
        format=form,
        transpose=transpose,
    )


def launches_of(function, tiles, record, chip):
    """The kernels that a call launches on a chip."""
    with target_device(CHIPS[chip]), launch.collect_launches() as calls:
        jax.eval_shape(lambda record: function(record, tiles), record)
    return calls
