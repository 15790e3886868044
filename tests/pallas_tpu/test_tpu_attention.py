"""The attention kernels' numbers, interpreted, against the family's meaning."""

from unittest import mock

import jax
import jax.numpy as jnp
import pytest
from tpu_records import CASES, answers, close, interpreted, record

from ejkernel.ops.config.params import BwdParams, FwdParams
from ejkernel.ops.device import DeviceInfo, target_device
from ejkernel.ops.pullback import Pullback
from ejkernel_pallas.tpu.tiled_attention import tile, tiles
from ejkernel_pallas.tpu.tiled_attention.backward import backward
from ejkernel_pallas.tpu.tiled_attention.forward import forward
from ejkernel_pallas.tpu.tiled_attention.spec import make_spec
from ejkernel_pallas.tpu.tiled_attention.tiles import backward_blocks, forward_blocks

FORWARD = FwdParams(q_blocksize=128, kv_blocksize=128, blocksize_m=128, blocksize_n=128)
BACKWARD = BwdParams(q_blocksize=128, kv_blocksize=128, blocksize_m=128, blocksize_n=128, blocksize_k=128)
FIELDS = ("query", "key", "value")
WIDE = DeviceInfo(platform="tpu", vendor="google", kind="TPU v6 lite")


@jax.jit
def attend(made, cotangent):
    """Output, residuals and the gradients of all that has one."""
    wanted = frozenset(
        name for name in ("query", "key", "value", "bias", "softmax_aux") if getattr(made, name) is not None
    )
    output, residuals = forward(made, FORWARD)
    pullback = Pullback(record=made, residuals=residuals, output=output, cotangent=cotangent, wanted=wanted)
    return output, residuals, backward(pullback, BACKWARD)


def check(made):
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


@pytest.mark.parametrize("name", CASES)
def test_values_and_gradients(name):
    check(CASES[name])


@pytest.mark.parametrize("name", ["bfloat16", "bfloat16, padding and sinks"])
def test_wide_matrix_units_add_weights_up(name):
    with target_device(WIDE):
        assert make_spec(CASES[name], forward_blocks(FORWARD)).counted
        check(CASES[name])


def test_large_tiles_on_and_off_the_diagonal():
    """Whole square tiles, which are cut along the diagonal, and beside it loops go through their products."""
    made = record((1, 512, 512, 2, 1, 128, 128), causal=True)
    params = FwdParams(q_blocksize=256, kv_blocksize=256, blocksize_m=128, blocksize_n=128)
    back = BwdParams(q_blocksize=256, kv_blocksize=256, blocksize_m=256, blocksize_n=256, blocksize_k=128)
    output, lse, cotangent, gradients = answers(made)

    @jax.jit
    def both(made, cotangent):
        got, residuals = forward(made, params)
        pullback = Pullback(record=made, residuals=residuals, output=got, cotangent=cotangent, wanted=frozenset(FIELDS))
        return got, residuals.lse, backward(pullback, back)

    with interpreted(), mock.patch.object(tile, "UNROLLED", 128 * 128), mock.patch.object(tiles, "LARGE", 256):
        got, found_lse, found = both(made, cotangent)
    close(got, output, made.query.dtype)
    close(found_lse, lse, made.query.dtype)
    for field in FIELDS:
        close(found[field], gradients[field], made.query.dtype)


def test_products_on_the_diagonal_divide_their_tile():
    """384 tokens are one tile, of which a product of 256 queries would be more than there are."""
    made = record((1, 384, 384, 1, 1, 64, 64), causal=True)
    output, lse, _, _ = answers(made)
    with interpreted():
        got, residuals = forward(made, FwdParams(q_blocksize=384, kv_blocksize=384, blocksize_m=384, blocksize_n=384))
    close(got, output, made.query.dtype)
    close(residuals.lse, lse, made.query.dtype)


def test_products_of_large_tiles():
    """Their sides are the other way around: of what a kernel owns there is a loop's step, of what it visits little."""
    large = BwdParams(q_blocksize=2048, kv_blocksize=2048, blocksize_m=2048, blocksize_n=2048)
    products = [
        (blocks.q_chunk, blocks.kv_chunk) for blocks in (*backward_blocks(BwdParams()), *backward_blocks(large))
    ]
    assert products == [(1024, 256), (256, 1024), (256, 1024), (1024, 256)]
