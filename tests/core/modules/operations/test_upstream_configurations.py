"""Public configurations take the fields and the positional order that code written for upstream gives them."""

import dataclasses
import functools

import jax.numpy as jnp
import pytest

import ejkernel
from ejkernel.modules import grouped_matmul, native_sparse_attention, state_space_v2
from ejkernel.modules.operations import configs

PLACE = ("xla", "any")
ORDER = {
    configs.RecurrentAttentionConfig: ("block_q", "block_k", "block_d", "num_warps", "num_stages"),
    configs.GLAttentionConfig: ("block_q", "block_k", "block_d", "num_warps", "num_stages"),
    configs.RWKV4Config: ("block_c",),
    configs.RWKV6Config: (),
    configs.RWKV7Config: ("block_v", "num_warps", "num_stages"),
    configs.RWKV7MulConfig: ("block_v", "num_warps", "num_stages"),
    configs.LightningAttentionConfig: ("block_q", "block_k", "block_d", "num_warps", "num_stages"),
    configs.NativeSparseAttentionConfig: ("block_q", "block_k", "block_d", "block_size", "num_warps", "num_stages"),
    configs.PageAttentionConfig: ("num_splits", "pages_per_compute_block", "num_warps", "num_stages"),
    configs.UnifiedAttentionConfig: (
        "seq_threshold_3d",
        "num_par_softmax_segments",
        "block_dim",
        "num_warps",
        "num_stages",
    ),
    configs.DecodeAttentionConfig: ("num_kv_splits", "num_warps", "num_stages"),
    configs.ChunkedPrefillPagedDecodeConfig: (
        "seq_threshold_3d",
        "num_par_softmax_segments",
        "num_warps",
        "num_stages",
    ),
    configs.AttentionConfig: (
        "block_q",
        "block_k",
        "weights_block_q",
        "weights_block_k",
        "num_warps",
        "num_stages",
    ),
    configs.ScaledDotProductAttentionConfig: ("block_q", "block_k", "num_warps", "num_stages"),
    configs.DeepSeekAttentionConfig: ("index_topk", "block_q", "block_k", "gemm_block", "num_warps", "num_stages"),
    configs.FlashMLAConfig: ("block_q", "block_k", "num_warps", "num_stages"),
    configs.PrefillPageAttentionConfig: ("block_k", "num_warps", "num_stages"),
    configs.GroupedMatmulConfig: ("block_m", "block_n", "block_k", "num_warps", "num_stages", "bypass_xla_tiling"),
    configs.MeanPoolingConfig: ("block_size", "block_dim", "num_warps", "num_stages"),
    configs.RaggedPageAttentionv2Config: (
        "num_kv_pages_per_block",
        "num_queries_per_block",
        "num_warps",
        "num_stages",
    ),
    configs.RaggedPageAttentionv3Config: (
        "chunk_prefill_size",
        "num_kv_pages_per_block",
        "num_queries_per_block",
        "num_warps",
        "num_stages",
    ),
    configs.MultiLatentRaggedPageAttentionConfig: (
        "chunk_prefill_size",
        "num_kv_pages_per_block",
        "num_queries_per_block",
        "vmem_limit_bytes",
        "num_warps",
        "num_stages",
    ),
    configs.MultiLatentRaggedPageAttentionV2Config: (
        "chunk_prefill_size",
        "num_kv_pages_per_block",
        "num_queries_per_block",
        "vmem_limit_bytes",
        "num_warps",
        "num_stages",
    ),
    configs.QuantizedMatmulConfig: (
        "block_m",
        "block_n",
        "block_k",
        "num_warps",
        "num_stages",
        "use_bf16",
        "split_k",
        "tpu_path",
    ),
    configs.KernelDeltaAttentionConfig: ("chunk_size",),
    configs.GatedDeltaRuleConfig: ("chunk_size",),
    configs.StateSpaceV1Config: ("block_d", "block_e"),
    configs.StateSpaceV2Config: ("n_groups", "use_gated_rmsnorm", "rmsnorm_eps", "block_e"),
    configs.FlashAttentionConfig: ("fwd_params", "bwd_params"),
    configs.RingAttentionConfig: ("fwd_params", "bwd_params"),
}


def _value(name, number):
    if "params" in name:
        return None
    return "predecode" if name == "tpu_path" else True if "use_" in name or "bypass" in name else number


TILES = ("blocksize_m", "blocksize_k", "blocksize_n", "q_blocksize", "kv_blocksize")
FORWARD = (*TILES, "blocksize_heads", "blocksize_keys", "num_key_splits", "num_warps", "num_stages")
ORDER_OF_PARTS = {configs.FwdParams: FORWARD, configs.BwdParams: (*TILES, "num_warps", "num_stages")}


@pytest.mark.parametrize("kind", ORDER, ids=lambda kind: kind.__name__)
def test_fields_stand_in_upstreams_order_behind_platform_and_backend(kind):
    values = [_value(name, n) for n, name in enumerate(ORDER[kind], 1)]
    made = kind(*PLACE, *values)
    assert made == kind(platform="xla", backend="any", **dict(zip(ORDER[kind], values, strict=True)))
    assert kind.from_json(made.to_json()) == made


@pytest.mark.parametrize("kind", ORDER_OF_PARTS, ids=lambda kind: kind.__name__)
def test_parameters_stand_in_upstreams_order(kind):
    values = range(1, len(ORDER_OF_PARTS[kind]) + 1)
    assert kind(*values) == kind(**dict(zip(ORDER_OF_PARTS[kind], values, strict=True)))


@pytest.mark.parametrize("kind", [*ORDER, *ORDER_OF_PARTS], ids=lambda kind: kind.__name__)
def test_default_configurations_set_no_field(kind):
    unset = {f.name: getattr(kind(), f.name) for f in dataclasses.fields(kind)}
    assert set(unset.values()) <= {None, "auto", "any", False}


def test_num_splits_of_zero_leaves_the_splits_to_the_heuristics():
    assert configs.PageAttentionConfig(num_splits=0) == configs.PageAttentionConfig()


def test_a_field_that_repeats_an_argument_may_not_contradict_it():
    x, gate = jnp.ones((1, 4, 2, 4)), jnp.ones((1, 4, 2))
    sparse = functools.partial(ejkernel.explain, native_sparse_attention, x, x, x, gate, block_size=2)
    assert sparse(cfg=configs.NativeSparseAttentionConfig(block_size=2)).forward.implementation.name == "xla"
    with pytest.raises(ValueError, match="cfg: got block_size=4, wants the call's 2; give the argument block_size"):
        sparse(cfg=configs.NativeSparseAttentionConfig(block_size=4))
    arrays = x, -jnp.ones(2), x[:, :, :1], x[:, :, :1], jnp.ones(2), jnp.ones((1, 4, 2))
    same = configs.StateSpaceV2Config(n_groups=1, use_gated_rmsnorm=False, rmsnorm_eps=1e-5)
    assert ejkernel.explain(state_space_v2, *arrays, cfg=same).forward.implementation.name == "xla"
    for field, value in {"n_groups": 2, "use_gated_rmsnorm": True, "rmsnorm_eps": 1e-3}.items():
        with pytest.raises(ValueError, match=f"cfg: got {field}={value}, wants the call's"):
            state_space_v2(*arrays, cfg=configs.StateSpaceV2Config(**{field: value}))


def test_tiling_of_xla_may_be_bypassed_and_is():
    lhs, rhs, sizes = jnp.ones((8, 4)), jnp.ones((2, 4, 3)), jnp.array([3, 5])
    got = grouped_matmul(lhs, rhs, sizes, cfg=configs.GroupedMatmulConfig(bypass_xla_tiling=True))
    assert (got == grouped_matmul(lhs, rhs, sizes)).all()
