"""Ring attention out of any backend's tiled attention: the loop over ring steps, in both passes.

    time        ->
    transfers   keys of step 1       keys of step 2       ...                     gradients of keys, home
    kernels     first step           step 1               ...  step n - 1
    merging                 first step          step 1                 step n - 1

A transfer depends on no kernel of its own step and is issued before it, so that XLA may start it, work on the step, and
wait for it only then; on GPUs it does with `--xla_gpu_enable_latency_hiding_scheduler=true`. In the backward pass,
float32 gradients of keys and values travel one step after their keys: what earlier devices have added arrives while
this one's kernel runs.

With lse and delta of the whole row, the backward pass of one step is that of tiled attention, and depends on no other
step's. What is merged and added up is float32; a kernel rounds the results of its own step to the query's dtype.
"""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from ejkernel.families.ring_attention.record import RingAttention, as_tiled_attention
from ejkernel.families.ring_attention.schedule import (
    Ring,
    TravellingKeys,
    columns,
    local_record,
    put_key_columns,
    travelling_keys_of,
)
from ejkernel.families.ring_attention.steps import (
    Distance,
    Gradients,
    RingStep,
    ZigzagStep,
    local_step,
    ring_kind,
    ring_of_steps,
    step_at_distance,
)
from ejkernel.families.tiled_attention import SoftmaxResiduals, sinks_gradient
from ejkernel.planning.softmax_merge import PartialAttention, merge
from ejkernel.types.pullback import Pullback


@dataclasses.dataclass(frozen=True)
class StepKernel:
    """Tiled attention of a backend.

    Attributes:
        forward: (TiledAttention, config) -> (output, SoftmaxResiduals, ...).
        backward: (Pullback of such a record, config) -> gradients.
    """

    forward: Callable[[Any, Any], Any]
    backward: Callable[[Pullback, Any], Gradients]


RemoteStep = Callable[[Distance, TravellingKeys, Any], tuple[Gradients, Any]]


def forward(record: RingAttention, config: Any, kernel: StepKernel) -> tuple[jax.Array, SoftmaxResiduals]:
    """Returns attention output and residuals of one device's queries.

    Args:
        record: The canonical arguments.
        config: The kernel's configuration, for every step.
        kernel: What attends to the keys of one step.

    Returns:
        Output [B, T, H, Dv] in the query's dtype, and the residuals for the backward pass.
    """
    ring = ring_of_steps(record)
    if ring is None:
        output, residuals, *_ = kernel.forward(as_tiled_attention(record), config)
        return output, residuals
    local = local_record(record, ring)

    def attend(step: RingStep | ZigzagStep) -> PartialAttention:
        output, residuals, *_ = kernel.forward(step.record, config)
        return PartialAttention(output.astype(accumulator(record)), residuals.lse)

    def remote_step(
        distance: Distance, travelling_keys: TravellingKeys, so_far: PartialAttention
    ) -> tuple[Gradients, PartialAttention]:
        step = step_at_distance(local, ring, distance, travelling_keys)
        return {}, merge(so_far, *step.partial_results(attend(step)))

    def run_local_step(travelling_keys: TravellingKeys) -> tuple[Gradients, PartialAttention]:
        # Only this step adds the sinks to its denominator, so they are counted once.
        step = local_step(local, ring, travelling_keys)
        return {}, attend(dataclasses.replace(step, record=dataclasses.replace(step.record, softmax_aux=sinks)))

    sinks = record.softmax_aux
    _, done = _run_ring(
        ring, travelling_keys_of(local), run_local_step, remote_step, unrolled=ring_kind(local, ring) == "banded"
    )
    output = ring.unstripe(done.output.astype(record.query.dtype), 1)
    return output, SoftmaxResiduals(lse=ring.unstripe(done.lse, 2))


def backward(pullback: Pullback, config: Any, kernel: StepKernel) -> Gradients:
    """Returns gradients of the requested fields of one device's record.

    Args:
        pullback: Record, residuals, output and its cotangent, and the requested names.
        config: The kernel's configuration, for every step.
        kernel: What differentiates attention to the keys of one step.

    Returns:
        Each wanted gradient, in its field's shape and dtype. Those of key and value are of the device's own part, and
        complete; those of bias and softmax_aux are what the device's queries contribute.
    """
    record, grad_fields = pullback.record, pullback.grad_fields
    ring = ring_of_steps(record)
    if ring is None:
        return kernel.backward(dataclasses.replace(pullback, record=as_tiled_attention(record)), config)
    grads: Gradients = {}
    if grad_fields - {"softmax_aux"}:
        local = dataclasses.replace(
            pullback,
            record=local_record(record, ring),
            residuals=SoftmaxResiduals(lse=ring.stripe(pullback.residuals.lse, 2)),
            output=ring.stripe(pullback.output, 1),
            cotangent=ring.stripe(pullback.cotangent, 1),
            lse_cotangent=None if pullback.lse_cotangent is None else ring.stripe(pullback.lse_cotangent, 2),
            grad_fields=grad_fields - {"softmax_aux"},
        )
        grads = _step_gradients(local, config, kernel, ring)
    if "softmax_aux" in grad_fields:
        grads["softmax_aux"] = _sink_gradient(pullback)
    return {name: _return_to_field_layout(grads[name], name, record, ring) for name in sorted(grad_fields)}


def accumulator(record: RingAttention) -> Any:
    """Returns the dtype that steps are merged and added up in."""
    return jnp.promote_types(record.query.dtype, jnp.float32)


def _run_ring(
    ring: Ring,
    travelling_keys: TravellingKeys,
    run_local_step: Callable[[TravellingKeys], tuple[Gradients, Any]],
    remote_step: RemoteStep,
    *,
    unrolled: bool,
) -> tuple[Gradients, Any]:
    """Sends the keys of all devices around the ring, and runs one step for each device's keys that arrive here.

    Args:
        ring: How it goes.
        travelling_keys: This device's keys and what belongs to them.
        run_local_step: With the keys that the device holds: keys -> (their gradients, state).
        remote_step: (distance, keys, state) -> (gradients of the keys, state).
        unrolled: Whether `remote_step` wants an int for a distance.

    Returns:
        The gradients of this device's keys, back home, and the state.
    """
    after_first_hop = {
        hop: ring.shift(travelling_keys, hop) for hop in (1, -1) if (ring.num_before if hop == 1 else ring.num_after)
    }
    home, state = run_local_step(travelling_keys)
    directions = [(1, ring.num_before), (-1, ring.num_after)]
    totals: list[Gradients] = []
    travelling_gradients = home
    for hop, last in directions:
        if last:
            total, state = _run_ring_direction(
                ring, hop, last, after_first_hop[hop], travelling_gradients, remote_step, state, unrolled=unrolled
            )
            totals.append(total)
            travelling_gradients = jax.tree.map(jnp.zeros_like, travelling_gradients)
    return (_sum_gradients(*totals) if totals else home), state


def _run_ring_direction(
    ring: Ring,
    hop: int,
    last: int,
    travelling_keys: TravellingKeys,
    travelling_gradients: Gradients,
    remote_step: RemoteStep,
    state: Any,
    *,
    unrolled: bool,
) -> tuple[Gradients, Any]:
    """Runs ring steps 1 to `last` in one direction; the keys are the first step's, their
    gradients arrive one step later.
    """

    def process_arrival(
        distance: Distance, travelling_keys: TravellingKeys, travelling_gradients: Gradients, state: Any
    ) -> tuple[Gradients, Any]:
        arriving_gradients = ring.shift(travelling_gradients, hop)
        new_gradients, state = remote_step(hop * distance, travelling_keys, state)
        return _sum_gradients(arriving_gradients, new_gradients), state

    def step(distance: Distance, carry: tuple[TravellingKeys, Gradients, Any]) -> tuple[TravellingKeys, Gradients, Any]:
        travelling_keys, travelling_gradients, state = carry
        next_travelling_keys = ring.shift(travelling_keys, hop)
        return next_travelling_keys, *process_arrival(distance, travelling_keys, travelling_gradients, state)

    carry = (travelling_keys, travelling_gradients, state)
    if unrolled:
        for distance in range(1, last):
            carry = step(distance, carry)
    elif last > 1:
        carry = lax.fori_loop(1, last, step, carry)
    travelling_gradients, state = process_arrival(last, *carry)
    return ring.shift(travelling_gradients, -hop * last), state


def _sum_gradients(*trees: Gradients) -> Gradients:
    return jax.tree.map(lambda *xs: sum(xs[1:], xs[0]), *trees)


def _step_gradients(pullback: Pullback, config: Any, kernel: StepKernel, ring: Ring) -> Gradients:
    """Returns the gradients of everything but sinks, in the layout that the ring works in."""
    record, dtype = pullback.record, accumulator(pullback.record)

    def gradients_of_step(step: RingStep | ZigzagStep, travelling_keys: TravellingKeys) -> Gradients:
        lse, output, cotangent = pullback.residuals.lse, pullback.output, pullback.cotangent
        of_lse = pullback.lse_cotangent
        part = Pullback(
            record=step.record,
            residuals=SoftmaxResiduals(lse=step.take_query_rows(lse, 2)),
            output=step.take_query_rows(output, 1),
            cotangent=step.take_query_rows(cotangent, 1),
            lse_cotangent=None if of_lse is None else step.take_query_rows(of_lse, 2),
            grad_fields=pullback.grad_fields,
        )
        gradients = {name: x.astype(dtype) for name, x in kernel.backward(part, config).items()}
        return step.spread(
            {name: gradients[name] for name in sorted(pullback.grad_fields)}, travelling_keys["key"].shape[1]
        )

    def remote_step(
        distance: Distance, travelling_keys: TravellingKeys, stationary_gradients: Gradients
    ) -> tuple[Gradients, Gradients]:
        grads = gradients_of_step(step_at_distance(record, ring, distance, travelling_keys), travelling_keys)
        source = (lax.axis_index(ring.axis_name) - distance) % ring.size
        return _travelling_gradients(grads), _add_stationary_gradients(
            grads, stationary_gradients, ring, source, travelling_keys
        )

    def run_local_step(travelling_keys: TravellingKeys) -> tuple[Gradients, Gradients]:
        grads = gradients_of_step(local_step(record, ring, travelling_keys), travelling_keys)
        zero_gradients = {name: jnp.zeros(getattr(record, name).shape, dtype) for name in ("bias",) if name in grads}
        return _travelling_gradients(grads), _add_stationary_gradients(
            grads, zero_gradients, ring, lax.axis_index(ring.axis_name), travelling_keys
        )

    unrolled = ring_kind(record, ring) == "banded"
    home, kept = _run_ring(ring, travelling_keys_of(record), run_local_step, remote_step, unrolled=unrolled)
    return {**home, **kept}


def _travelling_gradients(grads: Gradients) -> Gradients:
    return {name: grads[name] for name in ("key", "value") if name in grads}


def _add_stationary_gradients(
    grads: Gradients,
    accumulated_gradients: Gradients,
    ring: Ring,
    source_device: jax.Array,
    travelling_keys: TravellingKeys,
) -> Gradients:
    """Returns gradients of the query and of the bias with those of one step, whose bias has the columns of its keys."""
    kept = {
        name: grads[name] + accumulated_gradients[name] if name in accumulated_gradients else grads[name]
        for name in {"query"} & set(grads)
    }
    if "bias" in grads:
        keys, total = travelling_keys["key"].shape[1], accumulated_gradients["bias"]
        part = grads["bias"] + columns(total, ring, source_device, keys)
        kept["bias"] = put_key_columns(total, part, ring, source_device, keys)
    return kept


def _sink_gradient(pullback: Pullback) -> jax.Array:
    """Returns the gradient of the sinks, [H]: `-sum_i exp(sink - lse_i) (<cotangent_i, output_i> - dlse_i)`."""
    dtype = accumulator(pullback.record)
    output = pullback.output.astype(dtype)
    # The output of padding is 0 and contributes nothing, even if its cotangent is NaN.
    delta = jnp.sum(jnp.where(output == 0, 0, pullback.cotangent.astype(dtype)) * output, axis=-1).swapaxes(1, 2)
    return sinks_gradient(dataclasses.replace(pullback, record=as_tiled_attention(pullback.record)), delta)


def _return_to_field_layout(gradient: jax.Array, name: str, record: RingAttention, ring: Ring) -> jax.Array:
    """Returns a gradient in its field's dtype and layout."""
    field = getattr(record, name)
    gradient = gradient.astype(field.dtype)
    axis = {"query": 1, "key": 1, "value": 1, "bias": 2}.get(name)
    return gradient if axis is None or field.shape[axis] == 1 else ring.unstripe(gradient, axis)
