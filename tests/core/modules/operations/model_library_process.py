"""What a model library imports and calls, in the forms in which it does, on as many devices as the process has."""

import sys

import jax
import jax.numpy as jnp
import model_blocks
import numpy as np
import pytest
from jax.sharding import Mesh, PartitionSpec

from ejkernel import Backend, Platform, errors, kernel_registry, xla_utils
from ejkernel.callib import cdiv, ejit
from ejkernel.modules import (
    NativeSparseAttentionConfig,
    RingAttention,
    StateSpaceV2Config,
    lightning_attn,
    recurrent,
    recurrent_gla,
    ring_attention,
    scaled_dot_product_attention,
)
from ejkernel.modules.base import create_default_executor
from ejkernel.modules.operations import (
    FlashAttention,
    FlashAttentionConfig,
    GroupedMatmulConfig,
    attention,
    flash_attention,
    gated_delta_rule,
    gla_attention,
    grouped_matmul,
    unified_attention,
)
from ejkernel.ops import (
    AutotunePolicy,
    ConfigCache,
    ConfigSelectorChain,
    Executor,
    Invocation,
    Kernel,
    Tuner,
    device_fingerprint,
    forward_autotune_only,
    get_device_platform,
    get_invocations,
    policy_override,
    record_invocation,
    stable_json,
    vmap_with_config,
)
from ejkernel.types import MaskInfo

DEVICES = int(sys.argv[1])
Q = jax.random.normal(jax.random.key(0), (4, 8, 4, 8))
K, V = jax.random.normal(jax.random.key(1), (2, 4, 8, 2, 8))
SHAPE = {1: (1, 1), 4: (2, 2)}[DEVICES]


def mesh() -> Mesh:
    return Mesh(np.array(jax.devices()[:DEVICES]).reshape(SHAPE), ("dp", "tp"))


def close(got, want):
    jax.tree.map(lambda x, y: np.testing.assert_allclose(np.float32(x), np.float32(y), rtol=1e-4, atol=1e-4), got, want)


def attention_forms() -> None:
    want = flash_attention(Q, K, V, causal=True)
    close(flash_attention(query=Q, key=K, value=V, causal=True, platform=Platform.XLA), want)
    heads = PartitionSpec("dp", None, "tp")
    placed = {"mesh": mesh(), "in_specs": (heads,) * 3, "out_specs": heads}
    close(flash_attention(Q, K, V, causal=True, **placed), want)
    sinks = jnp.arange(4.0)
    specs = {**placed, "in_specs": (heads,) * 3 + (None,) * 3 + (PartitionSpec("tp"),)}
    split = flash_attention(Q, K, V, None, None, None, sinks, **specs)
    close(split, flash_attention(Q, K, V, softmax_aux=sinks))
    close(attention(Q, K, V, causal=True, return_weights=False), want)
    executor = Executor(ConfigSelectorChain(ConfigCache(), on_event=lambda *x, **y: None), stamp_prefix="model")
    close(executor(FlashAttention(), Q, K, V, causal=True, cfg=FlashAttentionConfig()), want)
    close(create_default_executor(enable_autotuning=False)(FlashAttention(), Q, K, V, causal=True), want)
    close(vmap_with_config(executor, FlashAttention())(Q[None], K[None], V[None], causal=True)[0], want)
    close(ejit(flash_attention, static_argnames="causal")(Q, K, V, causal=True), want)


def mesh_forms() -> None:
    """A mesh axis of size 1 splits nothing."""
    bias = jax.random.normal(jax.random.key(3), (4, 1, 8, 8))
    rows = PartitionSpec("dp")
    specs = (rows,) * 3 + (PartitionSpec("dp", None, "sp", None), None, None)
    line = Mesh(np.array(jax.devices()[:DEVICES]).reshape(DEVICES, 1), ("dp", "sp"))
    got = scaled_dot_product_attention(Q, K, V, bias, mesh=line, in_specs=specs, out_specs=rows)
    close(got, scaled_dot_product_attention(Q, K, V, bias))
    ring = Mesh(np.array(jax.devices()[:DEVICES]), ("sp",))
    tokens = PartitionSpec(None, "sp")
    options = {"mesh": ring, "in_specs": (tokens,) * 3, "out_specs": tokens, "axis_name": "sp", "causal": True}
    close(ring_attention(Q, K, V, **options), flash_attention(Q, K, V, causal=True))
    close(RingAttention().run(Q, K, V, **options), flash_attention(Q, K, V, causal=True))


def recurrence_forms() -> None:
    key, value = (jnp.repeat(x, 2, axis=2) for x in (K, V))
    for output, state in (recurrent(Q, key, value), recurrent_gla(Q, key, value)):
        close(output, gla_attention(Q, key, value))
        assert state.shape == (4, 4, 8, 8)
    output, state = lightning_attn(Q, key, value, layer_idx=0, num_layers=2)
    beta, decay = jnp.full((4, 8, 4), 0.5), jnp.full((4, 8, 4), -0.1)
    want = gated_delta_rule(Q, key, value, beta, decay, initial_state=state)
    close(gated_delta_rule(Q, key, value, beta, decay, state), want)
    one = [x[:, :1] for x in (Q, key, value, beta, decay)]
    assert gated_delta_rule(*one, state, platform="xla").shape == (4, 1, 4, 8)


class Halved(Kernel):
    """A kernel of the library's own."""

    def run(self, x, *, cfg):
        return x / cfg

    def heuristic_cfg(self, inv):
        return 2


def chain_forms() -> None:
    """Chains, policies and configurations with upstream's names, and an own kernel."""
    events = []
    chain = ConfigSelectorChain(
        ConfigCache(),
        AutotunePolicy(allow_autotune=False, validate_backward=False),
        persist_autotune=False,
        on_event=lambda name, operation, **about: events.append(name),
        forbid_reautotune=True,
    )
    executor = Executor(chain, stamp_prefix="library")
    with policy_override(chain, cache_miss_fallback="heuristics"):
        close(executor(FlashAttention(), Q, K, V, causal=True), flash_attention(Q, K, V, causal=True))
    assert "heuristics" in events
    close(executor(Halved("halved"), Q), Q / 2)
    tiles = GroupedMatmulConfig("auto", "any", bypass_xla_tiling=True)
    rows, matrices = jnp.ones((8, 16)), jnp.ones((2, 16, 4))
    close(grouped_matmul(rows, matrices, jnp.array([3, 5]), cfg=tiles), jnp.full((8, 4), 16.0))
    assert NativeSparseAttentionConfig(block_size=64).block_size == 64
    assert StateSpaceV2Config(n_groups=1, use_gated_rmsnorm=False, rmsnorm_eps=1e-5).n_groups == 1


def other_forms() -> None:
    rows, matrices = jnp.ones((8, 16), jnp.bfloat16), jnp.ones((2, 16, 4), jnp.float32)
    assert grouped_matmul(rows, matrices, jnp.array([3, 5]), use_v2=True).dtype == jnp.bfloat16
    pages = jax.random.normal(jax.random.key(4), (6, 4, 2, 8))
    tables, lengths = jnp.array([[0, 1], [2, 3]]), jnp.array([8, 5])
    step = unified_attention(Q[:2, 0], pages, pages, lengths, tables, jnp.array([0, 1, 2]), num_par_softmax_segments=2)
    cumulative = jnp.array([0, 8, 13])
    close(flash_attention(Q[:2, :1], pages, pages, cum_seqlens_k=cumulative, block_tables=tables)[:, 0], step)
    with pytest.raises(ValueError, match="must not decrease"):
        MaskInfo.from_cu_seqlens(jnp.array([0, 5, 3]), max_q_len=8)
    assert cdiv(7, 2) == xla_utils.cdiv(7, 2) == 4
    assert get_device_platform() == "cpu" == Backend.CPU
    assert device_fingerprint()
    assert stable_json({"x": Q}) == stable_json({"x": -Q})
    assert "flash_attention" in kernel_registry.list_algorithms()
    assert issubclass(errors.NoImplementationError, errors.EjkernelRuntimeError)
    record_invocation(Invocation("flash_attention", (Q, K, V)))
    assert get_invocations()
    with forward_autotune_only():
        assert Tuner(warmup=1, iters=2).timing_iterations == 2


def placed_block() -> None:
    """A layer whose attention is spread over the devices is the layer."""
    w = model_blocks.weights(jax.random.key(5), "gpt-oss")
    x = jax.random.normal(jax.random.key(6), (2, model_blocks.TOKENS, model_blocks.WIDTH), jnp.bfloat16)
    heads = PartitionSpec("dp", None, "tp")
    placed = {"mesh": mesh(), "in_specs": (heads,) * 3, "out_specs": heads}
    # Without a spec of their own the sinks follow the heads.
    np.testing.assert_allclose(
        np.float32(jax.jit(lambda x: model_blocks.block(x, w, **placed))(x)),
        np.float32(jax.jit(lambda x: model_blocks.block(x, w))(x)),
        rtol=2e-2,
        atol=2e-2,
    )


if __name__ == "__main__":
    assert jax.device_count() == DEVICES
    for check in (attention_forms, mesh_forms, recurrence_forms, chain_forms, other_forms, placed_block):
        check()
        print(check.__name__)
