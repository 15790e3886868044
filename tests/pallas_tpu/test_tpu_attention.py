"""The attention kernels' numbers, interpreted, against the family's meaning."""

import jax
import jax.numpy as jnp
import pytest
from tpu_records import CASES, answers, close, interpreted

from ejkernel.ops.config.params import BwdParams, FwdParams
from ejkernel.ops.pullback import Pullback
from ejkernel_pallas.tpu.tiled_attention.backward import backward
from ejkernel_pallas.tpu.tiled_attention.forward import forward

FORWARD = FwdParams(q_blocksize=128, kv_blocksize=128, blocksize_m=128, blocksize_n=128)
BACKWARD = BwdParams(q_blocksize=128, kv_blocksize=128, blocksize_m=128, blocksize_n=128, blocksize_k=128)


@jax.jit
def attend(made, cotangent):
    """Output, residuals and the gradients of all that has one."""
    wanted = frozenset(
        name for name in ("query", "key", "value", "bias", "softmax_aux") if getattr(made, name) is not None
    )
    output, residuals = forward(made, FORWARD)
    pullback = Pullback(record=made, residuals=residuals, output=output, cotangent=cotangent, wanted=wanted)
    return output, residuals, backward(pullback, BACKWARD)


@pytest.mark.parametrize("name", CASES)
def test_values_and_gradients(name):
    made = CASES[name]
    output, lse, cotangent, gradients = answers(made)
    with interpreted():
        got, residuals, found = attend(made, cotangent)
    assert got.dtype == made.query.dtype
    close(got, output, made.query.dtype)
    close(residuals.lse, lse, made.query.dtype)
    assert found.keys() == gradients.keys()
    for field, wanted in gradients.items():
        assert found[field].dtype == getattr(made, field).dtype
        close(found[field], wanted, made.query.dtype)
        assert jnp.all(jnp.isfinite(found[field])), field
