"""The TPU kernel of token-sparse attention compared with the family's meaning, and simulated with races detected."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from tpu_races import found
from tpu_records import interpreted, simulated

from ejkernel.families.token_sparse_attention import TokenSparseAttention, reference
from ejkernel.ops.device import DeviceInfo
from ejkernel_pallas.tpu.token_sparse_attention import config, implementations
from ejkernel_pallas.tpu.token_sparse_attention.config import TpuTokenSparse
from ejkernel_pallas.tpu.token_sparse_attention.forward import forward

TILES = TpuTokenSparse(block_q=8, block_kv=128)


def record(shape=(1, 21, 300, 4, 1, 16, 8), listed=9, dtype="float32", latent=False, lists=1, sinks=False):
    """A record of (B, T, S, H, Hk, D, Dv) whose lists have repeated and absent keys. A query without a list, keys that
    nobody lists, and one that some queries list are NaN.
    """
    b, t, s, h, hk, d, dv = shape
    random = np.random.default_rng(5)
    indices = random.integers(-4, s // 2, (b, t, lists, listed)) * 2  # even keys
    indices[:, 3] = -1
    indices[:, 9, :, 0] = 20
    normal = lambda *size: jnp.asarray(random.normal(size=size), dtype)  # noqa: E731
    return TokenSparseAttention(
        query=normal(b, t, h, d).at[:, 3].set(jnp.nan),
        key=normal(b, s, hk, d).at[:, 7].set(jnp.nan).at[:, 20, :, :4].set(jnp.nan),
        indices=jnp.asarray(np.maximum(indices, -1), jnp.int32),
        softmax_scale=d**-0.5,
        value_size=dv,
        value=None if latent else normal(b, s, hk, dv).at[:, 9].set(jnp.nan),
        softmax_aux=normal(h).astype(jnp.float32) if sinks else None,
    )


CASES = {
    "latent, bfloat16": record(dtype="bfloat16", latent=True),
    "lists by head, sinks": record((2, 13, 700, 6, 2, 32, 40), listed=150, lists=2, sinks=True),
}


def check(given):
    output, residuals = jax.jit(lambda given: forward(given, TILES))(given)
    expected, expected_residuals = reference(given)
    bound = 2e-5 if given.query.dtype == jnp.float32 else 2e-2
    for mine, theirs in ((output, expected), (residuals.lse, expected_residuals.lse)):
        np.testing.assert_allclose(*(np.asarray(x, np.float32) for x in (mine, theirs)), rtol=bound, atol=bound)


@pytest.mark.parametrize("name", CASES)
def test_values_are_those_of_the_reference(name):
    with interpreted():
        check(CASES[name])


def test_values_without_races():
    with simulated():
        check(record())
    assert not found()


def test_calls_that_memory_cannot_hold_are_refused_and_others_fit():
    (implementation,) = implementations()
    shape, given = jax.ShapeDtypeStruct, record()
    assert not list(implementation.requires.extra(given))
    long = dataclasses.replace(given, key=shape((1, 2**21, 1, 16), jnp.float32))
    assert "key: got" in next(iter(implementation.requires.extra(long)))
    many = dataclasses.replace(given, query=shape((1, 2**19 + 1, 4, 16), jnp.float32))
    assert "query: got 65537 tiles of 8 queries" in next(iter(implementation.requires.extra(many)))
    with pytest.raises(ValueError, match="block_kv: got 100"):
        TpuTokenSparse(block_q=8, block_kv=100)
    for sizes in ((64, 4, 128, 128, 131072), (128, 1, 576, 512, 32768)):
        heads, kv_heads, size, value_size, keys = sizes
        large = dataclasses.replace(
            given,
            query=shape((1, 4096, heads, size), jnp.bfloat16),
            key=shape((1, keys, kv_heads, size), jnp.bfloat16),
            value=shape((1, keys, kv_heads, value_size), jnp.bfloat16) if kv_heads > 1 else None,
            indices=shape((1, 4096, 1, 2048), jnp.int32),
            value_size=value_size,
        )
        assert not list(implementation.requires.extra(large))
        assert config.vmem_bytes(large, config.heuristic(large, None, "forward")) <= config.MAX_VMEM_BYTES


def test_long_lists_and_many_queries_come_before_xla():
    (implementation,) = implementations()
    shape, device = jax.ShapeDtypeStruct, DeviceInfo(platform="tpu", vendor="google", kind="TPU v5 lite")

    def comes_first(queries, keys, heads, kv_heads):
        given = dataclasses.replace(
            record(),
            query=shape((1, queries, heads, 128), jnp.bfloat16),
            key=shape((1, keys, kv_heads, 128), jnp.bfloat16),
            indices=shape((1, queries, 1, 2048), jnp.int32),
        )
        return implementation.priority(given, device, "forward") > 0

    assert comes_first(4096, 32768, 64, 4)
    assert comes_first(4096, 8192, 128, 1)
    assert not comes_first(4096, 32768, 128, 1)
    assert not comes_first(1, 8192, 64, 4)
