"""Forward pass of selected attention: three softmaxes, of which two are tiled attention, and their gated sum."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from ejkernel.families.selected_attention import (
    BranchResiduals,
    SelectedAttention,
    SelectedResiduals,
    select,
    token_lists,
)
from ejkernel.families.selected_attention import branches as selected_branches
from ejkernel.families.selected_attention.branches import DenseKernel
from ejkernel.families.selected_attention.token_lists import TokenListKernel
from ejkernel.families.tiled_attention import TiledAttention
from ejkernel.families.token_sparse_attention import TokenSparseAttention
from ejkernel.types.pullback import Pullback
from ejkernel_xla.selected_attention.config import SelectedTiles
from ejkernel_xla.selected_attention.kernels.lists import (
    arrange_operands,
    fold_block_readers,
    make_plan,
    put,
    sort_queries_by_block,
    take,
    ungroup_query_heads,
)
from ejkernel_xla.selected_attention.kernels.scores import (
    OuterStep,
    accumulator,
    block_scores,
    dot,
    keys_of_block,
    queries_of_step,
)
from ejkernel_xla.selected_attention.plan import reads_token_lists
from ejkernel_xla.tiled_attention import backward as tiled_backward
from ejkernel_xla.tiled_attention import config as tiled_tiles
from ejkernel_xla.tiled_attention import forward as tiled_forward
from ejkernel_xla.tiled_attention import plan as blocks
from ejkernel_xla.tiled_attention.forward import finite
from ejkernel_xla.token_sparse_attention import backward as list_backward
from ejkernel_xla.token_sparse_attention import config as list_tiles
from ejkernel_xla.token_sparse_attention import forward as list_forward


def forward(record: SelectedAttention, config: SelectedTiles) -> tuple[jax.Array, SelectedResiduals]:
    """Returns output and residuals of a record.

    Args:
        record: The canonical arguments.
        config: Tile sizes.

    Returns:
        [B, T, H, Dv] in the query's dtype, and the residuals for the backward pass.
    """
    if reads_token_lists(record):
        return token_lists.forward(record, TOKEN_LIST_KERNEL, DENSE_KERNEL)
    return selected_branches.forward(
        record, lambda listed: _selected_branch(listed, config), _select_blocks, DENSE_KERNEL
    )


def _select_blocks(record: SelectedAttention, compressed: BranchResiduals | None) -> jax.Array:
    return select(record)


def _dense_forward(record: TiledAttention) -> Any:
    params: Any = tiled_tiles.heuristic(record, None, "forward")
    return tiled_forward.forward(record, params)


def _dense_backward(pullback: Pullback) -> dict[str, jax.Array]:
    params: Any = tiled_tiles.heuristic(pullback.record, None, "backward")
    return tiled_backward.backward(pullback, params)


DENSE_KERNEL = DenseKernel(_dense_forward, _dense_backward)
"""The branches that are tiled attention."""


def _forward_of_lists(record: TokenSparseAttention) -> Any:
    return list_forward.forward(record, list_tiles.heuristic(record, None, "forward"))


def _backward_of_lists(pullback: Pullback) -> dict[str, jax.Array]:
    return list_backward.backward(pullback, list_tiles.heuristic(pullback.record, None, "backward"))


TOKEN_LIST_KERNEL = TokenListKernel(_forward_of_lists, _backward_of_lists)
"""The selected branch and the window of calls that read lists of tokens."""


class OnlineSoftmax(NamedTuple):
    """Online softmax of the queries of a step.

    Attributes:
        row_max: [t, g], largest score so far.
        row_sum: [t, g], sum of exp(score - row_max).
        acc: [t, g, v], sum of exp(score - row_max) times values.
    """

    row_max: jax.Array
    row_sum: jax.Array
    acc: jax.Array


def _selected_branch(record: SelectedAttention, config: SelectedTiles) -> BranchResiduals:
    """Returns the selected branch."""
    (rows, tokens, heads, _), values = record.query.shape, record.value.shape[3]
    if not record.query.size:  # loops over tiles would read one
        lse = jnp.zeros((rows, heads, tokens), accumulator(record))
        return BranchResiduals(output=jnp.zeros((rows, tokens, heads, values), record.query.dtype), lse=lse)
    plan = make_plan(record, config)
    operands, dtype = arrange_operands(record, plan), accumulator(record)
    shape, size = (plan.queries, plan.group), record.value.shape[3]
    empty = OnlineSoftmax(jnp.full(shape, -jnp.inf, dtype), jnp.zeros(shape, dtype), jnp.zeros((*shape, size), dtype))

    def step(n: jax.Array, state: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
        at = OuterStep(*plan.step_at(n))

        def read(c: jax.Array, rows: jax.Array, running: OnlineSoftmax) -> OnlineSoftmax:
            start = operands.starts[c]
            scores, _, _ = block_scores(record, operands, plan, at, start, rows)
            value = keys_of_block(operands.value, at, start, record.block_size)
            return _online_softmax_step(running, rows, scores, value)

        # Blocks outside, their readers inside: a block is loaded once, and the running softmax of its readers is
        # gathered and scattered.
        readers = sort_queries_by_block(queries_of_step(operands.listed, plan, at), plan)
        running = fold_block_readers(readers, plan, read, empty)
        attends = running.row_sum > 0
        denominator = jnp.where(attends, running.row_sum, 1)
        lse = jnp.where(attends, jnp.log(denominator) + finite(running.row_max), -jnp.inf)
        output = (running.acc / denominator[..., None]).astype(record.query.dtype)
        offsets = (at.batch, at.head, at.query, 0)
        return blocks.put(state[0], (*offsets, 0), output[None, None]), blocks.put(state[1], offsets, lse[None, None])

    lead = (plan.batch, plan.heads, plan.tiles * plan.queries, plan.group)
    state = jnp.zeros((*lead, size), record.query.dtype), jnp.zeros(lead, dtype)
    output, lse = lax.fori_loop(jnp.int32(0), jnp.int32(plan.steps), step, state)
    length = record.query.shape[1]
    return BranchResiduals(
        output=ungroup_query_heads(output, length),
        lse=ungroup_query_heads(lse[..., None], length)[..., 0].swapaxes(1, 2),
    )


def _online_softmax_step(running: OnlineSoftmax, rows: jax.Array, scores: jax.Array, value: jax.Array) -> OnlineSoftmax:
    """Returns one step of the online softmax of some queries, over a block of values [k, v]."""
    # No query lists a block twice, so no two rows of a product are the same query.
    previous_max = take(running.row_max, rows)
    row_max = jnp.maximum(previous_max, jnp.max(scores, axis=-1))
    shift = finite(row_max)
    weights, alpha = jnp.exp(scores - shift[..., None]), jnp.exp(previous_max - shift)
    row_sum = alpha * take(running.row_sum, rows) + jnp.sum(weights, axis=-1)
    acc = alpha[..., None] * take(running.acc, rows) + dot("pgk,kv->pgv", weights.astype(value.dtype), value)
    return OnlineSoftmax(
        put(running.row_max, rows, row_max), put(running.row_sum, rows, row_sum), put(running.acc, rows, acc)
    )
