"""Backward pass of native sparse attention on TPUs.

With p = exp(s - lse), the selected branch's cotangent do and delta_i = <do_i, o_i>:

    dv_j  = sum_i p_ij do_i
    ds_ij = p_ij (<do_i, v_j> - delta_i)
    dq_i  = scale sum_j ds_ij k_j
    dk_j  = scale sum_i ds_ij q_i
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental.pallas import tpu as pltpu

from ejkernel.arithmetic import LOG2E
from ejkernel.families.selected_attention import BranchResiduals, SelectedAttention
from ejkernel.families.selected_attention import branches as selected_branches
from ejkernel.types.pullback import Pullback
from ejkernel_pallas.tpu.mosaic.vectors import LANES
from ejkernel_pallas.tpu.selected_attention import plan
from ejkernel_pallas.tpu.selected_attention.config import TpuSelected
from ejkernel_pallas.tpu.selected_attention.forward import (
    DENSE_KERNEL,
    item_scratch,
    key_tile_operand,
    query_tile_operand,
    row_statistics_operand,
    run_kernel,
)
from ejkernel_pallas.tpu.selected_attention.kernels.selected_bwd_dkdv import selected_bwd_dkdv
from ejkernel_pallas.tpu.selected_attention.kernels.selected_bwd_dq import selected_bwd_dq
from ejkernel_pallas.tpu.selected_attention.spec import SelectedSpec, make_spec

Gradients = dict[str, jax.Array]


def backward(pullback: Pullback, config: TpuSelected) -> Gradients:
    """Returns gradients of the requested fields of a record.

    Args:
        pullback: Record, residuals, output and its cotangent, and the requested names.
        config: Tile sizes of the selected branch.

    Returns:
        Each requested gradient, in its field's shape and dtype.
    """
    return selected_branches.backward(
        pullback, functools.partial(_selected_branch_gradients, config=config), DENSE_KERNEL
    )


def _selected_branch_gradients(
    record: SelectedAttention,
    branch: BranchResiduals,
    cotangent: jax.Array,
    grad_fields: frozenset[str],
    config: TpuSelected,
) -> Gradients:
    """Returns the requested gradients of query, key and value in the selected branch."""
    spec = make_spec(record, config, "backward")
    delta = jnp.sum(cotangent.astype(jnp.float32) * branch.output.astype(jnp.float32), axis=-1).swapaxes(1, 2)
    lse = jnp.where(branch.lse == -jnp.inf, 0.0, branch.lse * LOG2E)
    rows = {
        "cotangent": plan.arrange_query_rows(cotangent, spec, spec.value_width),
        "lse": plan.arrange_row_statistics(lse, spec),
        "delta": plan.arrange_row_statistics(delta, spec),
    }
    gradients: Gradients = {}
    if "query" in grad_fields:
        gradients["query"] = _query_gradient(record, rows, spec)
    if grad_fields & {"key", "value"}:
        gradients |= _key_gradients(record, rows, spec)
    return gradients


def _scratch(spec: SelectedSpec) -> dict[str, Any]:
    """Returns scratch memory of both kernels."""
    shape = (spec.block_q, spec.rows_per_token, LANES)
    return {
        "lse_in_all_lanes": pltpu.VMEM(shape, jnp.float32),
        "delta_in_all_lanes": pltpu.VMEM(shape, jnp.float32),
        "scores": item_scratch(spec, jnp.float32),
        "dweights": item_scratch(spec, jnp.float32),
        "dscores": item_scratch(spec, spec.operand_dtype),
    }


def _query_gradient(record: SelectedAttention, rows: dict[str, jax.Array], spec: SelectedSpec) -> jax.Array:
    (batch, kv_heads, tokens), shape = rows["cotangent"].shape[:3], (spec.rows_per_token, spec.key_width)
    dquery = jax.ShapeDtypeStruct((batch, kv_heads, tokens, *shape), jnp.float32)
    results = run_kernel(
        "bwd_dq",
        selected_bwd_dq,
        record,
        spec,
        inputs={
            name: (query_tile_operand if name == "cotangent" else row_statistics_operand)(spec, x)
            for name, x in rows.items()
        },
        outputs={"dquery": query_tile_operand(spec, dquery)},
        scratch={"acc": pltpu.VMEM((spec.block_q + 1, *shape), jnp.float32), **_scratch(spec)},
    )
    return plan.restore_query_rows(results["dquery"], spec, record.query.shape[3])


def _key_gradients(record: SelectedAttention, rows: dict[str, jax.Array], spec: SelectedSpec) -> Gradients:
    lead = (*rows["cotangent"].shape[:2], spec.num_key_tiles * spec.parts_per_tile, spec.padded_keys_per_part)
    results = run_kernel(
        "bwd_dkdv",
        selected_bwd_dkdv,
        record,
        spec,
        inputs={
            name: (query_tile_operand if name == "cotangent" else row_statistics_operand)(spec, x, True)
            for name, x in rows.items()
        },
        outputs={
            "dkey": key_tile_operand(spec, jax.ShapeDtypeStruct((*lead, spec.key_width), jnp.float32), True),
            "dvalue": key_tile_operand(spec, jax.ShapeDtypeStruct((*lead, spec.value_width), jnp.float32), True),
        },
        scratch={"weights": item_scratch(spec, spec.operand_dtype), **_scratch(spec)},
        accumulates_for_keys=True,
    )
    gradients = {"key": (results["dkey"], record.key), "value": (results["dvalue"], record.value)}
    return {
        name: selected_branches.zero_padding(plan.merge_key_parts(x, like, record, spec), record.kv_segment_ids)
        for name, (x, like) in gradients.items()
    }
