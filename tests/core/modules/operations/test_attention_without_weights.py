"""`attention(..., return_weights=False)` is a call of `flash_attention`: same kernels, same numbers, no weights."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, PartitionSpec

from ejkernel.modules import Attention, AttentionConfig, FlashAttentionConfig, FwdParams, attention, flash_attention
from ejkernel.ops import create_default_executor, explain
from ejkernel.types import MaskInfo

Q = jax.random.normal(jax.random.key(0), (2, 16, 4, 8))
K, V = jax.random.normal(jax.random.key(1), (2, 2, 16, 2, 8))
IDS = jnp.array([[0] * 9 + [1] * 7, [0] * 16])
CALLS = {
    "causal window": {"causal": True, "sliding_window": (5, 2), "logits_soft_cap": 2.0},
    "sinks and bias of KV heads": {
        "softmax_aux": jnp.arange(4.0),
        "bias": jax.random.normal(jax.random.key(1), (1, 2, 16, 16)),
    },
    "segments": {"mask_info": MaskInfo.from_segments(IDS), "softmax_scale": 0.3},
    "dropout": {"dropout_rng": jax.random.key(3), "dropout_prob": 0.3, "deterministic": False},
    "bfloat16": {"dtype": jnp.bfloat16, "softmax_dtype": jnp.bfloat16},
}


@pytest.mark.parametrize("name", CALLS)
def test_output_and_gradients_match_the_call_that_returns_weights(name):
    options = CALLS[name]

    def both(query, key, value):
        return attention(query, key, value, **options)[0]

    def alone(query, key, value):
        return attention(query, key, value, **options, return_weights=False)

    tolerance = {"rtol": 2e-2, "atol": 2e-2} if name == "bfloat16" else {"rtol": 1e-5, "atol": 1e-5}
    want, pull = jax.vjp(both, Q, K, V)
    got, pull_alone = jax.vjp(alone, Q, K, V)
    assert got.dtype == want.dtype
    for one, other in zip((got, *pull_alone(got)), (want, *pull(want)), strict=True):
        np.testing.assert_allclose(np.float32(one), np.float32(other), **tolerance)


def test_the_implementation_is_the_one_of_flash_attention_and_explain_says_so():
    got = explain(attention, Q, K, V, causal=True, return_weights=False)
    assert str(got) == str(explain(flash_attention, Q, K, V, causal=True))
    assert "flash_attention" in str(got)
    text = jax.jit(lambda *x: attention(*x, return_weights=False)).lower(Q, K, V).as_text()
    assert text == jax.jit(lambda *x: flash_attention(*x)).lower(Q, K, V).as_text()


def test_configs_of_attention_and_of_flash_attention_are_accepted():
    flash = FlashAttentionConfig(fwd_params=FwdParams(q_blocksize=8, kv_blocksize=8))
    for cfg in (flash, AttentionConfig(block_q=8, block_k=8)):
        assert "block_q=8" in str(explain(attention, Q, K, V, cfg=cfg, return_weights=False))
    with pytest.raises(ValueError, match="cfg: got FlashAttentionConfig, wants AttentionConfig"):
        attention(Q, K, V, cfg=flash)
    with pytest.raises(ValueError, match="cfg: got weights_block_q=8 with return_weights=False"):
        attention(Q, K, V, cfg=AttentionConfig(weights_block_q=8), return_weights=False)


def test_an_executor_runs_attention_without_weights():
    executor = create_default_executor(enable_autotuning=False)
    got = executor(Attention(), Q, K, V, return_weights=False)
    np.testing.assert_array_equal(got, flash_attention(Q, K, V))
    compiled = executor.compile(Attention(), Q, K, V, return_weights=False)
    np.testing.assert_allclose(compiled(Q, K, V), got, rtol=1e-5, atol=1e-6)


def test_specs_keep_the_order_of_attention():
    mesh = Mesh(np.array(jax.devices()[:2]), ("tp",))
    heads = PartitionSpec(None, None, "tp")
    sinks = jnp.arange(4.0)
    specs = {"mesh": mesh, "in_specs": (heads, heads, heads, None, None, PartitionSpec("tp")), "out_specs": heads}
    got = attention(Q, K, V, None, None, sinks, return_weights=False, **specs)
    np.testing.assert_allclose(got, attention(Q, K, V, None, None, sinks)[0], rtol=1e-5, atol=1e-6)


def test_mistakes_name_the_arguments_of_attention():
    with pytest.raises(ValueError, match=r"query: got shape \(16, 4, 8\)"):
        attention(Q[0], K, V, return_weights=False)
    with pytest.raises(ValueError, match="dropout_rng: got"):
        attention(Q, K, V, dropout_rng=jnp.ones(3), return_weights=False)
    with pytest.raises(ValueError, match="return_weights: got NoneType None, wants True or False"):
        attention(Q, K, V, return_weights=None)
