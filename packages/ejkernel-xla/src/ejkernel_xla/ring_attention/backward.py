"""Backward pass of ring attention: keys travel as in the forward pass, and their gradients with them.

    ring step:   another device's keys and values, and their gradients so far   <- receive
                 add what this device's queries contribute                      -> send, until they are home

The formulas are those of `ejkernel_xla.tiled_attention.backward`. Of a whole row they need only lse and
`<cotangent, output>`, both known from the forward pass, so contributions of different devices' keys are independent.
"""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp

from ejkernel import _compat
from ejkernel.families.ring_attention import RingAttention, as_tiled_attention
from ejkernel.families.ring_attention.schedule import (
    Ring,
    TravellingKeys,
    columns,
    local_record,
    put_key_columns,
    ring_of,
    step_record,
    travelling_keys_of,
)
from ejkernel.families.tiled_attention import SoftmaxResiduals, subtract_lse_cotangent
from ejkernel.types.pullback import Pullback
from ejkernel_xla.tiled_attention import backward as tiles
from ejkernel_xla.tiled_attention.config import ChunkedSoftmax
from ejkernel_xla.tiled_attention.kernels.scores import accumulator

Gradients = dict[str, Any]


def backward(pullback: Pullback, params: ChunkedSoftmax) -> Gradients:
    """Returns gradients of the requested fields of one device's record.

    Args:
        pullback: Record, residuals, output and its cotangent, and the wanted names, of query, key, value, bias,
            score_mod and softmax_aux.
        params: Tile sizes.

    Returns:
        Each wanted gradient, in its field's shape and dtype. Those of key and value are of the device's own part, and
        complete; those of bias, score_mod and softmax_aux are what the device's queries contribute.
    """
    ring = ring_of(pullback.record)
    if ring is None:
        return tiles.backward(dataclasses.replace(pullback, record=as_tiled_attention(pullback.record)), params)
    local = dataclasses.replace(
        pullback,
        record=local_record(pullback.record, ring),
        residuals=SoftmaxResiduals(lse=ring.stripe(pullback.residuals.lse, 2)),
        output=ring.stripe(pullback.output, 1),
        cotangent=ring.stripe(pullback.cotangent, 1),
        lse_cotangent=None if pullback.lse_cotangent is None else ring.stripe(pullback.lse_cotangent, 2),
    )
    grads = _run_ring_backward(local, params, ring)
    if "softmax_aux" in pullback.grad_fields:
        grads["softmax_aux"] = _sink_gradient(pullback)
    return {name: _to_field_layout(grads[name], name, pullback.record, ring) for name in sorted(pullback.grad_fields)}


def _run_ring_backward(pullback: Pullback, params: ChunkedSoftmax, ring: Ring) -> Gradients:
    """Returns the gradients of everything but sinks, in the layout that the ring works in."""
    record, dtype = pullback.record, accumulator(as_tiled_attention(pullback.record))
    names = sorted(pullback.grad_fields - {"softmax_aux"})
    zeros = {name: tiles.zero_gradient(getattr(record, name), dtype) for name in names}
    zeros = _compat.as_varying(zeros, pullback)
    # dk and dv go around with their keys, and arrive at home complete; dq and dbias stay.
    travelling_gradients = {name: zeros[name] for name in ("key", "value") if name in zeros}
    stationary_gradients = {name: x for name, x in zeros.items() if name not in travelling_gradients}

    def ring_step(
        source: jax.Array, travelling_keys: TravellingKeys, stationary_gradients: Gradients
    ) -> tuple[TravellingKeys, Gradients]:
        keys, partial = travelling_keys["key"].shape[1], {**stationary_gradients, **travelling_gradients}
        if "bias" in stationary_gradients:
            partial["bias"] = columns(stationary_gradients["bias"], ring, source, keys)
        part = dataclasses.replace(
            pullback,
            record=step_record(record, ring, source, travelling_keys),
            grad_fields=pullback.grad_fields - {"softmax_aux"},
        )
        # float32 throughout: what travels is not rounded at every step.
        grads = tiles.accumulate(part, params, partial)
        if "bias" in stationary_gradients:
            grads["bias"] = put_key_columns(stationary_gradients["bias"], grads["bias"], ring, source, keys)
        return {name: grads[name] for name in travelling_gradients}, {
            name: grads[name] for name in stationary_gradients
        }

    collected, local = ring.run_ring(travelling_keys_of(record), travelling_gradients, ring_step, stationary_gradients)
    return {**collected, **local}


def _to_field_layout(gradient: Any, name: str, record: RingAttention, ring: Ring) -> Any:
    """Returns a gradient in its field's dtype and layout."""
    field = getattr(record, name)
    gradient = tiles.as_dtype_of(field, gradient)
    axis = {"query": 1, "key": 1, "value": 1, "bias": 2}.get(name)
    return gradient if axis is None or field.shape[axis] == 1 else ring.unstripe(gradient, axis)


def _sink_gradient(pullback: Pullback) -> jax.Array:
    """Returns the gradient of the sinks, [H]: `-sum_i exp(sink - lse_i) (<cotangent_i, output_i> - dlse_i)`."""
    record, dtype = pullback.record, accumulator(as_tiled_attention(pullback.record))
    output = pullback.output.astype(dtype)
    # Padding rows have an output of 0 and contribute 0, even if their cotangent is NaN.
    delta = jnp.sum(jnp.where(output == 0, 0, pullback.cotangent.astype(dtype)) * output, axis=-1).swapaxes(1, 2)
    lse = pullback.residuals.lse
    sinks = record.softmax_aux.astype(dtype)[:, None]
    share = jnp.where(lse == -jnp.inf, 0, jnp.exp(sinks - jnp.where(lse == -jnp.inf, 0, lse)))
    return -jnp.sum(share * subtract_lse_cotangent(delta, pullback), axis=(0, 2))
