"""`return_lse=True`: the logarithm of the softmax denominator, as a result that can be differentiated."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

from ejkernel.modules import (
    blocksparse_attention,
    flash_attention,
    flash_mla,
    mla_decode,
    ring_attention,
    scaled_dot_product_attention,
    unified_attention,
)
from ejkernel.ops import explain
from ejkernel.ops.device import DeviceInfo, target_device
from ejkernel.planning.softmax_merge import PartialAttention, merge
from ejkernel.types import MaskInfo

B, T, H, G, D = 2, 24, 4, 2, 8
H200 = DeviceInfo(platform="gpu", vendor="nvidia", kind="NVIDIA H200", compute_capability=9.0)


def qkv(dtype=jnp.float32):
    keys = jax.random.split(jax.random.key(0), 3)
    shapes = ((B, T, H, D), (B, T, G, D), (B, T, G, D))
    return tuple(jax.random.normal(k, shape).astype(dtype) for k, shape in zip(keys, shapes, strict=True))


def naive_lse(query, key, sinks=None):
    """[B, H, T] of causal attention, in float64."""
    query, key = (np.asarray(x, np.float64) for x in (query, key))
    scores = np.einsum("bthd,bshd->bhts", query, np.repeat(key, H // G, 2)) * D**-0.5
    scores = np.where(np.tril(np.ones((T, T), bool)), scores, -np.inf)
    total = np.exp(scores).sum(-1) + (0 if sinks is None else np.exp(np.asarray(sinks, np.float64))[None, :, None])
    return np.log(total)


def heads_first(function):
    def call(query, key, value, **options):
        output, lse = function(*(x.swapaxes(1, 2) for x in (query, key, value)), **options)
        return output.swapaxes(1, 2), lse

    return call


DENSE = {
    "flash_attention": flash_attention,
    "scaled_dot_product_attention": scaled_dot_product_attention,
    "ring_attention": ring_attention,
    "blocksparse_attention": heads_first(blocksparse_attention),
}


@pytest.mark.parametrize("name", DENSE)
def test_lse_is_the_natural_logarithm_of_the_denominator(name):
    query, key, value = qkv()
    output, lse = DENSE[name](query, key, value, causal=True, return_lse=True)
    assert lse.shape == (B, H, T)
    assert lse.dtype == jnp.float32
    np.testing.assert_allclose(lse, naive_lse(query, key), rtol=1e-5, atol=1e-5)
    np.testing.assert_allclose(output, flash_attention(query, key, value, causal=True), rtol=1e-4, atol=1e-6)


def test_lse_is_float32_for_16_bit_inputs_and_includes_sinks():
    query, key, value = qkv(jnp.bfloat16)
    sinks = jnp.array([0.5, -1.0, 2.0, 0.0])
    _, lse = flash_attention(query, key, value, softmax_aux=sinks, causal=True, return_lse=True)
    assert lse.dtype == jnp.float32
    np.testing.assert_allclose(lse, naive_lse(query, key, sinks), rtol=1e-5, atol=1e-5)


def halves(query, key, value):
    """Attention to two halves of the keys, merged: what lse is for."""
    parts = []
    for half in (slice(0, T // 2), slice(T // 2, T)):
        output, lse = flash_attention(query, key[:, half], value[:, half], return_lse=True)
        parts.append(PartialAttention(output, lse))
    return merge(*parts).output


def test_gradients_through_merged_parts_are_those_of_the_whole():
    cotangent = jax.random.normal(jax.random.key(3), (B, T, H, D))

    def gradients(attend):
        return jax.grad(lambda args: jnp.sum(attend(*args) * cotangent))(qkv())

    for got, want in zip(gradients(halves), gradients(flash_attention), strict=True):
        np.testing.assert_allclose(got, want, rtol=1e-4, atol=1e-5)


def penalty(attend):
    """A loss of both results; of lse alone through its square, as a z-loss is."""
    weights = jax.random.normal(jax.random.key(5), (B, T, H, D))

    def loss(*args):
        output, lse = attend(*args)
        return jnp.sum(output * weights) + jnp.sum(jnp.where(jnp.isfinite(lse), lse, 0) ** 2)

    return loss


def test_rows_with_nothing_to_attend_are_minus_infinity_and_have_no_gradient():
    mask = MaskInfo(_attention_mask=jnp.ones((B, 1, T, T), bool).at[:, :, 3].set(False))
    _, lse = flash_attention(*qkv(), mask_info=mask, return_lse=True)
    assert np.all(np.asarray(lse[:, :, 3]) == -np.inf)

    def of_everything(*args):
        return jnp.sum(jnp.exp(flash_attention(*args, mask_info=mask, return_lse=True)[1]) / 0.0)  # cotangents of inf

    gradient = jax.grad(penalty(lambda *args: flash_attention(*args, mask_info=mask, return_lse=True)))(*qkv())
    assert np.all(np.isfinite(gradient))
    assert np.all(np.asarray(gradient[:, 3]) == 0)
    assert np.all(np.asarray(jax.grad(of_everything)(*qkv())[:, 3]) == 0)


def test_vmap_and_jit_give_what_each_call_gives():
    query, key, value = qkv()
    many = jnp.stack([query, 2 * query])
    loss = penalty(lambda q: flash_attention(q, key, value, causal=True, return_lse=True))
    got = jax.jit(jax.vmap(jax.value_and_grad(loss)))(many)
    want = [jax.value_and_grad(loss)(one) for one in many]
    for i, one in enumerate(want):
        np.testing.assert_allclose(got[0][i], one[0], rtol=1e-5)
        np.testing.assert_allclose(got[1][i], one[1], rtol=1e-5, atol=1e-5)


def placements():
    devices = jax.devices()
    mesh = jax.make_mesh((2, 2, 2), ("dp", "sp", "tp"), (AxisType.Auto,) * 3, devices=devices[:8])
    part, ring = P("dp", "sp", "tp"), P(None, "sp")
    whole = jax.make_mesh((4,), ("sp",), (AxisType.Auto,), devices=devices[:4])
    keys = P("dp", None, "tp")
    flash = {"mesh": mesh, "in_specs": (part, keys, keys), "out_specs": (part, P("dp", "tp", "sp"))}
    around = {"mesh": whole, "in_specs": (ring,) * 3, "out_specs": (ring, P(None, None, "sp")), "axis_name": "sp"}
    return {"flash_attention": (flash_attention, flash), "ring_attention": (ring_attention, around)}


@pytest.mark.parametrize(
    "options", [{"causal": True}, {"sliding_window": (5, 2)}, {}], ids=["causal", "window", "full"]
)
@pytest.mark.parametrize("name", ["flash_attention", "ring_attention"])
def test_lse_over_devices_is_that_of_the_whole_call(name, options):
    function, placement = placements()[name]
    sinks = jnp.array([0.5, -1.0, 2.0, 0.0])

    def run(attend, **placed):
        loss = penalty(lambda q, k, v, s: attend(q, k, v, softmax_aux=s, **options, **placed, return_lse=True))
        return jax.jit(jax.value_and_grad(loss, argnums=(0, 1, 2, 3)))(*qkv(), sinks)

    got, want = run(function, **placement), run(flash_attention)
    for g, w in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        np.testing.assert_allclose(g, w, rtol=1e-4, atol=1e-4)


def test_latent_attention_and_its_decoding_agree():
    keys = jax.random.split(jax.random.key(0), 5)
    query = jax.random.normal(keys[0], (2, 5, 4, 8 + 4))
    latent, rope = jax.random.normal(keys[1], (2, 5, 16)), jax.random.normal(keys[4], (2, 5, 4))
    w_kc, w_vc = jax.random.normal(keys[2], (16, 4, 8)), jax.random.normal(keys[3], (16, 4, 8))
    _, dense = flash_mla(query, latent, w_kc, w_vc, None, rope, causal=True, return_lse=True)
    output, last = mla_decode(query[:, -1], latent, rope, w_kc, w_vc, jnp.array([5, 5]), return_lse=True)
    assert output.shape == (2, 4, 8)
    np.testing.assert_allclose(last, dense[:, :, -1], rtol=1e-4, atol=1e-4)


def test_lse_over_pages_has_the_axes_of_the_operation():
    query = jax.random.normal(jax.random.key(0), (2, 3, 4, 8))
    pages = jax.random.normal(jax.random.key(1), (6, 4, 2, 8))
    tables = jnp.array([[1, 2], [4, 0]])
    output, lse = flash_attention(query, pages, pages, block_tables=tables, causal=True, return_lse=True)
    packed, of_rows = unified_attention(
        query.reshape(6, 4, 8), pages, pages, jnp.array([8, 8]), tables, jnp.array([0, 3, 6]), return_lse=True
    )
    assert lse.shape == (2, 4, 3)
    assert of_rows.shape == (6, 4)
    np.testing.assert_array_equal(output, packed.reshape(output.shape))
    np.testing.assert_array_equal(lse, of_rows.reshape(2, 3, 4).swapaxes(1, 2))


def test_a_backward_pass_that_does_not_honour_its_cotangent_is_not_taken(monkeypatch):
    monkeypatch.setenv("XLA_FLAGS", "--xla_gpu_deterministic_ops=true")
    q = jax.ShapeDtypeStruct((1, 128, 4, 96), jnp.bfloat16)
    with target_device(H200):
        verdicts = explain(flash_attention, q, q, q, causal=True, return_lse=True).backward.verdicts
        without = explain(flash_attention, q, q, q, causal=True).backward.verdicts
    reasons = {v.implementation.name: v.reasons for v in verdicts}
    claims = {v.implementation.name: "lse_cotangent" in v.implementation.requires.handles for v in verdicts}
    assert not any("lse_cotangent is not handled" in v.reasons for v in without)
    assert {name: "lse_cotangent is not handled" in found for name, found in reasons.items()} == {
        name: not claimed for name, claimed in claims.items()
    }
    assert claims["xla"]
    assert False in claims.values()
