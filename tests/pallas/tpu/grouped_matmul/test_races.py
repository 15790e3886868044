"""The grouped-matmul kernels under a simulator of the TPU's copies and memories that watches for races."""

import jax
from tpu_grouped_records import CASES, answers
from tpu_races import found
from tpu_records import close, simulated

from ejkernel.types.pullback import Pullback
from ejkernel_pallas.tpu.grouped_matmul.backward import backward
from ejkernel_pallas.tpu.grouped_matmul.forward import forward


def test_grouped_matmul_has_no_races():
    made, config = CASES["rows before the first matrix"]
    output, cotangent, gradients = answers(made)

    def multiply(made, cotangent):
        wanted = frozenset(gradients)
        pullback = Pullback(record=made, residuals=(), output=None, cotangent=cotangent, grad_fields=wanted)
        return forward(made, config)[0], backward(pullback, config)

    with simulated():
        got, back = jax.block_until_ready(jax.jit(multiply)(made, cotangent))
    assert not found()
    close(got / 10, output / 10, made.lhs.dtype)
    for name, gradient in gradients.items():
        close(back[name] / 10, gradient / 10, made.lhs.dtype)
