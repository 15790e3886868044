"""ejkernel's TPU kernels as workloads that a profile can build by name, in the shapes of `_tpu_peers.py`."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from ejkernel.modules import flash_attention, ragged_page_attention_v2
from ejkernel_pallas.tpu.profile import Workload

HEADS, LENGTH, SIZE = 8, 4096, 128
FORWARD = 4 * HEADS * LENGTH**2 * SIZE / 2


def attention(gradient: bool = False) -> Workload:
    """Flash attention, causal, with the tiles that the chip gets by default; with the gradients of its sum."""

    def forward(query: Any, key: Any, value: Any) -> Any:
        return flash_attention(query, key, value, causal=True, platform="pallas")

    def both(*arrays: Any) -> Any:
        return jax.grad(lambda arrays: forward(*arrays).astype(jnp.float32).sum())(arrays)

    array = jax.ShapeDtypeStruct((1, LENGTH, HEADS, SIZE), jnp.bfloat16)
    function, flops = (both, 3.5 * FORWARD) if gradient else (forward, FORWARD)
    return Workload(function=function, args=(array, array, array), flops=flops)


def pages(queries: int, page: int = 16) -> Workload:
    """Ragged paged attention: 16 sequences with 2048 tokens in the cache, of which `queries` are new."""
    sequences, length, heads, kv_heads = 16, 2048, 32, 8
    per_sequence = length // page

    def function(*args: Any) -> Any:
        return ragged_page_attention_v2(*args, platform="pallas")

    table = np.random.default_rng(0).permutation(sequences * per_sequence).astype(np.int32)
    args = (
        jax.ShapeDtypeStruct((sequences * queries, heads, SIZE), jnp.bfloat16),
        jax.ShapeDtypeStruct((sequences * per_sequence, page, 2 * kv_heads, SIZE), jnp.bfloat16),
        np.full(sequences, length, np.int32),
        table.reshape(sequences, per_sequence),
        (np.arange(sequences + 1) * queries).astype(np.int32),
        np.array([sequences], np.int32),
    )
    pairs = sequences * queries * (length - (queries - 1) / 2)
    return Workload(function=function, args=args, flops=4 * pairs * heads * SIZE)
