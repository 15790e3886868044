"""Values of public configurations are checked, even if the chosen kernel does not read them."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import ejkernel
from ejkernel.modules import (
    FlashAttentionConfig,
    PageAttentionConfig,
    flash_attention,
    gated_linear_attention,
    page_attention,
)
from ejkernel.modules.operations.configs import GLAttentionConfig, RaggedDecodeAttentionConfig
from ejkernel.ops import ConfigKey, FwdParams, overlay_cache

X = jax.ShapeDtypeStruct((1, 8, 1, 8), jnp.float32)
KEY = ConfigKey(op="flash_attention@1", implementation="xla@1", direction="forward", device="cpu", schema="0", call="")


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"backend": "x"}, "cfg.backend: got 'x', wants one of 'gpu', 'tpu', 'cpu', 'any'"),
        ({"backend": None}, "cfg.backend: got None, wants one of"),
        ({"platform": "XLA"}, "cfg.platform: got 'XLA', wants one of 'triton', 'pallas', 'cuda', 'xla', 'auto'"),
        ({"platform": ["xla"]}, "cfg.platform: got \\['xla'\\], wants one of"),
        ({"fwd_params": 64}, "cfg.fwd_params: got 64, wants FwdParams, a kernel's own configuration or None"),
        ({"bwd_params": FwdParams}, "cfg.bwd_params: got <class"),
    ],
)
def test_a_wrong_field_of_cfg_is_an_error_that_names_it(fields, message):
    with pytest.raises(ValueError, match=message):
        ejkernel.explain(flash_attention, X, X, X, cfg=FlashAttentionConfig(**fields))
    overlay = overlay_cache({"flash_attention": FlashAttentionConfig(**fields)})
    with pytest.raises(ValueError, match=message.replace("cfg", r"mapping\['flash_attention'\]")), overlay:
        pass


@pytest.mark.parametrize("value", [-1, 0, "x", 1.5, True])
def test_sizes_that_no_kernel_reads_are_positive_integers(value):
    with pytest.raises(ValueError, match=r"cfg.num_warps: got .*, wants a positive integer or None"):
        ejkernel.explain(page_attention, *pages(), cfg=PageAttentionConfig(num_warps=value))


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"megacore_mode": "x"}, "cfg.megacore_mode: got 'x', wants one of 'batch', 'kv_head' or None"),
        ({"inline_seq_dim": 1}, "cfg.inline_seq_dim: got 1, wants True or False or None"),
    ],
)
def test_words_and_flags_are_those_of_their_field(fields, message):
    with pytest.raises(ValueError, match=message):
        ejkernel.explain(page_attention, *pages(), cfg=PageAttentionConfig(**fields))


def test_integers_of_numpy_are_sizes():
    assert ejkernel.explain(page_attention, *pages(), cfg=PageAttentionConfig(num_warps=np.int32(4))).forward.config
    ejkernel.explain(gated_linear_attention, X, X, X, cfg=GLAttentionConfig())


@pytest.mark.parametrize("platform", ["", ["xla"], 1, b"xla"])
def test_a_platform_that_is_no_name_is_an_error(platform):
    with pytest.raises(ValueError, match=r"platform: got .*, wants one of 'triton'"):
        ejkernel.explain(flash_attention, X, X, X, platform=platform)


@pytest.mark.parametrize("config", [FlashAttentionConfig, RaggedDecodeAttentionConfig])
def test_an_unknown_field_of_a_dictionary_is_an_error(config):
    with pytest.raises(ValueError, match="fwd_params: FwdParams has no field q_block"):
        config(fwd_params={"q_block": 64})
    with pytest.raises(ValueError, match=r"fwd_params: Expected `int \| null`, got `str`"):
        config(fwd_params={"q_blocksize": "64"})
    assert config(fwd_params={"q_blocksize": 64}).fwd_params == FwdParams(q_blocksize=64)


@pytest.mark.parametrize(
    ("mapping", "message"),
    [
        ([], "mapping: got list, wants a mapping"),
        (None, "mapping: got NoneType, wants a mapping"),
        ({1: FlashAttentionConfig()}, "mapping: got the key 1, wants the name of an operation or a ConfigKey"),
        ({KEY: 3}, "mapping.*: got 3, wants a configuration part"),
    ],
)
def test_an_overlay_refuses_what_it_would_not_use(mapping, message):
    with pytest.raises(ValueError, match=message), overlay_cache(mapping):
        pass


def pages():
    cache = jax.ShapeDtypeStruct((4, 8, 1, 8), jnp.float32)
    lengths, tables = jax.ShapeDtypeStruct((1,), jnp.int32), jax.ShapeDtypeStruct((1, 4), jnp.int32)
    return jax.ShapeDtypeStruct((1, 1, 8), jnp.float32), cache, cache, lengths, tables
