"""Backward pass of the cross-entropy on TPUs."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental.pallas import tpu as pltpu

from ejkernel.families.cross_entropy import CrossEntropy, LogitGradientFactors, logit_gradient_factors
from ejkernel.types.pullback import Pullback
from ejkernel_pallas.tpu.cross_entropy import plan
from ejkernel_pallas.tpu.cross_entropy.config import TpuLossTiles
from ejkernel_pallas.tpu.cross_entropy.kernels.head_gradient import head_gradient
from ejkernel_pallas.tpu.cross_entropy.kernels.input_gradient import input_gradient
from ejkernel_pallas.tpu.cross_entropy.kernels.tile import LossRefs
from ejkernel_pallas.tpu.cross_entropy.spec import LossSpec, make_spec
from ejkernel_pallas.tpu.mosaic.launch import KernelCall, Operand, identity_index, launch, vmem_limit_bytes


def backward(pullback: Pullback, config: TpuLossTiles) -> dict[str, jax.Array]:
    """Returns the gradients of the hidden states and the matrix, each of which a kernel computes.

    Args:
        pullback: Record, output, residuals, and the cotangents of the losses and, if they are not summed, of the
            log-sum-exps.
        config: Blocks.

    Returns:
        `{"inputs": [T, D], "lm_head": [D, V]}`, those that are requested, in the dtypes of the fields.
    """
    record, (loss_cotangent, lse_cotangent, *_) = pullback.record, pullback.cotangent
    saved = {name: getattr(pullback.residuals, name) for name in sorted(pullback.grad_fields)}
    if all(gradient is not None for gradient in saved.values()):
        return {name: (gradient * loss_cotangent).astype(gradient.dtype) for name, gradient in saved.items()}
    factors = logit_gradient_factors(
        record, pullback.output[1], loss_cotangent, 0.0 if record.sum_over_tokens else lse_cotangent
    )
    spec, found = make_spec(record, config), {}
    states = plan.input_states(record, spec)
    if "inputs" in pullback.grad_fields:
        found["inputs"] = _input_gradient(record, states, factors, spec)
    if "lm_head" in pullback.grad_fields:
        found["lm_head"] = _head_gradient(record, states, factors, spec)
    return found


def _input_gradient(
    record: CrossEntropy, states: jax.Array, factors: LogitGradientFactors, spec: LossSpec
) -> jax.Array:
    rows = _run(
        "input_gradient",
        functools.partial(input_gradient, spec=spec),
        _inputs(record, states, factors, spec),
        plan.input_operand(jax.ShapeDtypeStruct(states.shape, states.dtype), spec),
        spec,
        entries_first=False,
    )
    scale = factors.scale[:, None]  # a power of 2, which rounds nothing
    return (rows[: record.weights.shape[0]] * scale).astype(record.inputs.dtype)


def _head_gradient(record: CrossEntropy, states: jax.Array, factors: LogitGradientFactors, spec: LossSpec) -> jax.Array:
    assert record.lm_head is not None  # records with logits are refused
    scale = jnp.max(factors.scale, initial=jnp.finfo(jnp.float32).tiny)
    share = factors.scale / scale
    shares = factors._replace(
        softmax_factor=factors.softmax_factor * share, target_factor=factors.target_factor * share
    )
    gradient = _run(
        "head_gradient",
        functools.partial(head_gradient, spec=spec),
        _inputs(record, states, shares, spec),
        plan.head_operand(jax.ShapeDtypeStruct(record.lm_head.shape, record.lm_head.dtype), spec),
        spec,
        entries_first=True,
    )
    return (gradient * scale).astype(record.lm_head.dtype)


def _inputs(
    record: CrossEntropy, states: jax.Array, factors: LogitGradientFactors, spec: LossSpec
) -> dict[str, Operand]:
    """Returns the inputs of either kernel."""
    columns = {
        "targets": record.targets,
        "lse": factors.lse,
        "softmax_factor": factors.softmax_factor,
        "target_factor": factors.target_factor,
    }
    return {
        "states": plan.input_operand(states, spec),
        "head": plan.head_operand(record.lm_head, spec),
        **{name: plan.column_operand(x, spec) for name, x in columns.items()},
    }


def _swap(entry_block: Any, token_block: Any) -> tuple[Any, Any]:
    return token_block, entry_block


def _run(
    name: str, kernel: Any, inputs: dict[str, Operand], gradient: Operand, spec: LossSpec, *, entries_first: bool
) -> jax.Array:
    """Runs a kernel whose grid is blocks of tokens by blocks of entries, or the other way around."""
    grid = (spec.num_token_blocks, spec.num_entry_blocks)
    assert gradient.block is not None  # blocks of whole rows or columns
    scratch = {"acc": pltpu.VMEM(tuple(size or 1 for size in gradient.block), jnp.float32)}
    results = launch(
        KernelCall(
            name=f"ejkernel_cross_entropy_{name}",
            kernel=kernel,
            refs=LossRefs,
            grid=grid[::-1] if entries_first else grid,
            num_parallel_axes=1,
            scalar_tables={},
            inputs=inputs,
            outputs={"gradient": gradient},
            scratch=scratch,
            coordinate_map=_swap if entries_first else identity_index,
            vmem_limit=vmem_limit_bytes((*inputs.values(), gradient), scratch)
            + plan.working_bytes(inputs["states"], inputs["head"], spec),
        )
    )
    return results["gradient"]
