"""Backward pass of the selected branch, by recomputation of the scores.

With the cotangent do of the branch, its softmax p = exp(s - lse) and delta_i = <do_i, o_i>:

    dv_j = sum_i p_ij do_i
    ds_ij = p_ij (<do_i, v_j> - delta_i)
    dq_i = scale sum_j ds_ij k_j
    dk_j = scale sum_i ds_ij q_i

An empty slot is in no block's list, and so adds to nothing.
"""

import jax
import jax.numpy as jnp
from jax import lax

from ejkernel.families.selected_attention import BranchResiduals, SelectedAttention, token_lists
from ejkernel.families.selected_attention import branches as selected_branches
from ejkernel.types.pullback import Pullback
from ejkernel_xla.selected_attention.config import SelectedTiles
from ejkernel_xla.selected_attention.forward import DENSE_KERNEL, TOKEN_LIST_KERNEL
from ejkernel_xla.selected_attention.kernels.lists import (
    Operands,
    SelectedPlan,
    add,
    arrange_operands,
    fold_block_readers,
    group_query_heads,
    make_plan,
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
from ejkernel_xla.tiled_attention import plan as blocks
from ejkernel_xla.tiled_attention.forward import finite

Gradients = dict[str, jax.Array]


def backward(pullback: Pullback, config: SelectedTiles) -> Gradients:
    """Returns gradients of the requested fields of a record.

    Args:
        pullback: Record, residuals, output and its cotangent, and the requested names.
        config: Tile sizes.

    Returns:
        Each requested gradient, in its field's shape and dtype.
    """

    if reads_token_lists(pullback.record):
        return token_lists.backward(pullback, TOKEN_LIST_KERNEL, DENSE_KERNEL)

    def selected(
        record: SelectedAttention, branch: BranchResiduals, cotangent: jax.Array, grad_fields: frozenset[str]
    ) -> Gradients:
        return _selected_branch_gradients(record, branch, cotangent, config)

    return selected_branches.backward(pullback, selected, DENSE_KERNEL)


def _selected_branch_gradients(
    record: SelectedAttention, branch: BranchResiduals, cotangent: jax.Array, config: SelectedTiles
) -> Gradients:
    """Returns gradients of query, key and value in the selected branch."""
    if not record.query.size:
        return {name: jnp.zeros_like(getattr(record, name)) for name in ("query", "key", "value")}
    plan = make_plan(record, config)
    operands, dtype = arrange_operands(record, plan), accumulator(record)
    delta = jnp.sum(cotangent.astype(dtype) * branch.output.astype(dtype), axis=-1, keepdims=True)
    rows = {
        "cotangent": group_query_heads(cotangent, plan),
        "delta": group_query_heads(delta, plan)[..., 0],
        "lse": group_query_heads(finite(branch.lse).swapaxes(1, 2)[..., None], plan)[..., 0],
    }
    grads = {name: jnp.zeros(getattr(operands, name).shape, dtype) for name in ("query", "key", "value")}

    def step(n: jax.Array, grads: Gradients) -> Gradients:
        at = OuterStep(*plan.step_at(n))
        query_rows = {name: queries_of_step(x, plan, at) for name, x in rows.items()}
        # dq of this step's queries alone is scattered to; it is small, and stays in a cache.
        carry = {**grads, "query": jnp.zeros((plan.queries, *grads["query"].shape[3:]), dtype)}
        readers = sort_queries_by_block(queries_of_step(operands.listed, plan, at), plan)

        def read(c: jax.Array, lines: jax.Array, carry: Gradients) -> Gradients:
            return _add_block_gradients(record, operands, plan, at, query_rows, (c, lines), carry)

        carry = fold_block_readers(readers, plan, read, carry)
        offsets = (at.batch, at.head, at.query, 0, 0)
        return {**carry, "query": blocks.put(grads["query"], offsets, carry["query"][None, None])}

    grads = lax.fori_loop(jnp.int32(0), jnp.int32(plan.steps), step, grads)
    length, keys = record.query.shape[1], record.key.shape[1]
    return {
        "query": ungroup_query_heads(grads["query"], length),
        **{name: grads[name][:, :, :keys].transpose(0, 2, 1, 3) for name in ("key", "value")},
    }


def _add_block_gradients(
    record: SelectedAttention,
    operands: Operands,
    plan: SelectedPlan,
    at: OuterStep,
    query_rows: dict[str, jax.Array],
    listed_block: tuple[jax.Array, jax.Array],
    grads: Gradients,
) -> Gradients:
    """Adds what some queries of one block contribute; the query's gradient is [t, g, d], of its step alone."""
    block, rows = listed_block
    start = operands.starts[block]
    scores, query, key = block_scores(record, operands, plan, at, start, rows)
    value = keys_of_block(operands.value, at, start, record.block_size)
    cotangent = take(query_rows["cotangent"], rows)
    # Rows that fill up a tile have scores of -inf: weights of 0, and gradients that go nowhere. Both are selected: lse
    # is NaN in rows that are not finite.
    masked = scores == -jnp.inf
    weights = jnp.where(masked, 0, jnp.exp(scores - take(query_rows["lse"], rows)[..., None]))
    dweights = dot("pgv,kv->pgk", cotangent, value)
    dscores = weights * (dweights - take(query_rows["delta"], rows)[..., None]) * record.softmax_scale
    dscores = jnp.where(masked, 0, dscores)
    dscores, weights = dscores.astype(key.dtype), weights.astype(value.dtype)
    offsets = (at.batch, at.head, start, 0)
    return {
        "query": add(grads["query"], rows, dot("pgk,kd->pgd", dscores, key)),
        "key": blocks.add(grads["key"], offsets, dot("pgk,pgd->kd", dscores, query)[None, None]),
        "value": blocks.add(grads["value"], offsets, dot("pgk,pgv->kv", weights, cotangent)[None, None]),
    }
