"""The TPU kernel of the union of lists compared with the family's meaning, and simulated with races detected."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from tpu_races import found
from tpu_records import interpreted, simulated

from ejkernel.families.token_sparse_attention import TokenSparseAttention, reference
from ejkernel.ops.device import find_device
from ejkernel_pallas.tpu.token_sparse_attention_union import config, implementations
from ejkernel_pallas.tpu.token_sparse_attention_union.config import TpuTokenSparseUnion
from ejkernel_pallas.tpu.token_sparse_attention_union.forward import forward

TILES = TpuTokenSparseUnion(block_q=8, block_kv=256, union_keys=256)


def record(shape=(1, 21, 600, 4, 40, 24), listed=9, dtype="float32", sinks=False, scale=0.2, stride=2):
    """A record of (B, T, S, H, D, Dv) whose lists have repeated and absent keys. A query without a list, keys that
    nobody lists, and one that some queries list are NaN.
    """
    b, t, s, h, d, dv = shape
    random = np.random.default_rng(5)
    indices = random.integers(-4, s // stride, (b, t, 1, listed)) * stride
    indices[:, 2, :, : listed // 2] = 2 * stride
    indices[:, 3] = -1
    indices[:, 9, :, 0] = 20 * stride
    normal = lambda *size: jnp.asarray(random.normal(size=size), dtype)  # noqa: E731
    key = normal(b, s, 1, d).at[:, 20 * stride, :, :4].set(jnp.nan)
    return TokenSparseAttention(
        query=normal(b, t, h, d).at[:, 3].set(jnp.nan),
        key=key.at[:, 7].set(jnp.inf) if stride > 1 else key,
        indices=jnp.asarray(np.maximum(indices, -1), jnp.int32),
        softmax_scale=scale,
        value_size=dv,
        softmax_aux=normal(h).astype(jnp.float32) if sinks else None,
    )


CASES = {
    "float32, two tiles of queries and three of keys": (record(), TILES),
    "bfloat16, sinks, 16 queries, two batch rows": (
        record((2, 19, 300, 6, 136, 128), dtype="bfloat16", sinks=True, scale=-0.1),
        dataclasses.replace(TILES, block_q=16),
    ),
    "bfloat16, more keys than a product takes": (
        record((1, 10, 1500, 3, 24, 24), listed=700, dtype="bfloat16", stride=1),
        dataclasses.replace(TILES, block_kv=512, union_keys=1024),
    ),
    "float32, lists of two pieces": (record((1, 10, 90, 3, 24, 16), listed=2100), TILES),
}


def check(given, tiles):
    output, residuals = jax.jit(lambda given: forward(given, tiles))(given)
    expected, expected_residuals = reference(given)
    bound = 2e-5 if given.query.dtype == jnp.float32 else 2e-2
    for mine, theirs in ((output, expected), (residuals.lse, expected_residuals.lse)):
        np.testing.assert_allclose(*(np.asarray(x, np.float32) for x in (mine, theirs)), rtol=bound, atol=bound)


@pytest.mark.parametrize("name", CASES)
def test_values_are_those_of_the_reference(name):
    with interpreted():
        check(*CASES[name])


def test_values_without_races():
    with simulated():
        check(record((1, 10, 600, 3, 24, 16), listed=150), TILES)
    assert not found()


def test_calls_that_the_kernel_cannot_compute_are_refused_and_others_fit():
    (implementation,) = implementations()
    shape, given = jax.ShapeDtypeStruct, record()

    def reasons(**fields):
        return list(implementation.requires.extra(dataclasses.replace(given, **fields)))

    assert not reasons()
    assert "key: got 2 heads" in reasons(key=shape((1, 600, 2, 40), jnp.float32))[0]
    assert "softmax_scale: got 0.0" in reasons(softmax_scale=0.0)[0]
    assert "bytes of VMEM" in reasons(key=shape((1, 2**21, 1, 40), jnp.float32))[0]
    assert "query: got 65537 tiles of 8 queries" in reasons(query=shape((1, 2**19 + 1, 4, 40), jnp.float32))[0]
    assert "query: got 70000 tiles of 8 queries" in reasons(query=shape((70000, 1, 4, 40), jnp.float32))[0]
    for dtype, keys in ((jnp.bfloat16, 131072), (jnp.float32, 32768)):
        large = dataclasses.replace(
            given,
            query=shape((1, 4096, 128, 576), dtype),
            key=shape((1, keys, 1, 576), dtype),
            indices=shape((1, 4096, 1, 2048), jnp.int32),
            value_size=512,
        )
        assert not list(implementation.requires.extra(large))
        for tiles in config.candidates(large, None, "forward"):
            assert config.vmem_bytes(large, tiles) <= config.MAX_VMEM_BYTES


def test_tiles_are_fitted_to_the_call_and_to_groups():
    fitted = config.fit_config(record(), TpuTokenSparseUnion(block_q=64, block_kv=384, union_keys=1024))
    assert fitted == TpuTokenSparseUnion(block_q=16, block_kv=512, union_keys=768)


@pytest.mark.parametrize("wrong", [{"block_q": 9}, {"block_kv": 64}, {"union_keys": 128}])
def test_wrong_tiles_are_errors(wrong):
    (name, value), *_ = wrong.items()
    with pytest.raises(ValueError, match=f"{name}: got {value}"):
        dataclasses.replace(TILES, **wrong)


def test_order_of_choice_and_its_reasons():
    (implementation,) = implementations()
    shape = jax.ShapeDtypeStruct

    def place(chip, keys, heads=128, dtype=jnp.bfloat16, queries=4096):
        given = dataclasses.replace(
            record(),
            query=shape((1, queries, heads, 576), dtype),
            key=shape((1, keys, 1, 576), dtype),
            indices=shape((1, queries, 1, 2048), jnp.int32),
        )
        device = find_device(chip)
        comes_first = implementation.priority(given, device, "forward") > 10
        return comes_first, implementation.priority_reason(given, device, "forward")

    for chip in ("v5e", "v5p", "v6e", "v7x"):
        assert place(chip, 32768) == (
            True,
            "lists of 2048 of 32768 keys take less time in the union of neighbouring lists",
        )
        assert place(chip, 8192) == (False, "lists of 2048 of 8192 keys: 4 keys per entry or less, left to others")
        assert place(chip, 2**18)[1].endswith(f"left to XLA on {chip}")
    assert place("v5p", 131072)[0]
    assert place("v5e", 32768, heads=16) == (False, "no estimates for 16 heads of bfloat16")
    assert place("v5e", 32768, dtype=jnp.float32) == (False, "no estimates for 128 heads of float32")
    assert place("v5e", 32768, queries=8) == (False, "no estimates for 8 queries with lists of 2048 of 32768 keys")
    assert place("cpu", 32768) == (False, "no estimates for cpu")
