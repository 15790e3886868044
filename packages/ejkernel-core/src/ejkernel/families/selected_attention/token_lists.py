"""The selected branch and the window as attention to lists of tokens, which copies only the listed keys.

    block_indices [B, T, Hk, N]  -->  tokens [B, T, Hk, N n]   n keys per block, up to the query's own
    positions [B, T]             -->  tokens [B, T, 1, W]      the newest W
    token -> index of its key        without pages: b S + token; with pages: table[token // S] S + token % S

The arrays of all rows or pages are reshaped, without a copy, to one row of keys, and all queries to one row of queries.
"""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from ejkernel.families.selected_attention.branches import (
    SHARED_FIELDS,
    DenseKernel,
    Gradients,
    attend_in_branches,
    dense_branch,
    dense_branch_gradients,
    sum_branch_gradients,
    with_zeroed_query_padding,
)
from ejkernel.families.selected_attention.record import (
    BranchResiduals,
    SelectedAttention,
    SelectedResiduals,
    num_keys,
    query_positions,
    select,
    starts,
)
from ejkernel.families.tiled_attention import SoftmaxResiduals
from ejkernel.families.token_sparse_attention import TokenSparseAttention
from ejkernel.planning.page_slots import slots_of_tokens
from ejkernel.types.pullback import Pullback


@dataclasses.dataclass(frozen=True)
class TokenListKernel:
    """The token-sparse attention of a backend.

    Attributes:
        forward: TokenSparseAttention -> (output, SoftmaxResiduals).
        backward: Pullback of such a record -> gradients.
    """

    forward: Callable[[TokenSparseAttention], Any]
    backward: Callable[[Pullback], Gradients]


def forward(
    record: SelectedAttention, list_kernel: TokenListKernel, dense_kernel: DenseKernel
) -> tuple[jax.Array, SelectedResiduals]:
    """Returns output and residuals of a record.

    Args:
        record: The canonical arguments.
        list_kernel: The kernel of the selected branch and of the window.
        dense_kernel: The kernel of the compressed branch.

    Returns:
        [B, T, H, Dv] in the query's dtype, and the residuals for the backward pass.
    """

    def attend(name: str, record: SelectedAttention) -> BranchResiduals | None:
        if name == "compressed":
            return dense_branch(name, record, dense_kernel)
        lists = _token_lists(record, name)
        if lists is None:
            return None
        output, residuals = list_kernel.forward(lists)
        return _split_rows(BranchResiduals(output=output, lse=residuals.lse), record)

    return attend_in_branches(with_zeroed_query_padding(record), attend, lambda record, _: select(record))


def backward(pullback: Pullback, list_kernel: TokenListKernel, dense_kernel: DenseKernel) -> Gradients:
    """Returns gradients of the requested fields of a record.

    Args:
        pullback: Record, residuals, output and its cotangent, and the requested names.
        list_kernel: The kernel of the selected branch and of the window.
        dense_kernel: The kernel of the compressed branch.

    Returns:
        Each requested gradient, in its field's shape and dtype.
    """
    record, grad_fields = with_zeroed_query_padding(pullback.record), pullback.grad_fields
    if record.block_indices is None:
        record = dataclasses.replace(record, block_indices=pullback.residuals.block_indices)

    def differentiate(name: str, branch: BranchResiduals, cotangent: jax.Array) -> Gradients:
        if name == "compressed":
            return dense_branch_gradients(record, name, branch, cotangent, grad_fields, dense_kernel)
        lists, shared = _token_lists(record, name), grad_fields & SHARED_FIELDS
        if lists is None or not shared:
            return {}
        pullback_of_lists = Pullback(
            record=lists,
            residuals=SoftmaxResiduals(lse=_join_lse(branch.lse)),
            output=_join_rows(branch.output),
            cotangent=_join_rows(cotangent),
            grad_fields=shared,
        )
        gradients = list_kernel.backward(pullback_of_lists)
        return {field: gradient.reshape(getattr(record, field).shape) for field, gradient in gradients.items()}

    return sum_branch_gradients(pullback, record, differentiate)


def _token_lists(record: SelectedAttention, name: str) -> TokenSparseAttention | None:
    """Returns the selected branch of a record with `block_indices`, or its window branch; None if it has no window."""
    if name == "selected":
        assert record.block_indices is not None  # selected by now
        first = starts(record)[jnp.maximum(record.block_indices, 0)][..., None]
        tokens = first + jnp.arange(record.block_size, dtype=jnp.int32)
        tokens = jnp.where(record.block_indices[..., None] >= 0, tokens, -1)
        return _attention_to_tokens(record, tokens.reshape(*record.block_indices.shape[:3], -1))
    if record.window_size is None:
        return None
    newest = jnp.arange(min(record.window_size, num_keys(record)), dtype=jnp.int32)
    return _attention_to_tokens(record, query_positions(record)[:, :, None, None] - newest)


def _attention_to_tokens(record: SelectedAttention, tokens: jax.Array) -> TokenSparseAttention:
    """Returns attention to tokens [B|1, T, Hk|1, K] int32 of each row, excluding those that a query may not read."""
    rows, queries = record.query.shape[:2]
    pages = record.key.shape[0], record.key.shape[1]
    row = jnp.arange(rows, dtype=jnp.int32)[:, None, None, None]
    tokens = jnp.broadcast_to(tokens, (rows, queries, *tokens.shape[2:]))
    may_read = (tokens >= 0) & (tokens <= query_positions(record)[:, :, None, None]) & (tokens < num_keys(record))
    if record.q_segment_ids is not None:
        ids = record.q_segment_ids[:, :, None, None]
        may_read &= ids >= 0
        if record.kv_segment_ids is not None:
            may_read &= record.kv_segment_ids[row, jnp.where(may_read, tokens, 0)] == ids
    tokens = jnp.where(may_read, tokens, -1)
    if record.block_tables is None:
        slots = jnp.where(may_read, row * pages[1] + tokens, -1)
    else:
        slots = slots_of_tokens(tokens, row, record.block_tables, pages)
    return TokenSparseAttention(
        query=_join_rows(record.query),
        key=_join_rows(record.key),
        value=_join_rows(record.value),
        indices=_join_rows(slots),
        softmax_scale=record.softmax_scale,
        value_size=record.value.shape[3],
    )


def _join_rows(x: jax.Array) -> jax.Array:
    """Returns [B, T, ...] -> [1, B T, ...]."""
    return x.reshape(1, x.shape[0] * x.shape[1], *x.shape[2:])


def _join_lse(lse: jax.Array) -> jax.Array:
    """Returns [B, H, T] -> [1, H, B T]."""
    return lse.swapaxes(0, 1).reshape(1, lse.shape[1], -1)


def _split_rows(branch: BranchResiduals, record: SelectedAttention) -> BranchResiduals:
    """Returns the residuals of each row; the inverse of `_join_rows`."""
    rows, queries, heads, _ = record.query.shape
    output = branch.output.reshape(rows, queries, heads, branch.output.shape[3])
    return BranchResiduals(output=output, lse=branch.lse.reshape(heads, rows, queries).swapaxes(0, 1))
