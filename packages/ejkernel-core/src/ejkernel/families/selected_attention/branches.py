"""Selected attention: the sum of its branches, each computed by a backend's kernels.

With a gate g, a branch's output o and the output's cotangent do, which is the sum's:

    dg_i   = sum_v do_i o_i
    do'_i  = g_i do_i          the branch's own cotangent
"""

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp

from ejkernel.families.selected_attention.record import (
    GATE_FIELD_BY_BRANCH,
    BranchResiduals,
    SelectedAttention,
    SelectedResiduals,
    compressed,
    sum_of_gated_branches,
    window,
)
from ejkernel.families.tiled_attention import SoftmaxResiduals, TiledAttention
from ejkernel.families.tiled_attention.isolation import mark_nonfinite_rows_in_lse
from ejkernel.types.pullback import Pullback

Gradients = dict[str, jax.Array]
SHARED_FIELDS = frozenset({"query", "key", "value"})
SelectedBranchFunction = Callable[[SelectedAttention], BranchResiduals]
SelectBlocksFunction = Callable[[SelectedAttention, BranchResiduals | None], jax.Array]
BranchFunction = Callable[[str, SelectedAttention], BranchResiduals | None]
SelectedGradientsFunction = Callable[[SelectedAttention, BranchResiduals, jax.Array, frozenset[str]], Gradients]


@dataclasses.dataclass(frozen=True)
class DenseKernel:
    """The tiled attention of a backend, for the compressed branch and the window.

    Attributes:
        forward: TiledAttention -> (output, SoftmaxResiduals, ...).
        backward: Pullback of such a record -> gradients.
    """

    forward: Callable[[TiledAttention], Any]
    backward: Callable[[Pullback], Gradients]


def forward(
    record: SelectedAttention,
    run_selected_branch: SelectedBranchFunction,
    select_blocks: SelectBlocksFunction,
    dense_kernel: DenseKernel,
) -> tuple[jax.Array, SelectedResiduals]:
    """Returns output and residuals of a record.

    Args:
        record: The canonical arguments.
        run_selected_branch: Computes the selected branch of a record with block indices, and with zeros in the padding.
        select_blocks: (record, its compressed branch, if there is one) -> the blocks that are selected, [B, T, Hk, N]
            int32.
        dense_kernel: What attends in the other branches.

    Returns:
        [B, T, H, Dv] in the query's dtype, and the residuals for the backward pass.
    """

    def attend(name: str, record: SelectedAttention) -> BranchResiduals | None:
        return run_selected_branch(record) if name == "selected" else dense_branch(name, record, dense_kernel)

    return attend_in_branches(with_zeroed_padding(record), attend, select_blocks)


def attend_in_branches(
    record: SelectedAttention, attend: BranchFunction, select_blocks: SelectBlocksFunction
) -> tuple[jax.Array, SelectedResiduals]:
    """Returns output and residuals of a record.

    Args:
        record: The arguments, with zeros in the padding of queries and gates.
        attend: (name of a branch, record) -> the branch, or None where the record has no such branch. For `selected`,
            the record has block indices.
        select_blocks: As in `forward`.
    """
    branches, chosen, listed = dict[str, BranchResiduals](), None, record
    for name in ("compressed", "window"):
        if (branch := attend(name, record)) is not None:
            branches[name] = branch
    if record.block_indices is None:
        chosen = select_blocks(record, branches.get("compressed"))
        listed = dataclasses.replace(record, block_indices=chosen)
    if (branch := attend("selected", listed)) is not None:
        branches["selected"] = branch
    return sum_of_gated_branches(record, branches), SelectedResiduals(**branches, block_indices=chosen)


def dense_branch(name: str, record: SelectedAttention, dense_kernel: DenseKernel) -> BranchResiduals | None:
    """Returns the compressed branch or the window as tiled attention; None where the record has no such branch."""
    branch = compressed(record) if name == "compressed" else window(record)
    if branch is None:
        return None
    output, residuals, *_ = dense_kernel.forward(branch)
    return BranchResiduals(output=output, lse=residuals.lse)


def backward(
    pullback: Pullback, differentiate_selected_branch: SelectedGradientsFunction, dense_kernel: DenseKernel
) -> Gradients:
    """Returns gradients of the requested fields of a record.

    Args:
        pullback: Record, residuals, output and its cotangent, and the requested names.
        differentiate_selected_branch: (record as in the forward pass, branch, its cotangent, wanted of query, key and
            value) -> gradients of the selected branch.
        dense_kernel: What differentiates the others.

    Returns:
        Each requested gradient, in its field's shape and dtype.
    """
    record, grad_fields = with_zeroed_padding(pullback.record), pullback.grad_fields
    if record.block_indices is None:
        record = dataclasses.replace(record, block_indices=pullback.residuals.block_indices)

    def differentiate(name: str, branch: BranchResiduals, cotangent: jax.Array) -> Gradients:
        if name != "selected":
            return dense_branch_gradients(record, name, branch, cotangent, grad_fields, dense_kernel)
        shared = grad_fields & SHARED_FIELDS
        return differentiate_selected_branch(record, branch, cotangent, shared) if shared else {}

    return sum_branch_gradients(pullback, record, differentiate)


def sum_branch_gradients(
    pullback: Pullback,
    record: SelectedAttention,
    differentiate: Callable[[str, BranchResiduals, jax.Array], Gradients],
) -> Gradients:
    """Returns gradients of the requested fields: of the gates, and of the arrays, summed over the branches.

    Args:
        pullback: Residuals, the output's cotangent, and the requested names.
        record: The record of `pullback`, with zeros in the padding of queries and gates.
        differentiate: (name of a branch, its residuals, its own cotangent) -> gradients of its arrays.
    """
    grad_fields = pullback.grad_fields
    wide = jnp.promote_types(record.query.dtype, jnp.float32)
    cotangent = zero_padding(pullback.cotangent, record.q_segment_ids).astype(wide)
    grads: Gradients = {}

    def add_branch_gradients(branch_grads: Mapping[str, jax.Array]) -> None:
        for name in sorted(branch_grads.keys() & grad_fields):
            gradient = branch_grads[name].astype(wide)
            grads[name] = grads[name] + gradient if name in grads else gradient

    for name, gate in GATE_FIELD_BY_BRANCH.items():
        branch: BranchResiduals | None = getattr(pullback.residuals, name)
        if branch is None:
            continue
        factor, gated_cotangent = getattr(record, gate), cotangent
        if factor is not None:
            add_branch_gradients({gate: jnp.sum(cotangent * branch.output.astype(wide), axis=-1)})
            gated_cotangent = cotangent * factor[..., None].astype(wide)
        gated_cotangent = gated_cotangent.astype(record.query.dtype)
        if record.q_segment_ids is not None:  # the product may overflow its dtype
            gated_cotangent, lse = mark_nonfinite_rows_in_lse(gated_cotangent, branch.lse)
            branch = dataclasses.replace(branch, lse=lse)
        add_branch_gradients(differentiate(name, branch, gated_cotangent))
    return {name: grads[name].astype(getattr(record, name).dtype) for name in sorted(grad_fields)}


def dense_branch_gradients(
    record: SelectedAttention,
    name: str,
    branch: BranchResiduals,
    cotangent: jax.Array,
    grad_fields: frozenset[str],
    dense_kernel: DenseKernel,
) -> Gradients:
    """Returns gradients of a branch that is tiled attention, by their names in the record of all branches."""
    inner_record = compressed(record) if name == "compressed" else window(record)
    assert inner_record is not None  # the branch left residuals
    outer = {x: f"compressed_{x}" if name == "compressed" and x != "query" else x for x in ("query", "key", "value")}
    inner = frozenset(x for x, public in outer.items() if public in grad_fields)
    if not inner:
        return {}
    pullback = Pullback(
        record=inner_record,
        residuals=SoftmaxResiduals(lse=branch.lse),
        output=branch.output,
        cotangent=cotangent,
        grad_fields=inner,
    )
    return {outer[x]: gradient for x, gradient in dense_kernel.backward(pullback).items()}


def with_zeroed_padding(record: SelectedAttention) -> SelectedAttention:
    """Returns the record with zeros in the padding of what the selected branch and the gates multiply."""
    if record.q_segment_ids is None or record.kv_segment_ids is None:
        return record
    keys = {name: zero_padding(getattr(record, name), record.kv_segment_ids) for name in ("key", "value")}
    return dataclasses.replace(with_zeroed_query_padding(record), **keys)


def with_zeroed_query_padding(record: SelectedAttention) -> SelectedAttention:
    """Returns the record with zeros in the padding of queries and gates."""
    names = [gate for gate in GATE_FIELD_BY_BRANCH.values() if getattr(record, gate) is not None]
    padded = {name: zero_padding(getattr(record, name), record.q_segment_ids) for name in ("query", *names)}
    return dataclasses.replace(record, **padded)


def zero_padding(x: jax.Array, ids: jax.Array | None) -> jax.Array:
    """Returns [B, T, ...] with zeros where ids [B, T] are negative."""
    return x if ids is None else jnp.where((ids >= 0).reshape(*ids.shape, *(1,) * (x.ndim - 2)), x, 0)
