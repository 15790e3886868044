"""Triton kernels in the interpreter with tiles so small that a call has full tiles, partial ones and ends of groups.

Each call is compared with its family's reference. Run by `test_interpreted.py`.
"""

import jax
import jax.numpy as jnp
import numpy as np

from ejkernel.families import grouped_matmul, paged_attention, tiled_attention
from ejkernel_triton.grouped_matmul import forward as grouped
from ejkernel_triton.grouped_matmul.config import GroupedForward
from ejkernel_triton.paged_attention import forward as paged
from ejkernel_triton.paged_attention.config import PagedForward
from ejkernel_triton.tiled_attention import forward as tiled
from ejkernel_triton.tiled_attention.config import TritonForward

LAUNCH = {"num_warps": 1, "num_stages": 1}


def normal(seed, *shape):
    return jax.random.normal(jax.random.key(seed), shape)


def check_tiled_attention():
    """A band of 56 keys has partial tiles before its full ones and after them."""
    query, key, value = (normal(seed, 1, 96, 1, 16) for seed in range(3))
    record = tiled_attention.TiledAttention(
        query=query, key=key, value=value, softmax_scale=0.25, causal=True, sliding_window=(55, None)
    )
    (wanted, residuals) = tiled_attention.reference(record)
    output, found = tiled.forward(record, TritonForward(block_q=16, block_kv=16, **LAUNCH))
    np.testing.assert_allclose(output, wanted, rtol=2e-5, atol=2e-5)
    np.testing.assert_allclose(found.lse, residuals.lse, rtol=2e-5, atol=2e-5)


def check_paged_attention():
    """Key tiles that the first query of a tile attends whole, and the last one in part; two KV heads."""
    lens, q_lens = np.array([100, 37]), np.array([24, 5])
    record = paged_attention.PagedAttention(
        query=normal(0, int(q_lens.sum()), 4, 16),
        key_pages=normal(1, 32, 8, 2, 16),
        value_pages=normal(2, 32, 8, 2, 16),
        block_tables=jnp.arange(26, dtype=jnp.int32).reshape(2, 13)[:, ::-1],
        kv_lens=jnp.asarray(lens, jnp.int32),
        query_start=jnp.asarray(np.cumsum([0, *q_lens]), jnp.int32),
        softmax_scale=0.25,
        kv_layout="pshd",
        kv_heads=None,
        sliding_window=(20, 0),
    )
    (wanted, lse), _ = paged_attention.reference(record)
    (output, found), _ = paged.forward(record, PagedForward(block_q=8, block_kv=16, num_programs=3, **LAUNCH))
    np.testing.assert_allclose(output, wanted, rtol=2e-5, atol=2e-5)
    np.testing.assert_allclose(found, lse, rtol=2e-5, atol=2e-5)


def check_grouped_matmul():
    """Rows of no matrix at both ends, groups that end inside of tiles, and several steps along the contracted axis."""
    sizes = jnp.array([5, 20, 0, 35, 7, 16, 9], jnp.int32)
    for transposed in (False, True):
        record = grouped_matmul.GroupedMatmul(
            lhs=normal(0, 100, 40),
            rhs=normal(1, 5, *((24, 40) if transposed else (40, 24))),
            group_sizes=sizes,
            out_dtype=jnp.dtype(jnp.float32),
            left_over="zero",
            group_offset=jnp.int32(1),
            transpose_rhs=transposed,
        )
        config = GroupedForward(block_m=16, block_n=16, block_k=16, flatten=False, num_programs=3, **LAUNCH)
        output, _ = grouped.forward(record, config)
        np.testing.assert_allclose(output, grouped_matmul.reference(record)[0], rtol=2e-5, atol=2e-5)


if __name__ == "__main__":
    check_tiled_attention()
    check_paged_attention()
    check_grouped_matmul()
