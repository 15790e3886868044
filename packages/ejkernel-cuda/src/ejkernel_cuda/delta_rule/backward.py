"""The FFI calls of the backward pass with a gate per head or none, with the delta rule or without
(csrc/delta_rule/reverse.cuh, token_gradients.cuh and group_gradients.cuh).
"""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from ejkernel.arithmetic import cdiv
from ejkernel.families.linear_recurrence import LinearRecurrence, final_states_shape, num_state_heads
from ejkernel.families.linear_recurrence.plain_states import backward_with_plain_states
from ejkernel.types.pullback import Pullback
from ejkernel_cuda.delta_rule.forward import DeltaResiduals, factors_and_skip, gates_and_beta, run_forward
from ejkernel_cuda.delta_rule.plan import (
    CHUNK,
    HOPPER_MULTIPROCESSORS,
    chunk_table,
    num_chunks,
    num_segments,
    scan_handler,
    segment_results,
)
from ejkernel_cuda.library import register_handler
from ejkernel_cuda.split_values import backward_with_split_values


@backward_with_plain_states
@backward_with_split_values
def backward(pullback: Pullback, config: Any) -> dict[str, jax.Array]:
    """Returns the gradients of the requested fields of a record.

    Args:
        pullback: Record, cotangents of output and final states, the requested names, and the forward pass's private
            residuals; without these, the forward pass runs again.
        config: Unused: the kernels have no options.

    Returns:
        The gradient of each requested field, in its shape and dtype.
    """
    record: LinearRecurrence = pullback.record
    residuals: DeltaResiduals | None = pullback.private_residuals
    if residuals is None:
        residuals = run_forward(record, stores=True)[2]
    cotangent = pullback.cotangent[0].astype(record.query.dtype)
    dwrites, dstates, dinitial = _state_gradients(record, cotangent, pullback.cotangent[1])
    if shares_queries_and_keys(record):
        gradients = _group_gradients(record, residuals.states, cotangent, dstates)
    else:
        gradients = _token_gradients(record, residuals, cotangent, dwrites, dstates)
    if record.beta is None:
        gradients["value"] = dwrites
    gradients["initial_state" if record.cu_seqlens is None else "sequence_state"] = dinitial
    return {name: _sum_to_field(gradients[name], getattr(record, name)) for name in sorted(pullback.grad_fields)}


def row_states(
    record: LinearRecurrence, output_cotangent: jax.Array | None, final_states_cotangent: jax.Array | None
) -> jax.Array | None:
    """Returns the gradients of the states before rows by the reverse scan alone, of any multiple of 64 value channels;
    None for the states after them, which the forward pass gives.

    Args:
        record: The canonical arguments of rows that are not packed.
        output_cotangent: [B, T, H, V], of which the gradients are taken; None for the states.
        final_states_cotangent: [B, H, K, V], cotangent of the states after the rows; None for zeros.
    """
    if output_cotangent is None:
        return None
    if final_states_cotangent is None:
        final_states_cotangent = jnp.zeros(final_states_shape(record), jnp.float32)
    return _state_gradients(record, output_cotangent.astype(record.query.dtype), final_states_cotangent)[2]


def shares_queries_and_keys(record: LinearRecurrence) -> bool:
    """Returns whether the kernel that adds up gradients of queries and keys over a group of heads serves a record. It
    alone computes the gradients of dt and skip, for groups of one head too.
    """
    heads, groups = num_state_heads(record), record.query.shape[2]
    if record.beta is not None or record.key.shape[2] != groups:
        return False
    return groups < heads or record.dt is not None or record.skip is not None


def sums_pairs_of_heads(record: LinearRecurrence) -> bool:
    """Returns whether the delta rule's kernel of gradients adds up those of queries and keys over pairs of heads."""
    heads = num_state_heads(record)
    return record.beta is not None and all(heads // x.shape[2] % 2 == 0 for x in (record.query, record.key))


def num_head_slices(record: LinearRecurrence) -> int:
    """Returns the number of slices that the heads of a group are split into, each computed by one block: the number for
    which the last block ends earliest, if a head and a block's constant work take one unit of time each.
    """
    (rows, tokens, groups), heads = record.query.shape[:3], num_state_heads(record)
    blocks, group = rows * cdiv(tokens, CHUNK) * groups, heads // groups

    def duration(slices: int) -> int:
        return cdiv(blocks * slices, HOPPER_MULTIPROCESSORS) * (group // slices + 1)

    return min((n for n in range(1, group + 1) if group % n == 0), key=duration)


def _state_gradients(
    record: LinearRecurrence, cotangent: jax.Array, final_cotangent: jax.Array
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Returns the gradients of values [B, T, H, V], with the delta rule without their factor beta, of the states after
    the chunks [B, H, chunks, V, K], and of the initial states [B, H, K, V].
    """
    (rows, _, heads, columns), keys, dtype = cotangent.shape, record.query.shape[3], cotangent.dtype
    segments, final_cotangent = num_segments(record), final_cotangent.astype(jnp.float32)
    call = jax.ffi.ffi_call(
        register_handler(scan_handler("ejkernel_delta_rule_reverse", record, segments)),
        (
            jax.ShapeDtypeStruct(cotangent.shape, dtype),
            jax.ShapeDtypeStruct((rows, heads, num_chunks(record), columns, keys), dtype),
            jax.ShapeDtypeStruct(final_states_shape(record), jnp.float32),
            *segment_results(record, segments),
        ),
        vmap_method="sequential",
    )
    dwrites, dstates, dinitial, *_ = call(
        *(record.query, record.key, cotangent),
        *gates_and_beta(record),
        final_cotangent,
        *factors_and_skip(record),
        chunk_table(record),
        scale=np.float32(record.softmax_scale),
        segments=np.int32(segments),
    )
    return dwrites, dstates, dinitial


def _token_gradients(
    record: LinearRecurrence,
    residuals: DeltaResiduals,
    cotangent: jax.Array,
    dwrites: jax.Array,
    dstates: jax.Array,
) -> dict[str, jax.Array]:
    """Returns the gradients of queries, keys and gates, and with the delta rule of values and beta; all of them per
    head of the call, but those of queries and keys per pair of heads where pairs share both, and in float32 where more
    heads do.
    """
    gates, beta = gates_and_beta(record)
    (rows, tokens, heads, _), keys, has_delta = cotangent.shape, record.query.shape[3], record.beta is not None
    stored_heads = heads // 2 if sums_pairs_of_heads(record) else heads

    def per_stored_head(field: jax.Array) -> jax.ShapeDtypeStruct:
        dtype = field.dtype if field.shape[2] == stored_heads else jnp.float32
        return jax.ShapeDtypeStruct((rows, tokens, stored_heads, keys), dtype)

    call = jax.ffi.ffi_call(
        register_handler("ejkernel_delta_rule_token_gradients"),
        (
            per_stored_head(record.query),
            per_stored_head(record.key),
            jax.ShapeDtypeStruct(cotangent.shape if has_delta else (0,), record.value.dtype),
            jax.ShapeDtypeStruct(gates.shape, jnp.float32),
            jax.ShapeDtypeStruct(beta.shape, jnp.float32),
        ),
        vmap_method="sequential",
    )
    writes = residuals.writes if has_delta else record.value
    inputs = (record.query, record.key, record.value, writes, cotangent, dwrites, residuals.states, dstates)
    dquery, dkey, dvalue, dgates, dbeta = call(
        *inputs, gates, beta, chunk_table(record), scale=np.float32(record.softmax_scale)
    )
    gradients = {"query": dquery, "key": dkey} | ({"value": dvalue, "beta": dbeta} if has_delta else {})
    return gradients if record.decay is None else gradients | {"decay": dgates[..., None]}


def _group_gradients(
    record: LinearRecurrence, states: jax.Array, cotangent: jax.Array, dstates: jax.Array
) -> dict[str, jax.Array]:
    """Returns the gradients of queries and keys, each per slice of a group's heads, in float32 if there are several;
    and of gates, dt and skip where a record has them, the last per chunk.
    """
    gates, (factors, skip) = gates_and_beta(record)[0], factors_and_skip(record)
    (rows, tokens, groups, keys), slices = record.query.shape, num_head_slices(record)
    dtype = record.query.dtype if slices == 1 else jnp.float32
    columns = jax.ShapeDtypeStruct((rows, tokens, groups * slices, keys), dtype)
    chunk_heads = (rows, num_chunks(record), cotangent.shape[2])
    call = jax.ffi.ffi_call(
        register_handler("ejkernel_delta_rule_group_gradients"),
        (
            columns,
            columns,
            *(jax.ShapeDtypeStruct(x.shape, jnp.float32) for x in (gates, factors)),
            jax.ShapeDtypeStruct(chunk_heads if skip.size else (0,), jnp.float32),
        ),
        vmap_method="sequential",
    )
    inputs = (record.query, record.key, record.value, cotangent, states, dstates, gates, factors, chunk_table(record))
    dquery, dkey, dgates, dfactors, dskip = call(*inputs, scale=np.float32(record.softmax_scale))
    gradients = {"query": dquery, "key": dkey, "decay": dgates[..., None], "dt": dfactors, "skip": dskip}
    return {name: x for name, x in gradients.items() if getattr(record, name) is not None}


def _sum_to_field(gradient: jax.Array, field: jax.Array) -> jax.Array:
    """Returns a gradient in a field's shape and dtype: sums over heads that share it, and over axes of size 1."""
    if gradient.ndim == 4 and field.shape[2] not in (1, gradient.shape[2]):
        gradient = gradient.reshape(*gradient.shape[:2], field.shape[2], -1, gradient.shape[3]).sum(3)
    axes = tuple(n for n, (got, had) in enumerate(zip(gradient.shape, field.shape, strict=True)) if got != had)
    return (gradient.sum(axes, keepdims=True) if axes else gradient).astype(field.dtype)
