"""Attention to the blocks of keys that every query is given, or finds."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Integer

from ejkernel import _compat, modules
from ejkernel.compat.xla_utils import prepare_token_indices
from ejkernel.modules.operations.shared.shapes import check_dtype, check_shape


def native_spare_attention(
    q: Float[Array, "b t h d"],
    k: Float[Array, "b t g d"],
    v: Float[Array, "b t g v"],
    g_cmp: Float[Array, "b t h"] | None = None,
    g_slc: Float[Array, "b t h"] | None = None,
    block_indices: Integer[Array, "b t g s"] | None = None,
    block_counts: int | Integer[Array, "b t g"] = 16,
    block_size: int = 64,
    scale: float | None = None,
    cu_seqlens: Integer[Array, " n+1"] | None = None,
) -> Float[Array, "b t h v"]:
    """Calls `ejkernel.modules.native_sparse_attention`, which documents the arguments. The name is spelled as in
    `ejgpu`.

    Blocks that are given count, with or without `g_cmp`; the older package chose its own where there was `g_cmp`.

    Args:
        q: Its `query`.
        k: Its `key`.
        v: Its `value`.
        g_cmp: Gate of the compressed branch; None leaves it out.
        g_slc: Gate of the selected branch; None is 1.
        block_indices: Blocks that each token reads, such as `generate_block_indices` makes; what is no block is an
            empty slot. None selects them, for which `g_cmp` is needed.
        block_counts: How many of them count, or are selected.
        block_size: Tokens of a block.
        scale: Its `softmax_scale`.
        cu_seqlens: Cumulative lengths of packed sequences.

    Returns:
        [B, T, H, V] in q's dtype.

    Raises:
        ValueError: A shape, dtype or value is wrong.

    Example:
        ```python
        from ejkernel import ejgpu

        q, k, v = (ejgpu.numeric_gen(1, 64, heads, 16, dtype="float32", seed=heads) for heads in (4, 2, 2))
        blocks = ejgpu.generate_block_indices(1, 64, 2, 3, block_size=16)
        output = ejgpu.native_spare_attention(q, k, v, block_indices=blocks, block_counts=3, block_size=16)
        assert output.shape == (1, 64, 4, 16)
        ```
    """
    return modules.native_sparse_attention(
        q, k, v, g_cmp, g_slc, block_indices, block_counts, cu_seqlens, block_size=block_size, softmax_scale=scale
    )


def apply_native_spare_attention(
    q: Float[Array, "b t h d"],
    k: Float[Array, "b t g d"],
    v: Float[Array, "b t g v"],
    block_indices: Integer[Array, "b t g s"],
    block_counts: int | Integer[Array, "b t g"],
    block_size: int,
    scale: float | None = None,
    cu_seqlens: Integer[Array, " n+1"] | None = None,
    token_indices: Integer[Array, "t 2"] | None = None,
) -> Float[Array, "b t h v"]:
    """Returns the selected branch of `native_spare_attention` alone: attention to the blocks that are given.

    Args:
        q: [B, T, H, D] floating.
        k: [B, T, Hk, D], dtype of q.
        v: [B, T, Hk, V], dtype of q.
        block_indices: [B, T, Hk, S] int.
        block_counts: How many of the slots count.
        block_size: Tokens of a block.
        scale: Factor on the scores; None means `D ** -0.5`.
        cu_seqlens: Cumulative lengths of packed sequences.
        token_indices: `ejkernel.xla_utils.prepare_token_indices(cu_seqlens, T)`. Not needed, since it follows from
            cu_seqlens; it must agree, which is checked where both can be read.

    Returns:
        [B, T, H, V] in q's dtype.

    Raises:
        ValueError: A shape, dtype or value is wrong.
    """
    if token_indices is not None:
        _check_token_indices(token_indices, cu_seqlens, q.shape[1])
    return native_spare_attention(
        q, k, v, block_indices=block_indices, block_counts=block_counts, block_size=block_size, scale=scale,
        cu_seqlens=cu_seqlens,
    )  # fmt: skip


def _check_token_indices(token_indices: Any, cu_seqlens: jax.Array | None, tokens: int) -> None:
    if cu_seqlens is None:
        raise ValueError("token_indices: got a value without cu_seqlens, wants None: there is one sequence per row")
    check_shape("token_indices", token_indices, "T two", {"T": tokens, "two": 2})
    check_dtype("token_indices", token_indices, jnp.integer, "an integer dtype")
    if any(map(_compat.is_tracer, (token_indices, cu_seqlens))):
        return
    if not np.array_equal(token_indices, prepare_token_indices(cu_seqlens, tokens)):
        raise ValueError(
            "token_indices: got indices that cu_seqlens does not describe, wants prepare_token_indices(cu_seqlens)"
        )
