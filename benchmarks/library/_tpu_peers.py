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

from ejkernel_pallas.tpu.profile import Workload

HEADS, LENGTH, SIZE = 8, 4096, 128
SCALE = SIZE**-0.5
# Two products of the length squared, of which the causal mask leaves half; the gradients take five more.
FORWARD = 4 * HEADS * LENGTH**2 * SIZE / 2
BACKWARD = 3.5 * FORWARD
# Query, key, value and output; backward all of these with the output's gradient and three more.
FORWARD_BYTES, BOTH_BYTES = (count * HEADS * LENGTH * SIZE * 2 for count in (4, 12))
M, K, N, EXPERTS = 8192, 4096, 4096, 8
GROUPED_BYTES = 2 * (M * K + EXPERTS * K * N + M * N)


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
    rest: dict[str, Any] = {name: block_q if "_q_" in name else block_kv for name in names if gradient}
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

    args = (*extra, array, array, array)
    if gradient:
        return Workload(function=both, args=args, flops=BACKWARD, min_hbm_bytes=BOTH_BYTES)
    return Workload(function=forward, args=args, flops=FORWARD, min_hbm_bytes=FORWARD_BYTES)


def grouped_matmul(tiling: Any, sizes: Any = None, of: str = "output") -> Workload:
    """Megablox: the output, or the gradient of `"lhs"` or `"rhs"`; 8 groups of the same size unless some are given."""
    gmm = importlib.import_module("jax.experimental.pallas.ops.tpu.megablox.gmm")
    groups = np.array(sizes or [M // EXPERTS] * EXPERTS, np.int32)
    rows, columns, matrices = shape(M, K), shape(M, N), shape(EXPERTS, K, N)
    m, k, n = tiling

    def output(rows: Any, matrices: Any, sizes: Any) -> Any:
        return gmm.gmm(rows, matrices, sizes, preferred_element_type=jnp.bfloat16, tiling=tiling)

    def lhs(columns: Any, matrices: Any, sizes: Any) -> Any:
        options: Any = {"preferred_element_type": jnp.bfloat16, "tiling": (m, n, k), "transpose_rhs": True}
        return gmm.gmm(columns, matrices, sizes, **options)

    def rhs(rows: Any, columns: Any, sizes: Any) -> Any:
        return gmm.tgmm(rows.T, columns, sizes, preferred_element_type=jnp.bfloat16, tiling=tiling)

    made: Any = {"output": (output, rows, matrices), "lhs": (lhs, columns, matrices), "rhs": (rhs, rows, columns)}
    function, *args = made[of]
    return Workload(function=function, args=(*args, groups), flops=2 * M * N * K, min_hbm_bytes=GROUPED_BYTES)


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
    size = 2 * sequences * SIZE * (2 * length * kv_heads + 2 * queries * heads)  # the cache, queries and output
    return Workload(function=function, args=args, flops=4 * pairs * heads * SIZE, min_hbm_bytes=size)
