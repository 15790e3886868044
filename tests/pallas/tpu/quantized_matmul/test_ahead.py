"""The quantised-matmul kernels compiled for real chips by their own compiler, which needs none of them."""

import jax.numpy as jnp
import pytest
from tpu_chips import compiled, on_chips, shaped

from ejkernel.families.quantized_matmul import QuantizedMatmul
from ejkernel.ops.device import DeviceInfo, target_device
from ejkernel.planning.quantized_formats import make_format
from ejkernel.types.pullback import Pullback
from ejkernel_pallas.tpu.profile import CHIPS as PROFILED
from ejkernel_pallas.tpu.quantized_matmul.backward import backward
from ejkernel_pallas.tpu.quantized_matmul.config import heuristic
from ejkernel_pallas.tpu.quantized_matmul.forward import forward

pytestmark = pytest.mark.needs("libtpu")


def record(m, k, n, mode="affine", bits=None, group_size=64, transpose=False, dtype="bfloat16", stored=None):
    form = make_format(mode, bits, group_size)
    rows, columns = (n, k) if transpose else (k, n)
    scales = shaped((rows, columns // form.group_size), stored or form.scale_dtype)
    return QuantizedMatmul(
        x=shaped((m, k), dtype),
        packed=shaped((rows, form.words_per_row(columns)), "uint32"),
        scales=scales,
        zeros=scales if mode == "affine" else None,
        tensor_scale=shaped((), "float32") if form.has_tensor_scale else None,
        format=form,
        transpose=transpose,
    )


RECORDS = {
    "int4": record(16, 1100, 2112),
    "int8, transposed": record(3, 2112, 1100, bits=8, transpose=True),
    "int4, bfloat16 scales": record(16, 300, 1088, stored="bfloat16"),
    "symmetric int4, transposed": record(16, 2112, 300, mode="symmetric", transpose=True),
    "fp8, transposed": record(16, 2112, 300, mode="fp8", transpose=True),
    "nf4, float32": record(3, 300, 1088, mode="nf4", dtype="float32"),
    "mxfp4, transposed": record(16, 2112, 300, mode="mxfp4", group_size=32, transpose=True),
    "nvfp8": record(16, 300, 2112, mode="nvfp8", group_size=16),
}


@pytest.mark.parametrize(("case", "name"), on_chips(RECORDS))
def test_both_passes_compile_at_awkward_shapes(case, name):
    made = RECORDS[case]
    device = DeviceInfo(platform="tpu", vendor="google", kind=PROFILED[name].kind)
    width = made.scales.shape[0] if made.transpose else made.scales.shape[1] * made.format.group_size

    def both(record, cotangent):
        pullback = Pullback(record=record, residuals=(), output=None, cotangent=cotangent, grad_fields=frozenset({"x"}))
        there = forward(record, heuristic(record, device, "forward"))[0]
        return there, backward(pullback, heuristic(record, device, "backward"))

    with target_device(device):
        made_ahead = compiled(both, (made, shaped((made.x.shape[0], width), jnp.dtype(made.x.dtype))), name)
    assert "ejkernel_quantized_matmul_over_rows" in made_ahead.as_text()
    assert "ejkernel_quantized_matmul_over_words" in made_ahead.as_text()
