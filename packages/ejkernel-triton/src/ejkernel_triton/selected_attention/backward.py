"""Backward pass of selected attention in Triton, without atomics.

With p = exp(s - lse), a branch's cotangent do and delta_i = <do_i, o_i>:

    dv_j  = sum_i p_ij do_i
    ds_ij = p_ij (<do_i, v_j> - delta_i)
    dq_i  = scale sum_j ds_ij k_j
    dk_j  = scale sum_i ds_ij q_i

Memory in addition to the gradients, per batch row and KV head: an integer per slot of the lists, and float32 gradients
of `2 T N // list_length` blocks.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp

from ejkernel.arithmetic import LOG2E, cdiv
from ejkernel.families.selected_attention import BranchResiduals, SelectedAttention
from ejkernel.families.selected_attention import branches as selected_branches
from ejkernel.types.pullback import Pullback
from ejkernel_triton.launch import ShapeDtype, launch
from ejkernel_triton.selected_attention.config import SelectedBackward, group_size
from ejkernel_triton.selected_attention.forward import kernel_inputs
from ejkernel_triton.selected_attention.plan import DENSE_KERNEL, QueryLists, block_ends, invert_block_lists
from ejkernel_triton.selected_attention.spec import SelectedSpec, make_spec
from ejkernel_triton.sizes import pad_to_dot_size

Gradients = dict[str, jax.Array]
PerQueryInputs = tuple[jax.Array, jax.Array, jax.Array]


def backward(pullback: Pullback, config: SelectedBackward) -> Gradients:
    """Returns the gradients of the requested fields of a record.

    Args:
        pullback: Record, residuals, output and its cotangent, and the names of the requested fields.
        config: Tiles, warps and stages of the selected branch.

    Returns:
        The gradient of each requested field, in its shape and dtype.
    """
    selected = functools.partial(selected_gradients, config=config)
    return selected_branches.backward(pullback, selected, DENSE_KERNEL)


def selected_gradients(
    record: SelectedAttention,
    branch: BranchResiduals,
    cotangent: jax.Array,
    requested_fields: frozenset[str],
    config: SelectedBackward,
) -> Gradients:
    """Returns the requested gradients of query, key and value in the selected branch."""
    delta = jnp.sum(cotangent.astype(jnp.float32) * branch.output.astype(jnp.float32), axis=-1)
    lse = branch.lse.swapaxes(1, 2) * LOG2E
    per_query_inputs = (cotangent, jnp.where(lse == -jnp.inf, 0, lse), delta)
    spec = make_spec(record)
    gradients: Gradients = {}
    if "query" in requested_fields:
        gradients["query"] = _query_gradients(record, per_query_inputs, spec, config)
    if requested_fields & {"key", "value"}:
        gradients["key"], gradients["value"] = _key_gradients(record, per_query_inputs, spec, config)
    return gradients


def _query_gradients(
    record: SelectedAttention, per_query_inputs: PerQueryInputs, spec: SelectedSpec, config: SelectedBackward
) -> jax.Array:
    from ejkernel_triton.selected_attention.kernels.selected_bwd_dq import selected_bwd_dq_kernel

    (dquery,) = launch(
        selected_bwd_dq_kernel,
        (*kernel_inputs(record), *per_query_inputs),
        [ShapeDtype(record.query.shape, record.query.dtype)],
        batch=record.query.shape[0],
        grid=spec.T * spec.HK * record.query.shape[0],
        num_warps=config.num_warps,
        num_stages=config.num_stages,
        constants={"spec": spec, "BLOCK_KV": config.block_kv},
    )
    return dquery


def _key_gradients(
    record: SelectedAttention, per_query_inputs: PerQueryInputs, spec: SelectedSpec, config: SelectedBackward
) -> tuple[jax.Array, jax.Array]:
    from ejkernel_triton.selected_attention.kernels.selected_bwd_dkdv import selected_bwd_dkdv_kernel

    query_lists, key_ends = invert_block_lists(record, config.list_length), block_ends(record)
    query, key, value, _, block_starts, q_positions, q_ids, k_ids = kernel_inputs(record)
    batch, list_splits = record.query.shape[0], query_lists.list_splits.shape[2]
    tiles = cdiv(spec.BLOCK_SIZE, config.key_block_kv)
    sum_shapes = [
        (batch, spec.HK, query_lists.num_sum_slots, tiles, config.key_block_kv, width) for width in (spec.BD, spec.BV)
    ]
    shapes = [ShapeDtype(record.key.shape, record.key.dtype), ShapeDtype(record.value.shape, record.value.dtype)]
    gradients = launch(
        selected_bwd_dkdv_kernel,
        (
            *(query, key, value, query_lists.tokens, query_lists.list_splits),
            *(block_starts, key_ends, q_positions, q_ids, k_ids, *per_query_inputs),
        ),
        [*shapes, *(ShapeDtype(x, jnp.float32) for x in sum_shapes)],
        batch=batch,
        grid=tiles * list_splits * spec.HK * batch,
        num_warps=config.key_warps,
        num_stages=config.key_stages,
        constants={
            "spec": spec,
            "BLOCK_KV": config.key_block_kv,
            "BLOCK_Q": config.block_q,
            "ROWS": pad_to_dot_size(config.block_q * group_size(record)),
            "NUM_SPLITS": list_splits,
            "NUM_SUM_SLOTS": query_lists.num_sum_slots,
        },
    )
    dkey, dvalue = _merge_split_lists(record, gradients, query_lists, (block_starts, key_ends), spec, config)
    ids = record.kv_segment_ids
    # Padding is in no block's list, and possibly in no block.
    return selected_branches.zero_padding(dkey, ids), selected_branches.zero_padding(dvalue, ids)


def _merge_split_lists(
    record: SelectedAttention,
    gradients: tuple[jax.Array, ...],
    query_lists: QueryLists,
    block_bounds: tuple[Any, Any],
    spec: SelectedSpec,
    config: SelectedBackward,
) -> tuple[jax.Array, ...]:
    """Returns the gradients of key and value, completed for blocks whose lists were split."""
    from ejkernel_triton.selected_attention.kernels.split_combine import split_combine_kernel

    dkey, dvalue, partial_dkey, partial_dvalue = gradients
    batch = record.query.shape[0]
    return launch(
        split_combine_kernel,
        (partial_dkey, partial_dvalue, query_lists.sum_slots, *block_bounds, dkey, dvalue),
        (5, 6),
        batch=batch,
        grid=cdiv(spec.BLOCK_SIZE, config.key_block_kv) * spec.M * spec.HK * batch,
        num_warps=8,
        num_stages=1,
        constants={"spec": spec, "BLOCK_KV": config.key_block_kv, "NUM_SUM_SLOTS": query_lists.num_sum_slots},
    )
