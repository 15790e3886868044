"""The TPU kernels that JAX ships, as workloads that a profile can build by name."""

# ruff: noqa: TID251 - these are the peers
import dataclasses
import importlib
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental.pallas.ops.tpu import flash_attention as flash_module
from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_kernel, splash_attention_mask

from ejkernel import modules as library
from ejkernel.modules.operations.configs import GroupedMatmulConfig
from ejkernel_pallas.tpu.profile import Workload

HEADS, LENGTH, SIZE = 8, 4096, 128
SCALE = SIZE**-0.5
# Two products of the length squared, of which the causal mask leaves half; the gradients take five more.
FORWARD = 4 * HEADS * LENGTH**2 * SIZE / 2
BACKWARD = 3.5 * FORWARD


def shape(*sizes: int, dtype: Any = jnp.bfloat16) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(sizes, dtype)


def flash(block: int, gradient: bool = False) -> Workload:
    """Flash attention, causal; with the gradients of its sum."""
    names = (field.name for field in dataclasses.fields(flash_module.BlockSizes) if field.name != "block_b")
    sizes = flash_module.BlockSizes(block_b=1, **dict.fromkeys(names, block))

    def forward(query: Any, key: Any, value: Any) -> Any:
        return flash_module.flash_attention(query, key, value, causal=True, sm_scale=SCALE, block_sizes=sizes)

    return _attention(forward, (), shape(1, HEADS, LENGTH, SIZE), gradient)


def splash(block_q: int, block_kv: int, gradient: bool = False) -> Workload:
    """Splash attention, causal; with the gradients of its sum."""
    names = ("block_q_dkv", "block_kv_dkv", "block_kv_dkv_compute", "block_q_dq", "block_kv_dq")
    rest = {name: block_q if "_q_" in name else block_kv for name in names} if gradient else {}
    sizes = splash_attention_kernel.BlockSizes(
        block_q=block_q, block_kv=block_kv, block_kv_compute=min(block_kv, 1024), **rest
    )
    mask = splash_attention_mask.MultiHeadMask([splash_attention_mask.CausalMask((LENGTH, LENGTH))] * HEADS)
    made = splash_attention_kernel.make_splash_mha(mask, head_shards=1, q_seq_shards=1, block_sizes=sizes)

    def forward(kernel: Any, query: Any, key: Any, value: Any) -> Any:
        return kernel(query, key, value)

    return _attention(forward, (jax.tree.map(np.asarray, made),), shape(HEADS, LENGTH, SIZE), gradient)


def _attention(forward: Any, extra: tuple[Any, ...], array: jax.ShapeDtypeStruct, gradient: bool) -> Workload:
    def total(arrays: Any, *first: Any) -> Any:
        return forward(*first, *arrays).astype(jnp.float32).sum()

    def both(*args: Any) -> Any:
        return jax.grad(total)(args[len(extra) :], *args[: len(extra)])

    function, flops = (both, BACKWARD) if gradient else (forward, FORWARD)
    return Workload(function=function, args=(*extra, array, array, array), flops=flops)


def grouped_matmul(tiling: Any, sizes: Any = None, m: int = 8192, k: int = 4096, n: int = 4096) -> Workload:
    """Megablox; with 8 groups of the same size unless sizes are given."""
    gmm = importlib.import_module("jax.experimental.pallas.ops.tpu.megablox.gmm")

    def function(rows: Any, weights: Any, sizes: Any) -> Any:
        return gmm.gmm(rows, weights, sizes, preferred_element_type=jnp.bfloat16, tiling=tiling)

    groups = np.array(sizes or [m // 8] * 8, np.int32)
    return Workload(function=function, args=(shape(m, k), shape(len(groups), k, n), groups), flops=2 * m * n * k)


def our_grouped_matmul(tiling: Any = None, sizes: Any = None, m: int = 8192, k: int = 4096, n: int = 4096) -> Workload:
    """The library's, as `grouped_matmul`; with the tiles that it chooses unless some are given."""
    tiles = dict(zip(("block_m", "block_k", "block_n"), tiling or (), strict=False))
    cfg = GroupedMatmulConfig(**tiles) if tiles else None

    def function(rows: Any, weights: Any, sizes: Any) -> Any:
        options: dict[str, Any] = {"preferred_element_type": jnp.bfloat16, "platform": "pallas", "cfg": cfg}
        return library.grouped_matmul(rows, weights, sizes, **options)

    groups = np.array(sizes or [m // 8] * 8, np.int32)
    return Workload(function=function, args=(shape(m, k), shape(len(groups), k, n), groups), flops=2 * m * n * k)


def ragged_pages(queries: int, page: int = 16, pages: int = 64, q_block: int = 8) -> Workload:
    """Ragged paged attention: 16 sequences with 2048 tokens in the cache, of which `queries` are new."""
    module = importlib.import_module("jax.experimental.pallas.ops.tpu.ragged_paged_attention.kernel")
    sequences, length, heads, kv_heads = 16, 2048, 32, 8
    per_sequence = length // page

    def function(*args: Any) -> Any:
        return module.ragged_paged_attention(
            *args,
            sm_scale=SCALE,
            num_kv_pages_per_block=pages,
            num_queries_per_block=q_block,
            vmem_limit_bytes=48 << 20,
        )

    table = np.random.default_rng(0).permutation(sequences * per_sequence).astype(np.int32)
    args = (
        shape(sequences * queries, heads, SIZE),
        shape(sequences * per_sequence, page, 2 * kv_heads, SIZE),
        np.full(sequences, length, np.int32),
        table.reshape(sequences, per_sequence),
        (np.arange(sequences + 1) * queries).astype(np.int32),
        np.array([sequences], np.int32),
    )
    pairs = sequences * queries * (length - (queries - 1) / 2)
    return Workload(function=function, args=args, flops=4 * pairs * heads * SIZE)
