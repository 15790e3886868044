"""Forward pass of the cross-entropy on TPUs."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental.pallas import tpu as pltpu

from ejkernel.families.cross_entropy import CrossEntropy, CrossEntropyResiduals, target_probability_sums
from ejkernel_pallas.tpu.cross_entropy import plan
from ejkernel_pallas.tpu.cross_entropy.config import TpuLossTiles
from ejkernel_pallas.tpu.cross_entropy.kernels.linear_statistics import (
    ENTRY,
    EXPECTED,
    LARGEST,
    LSE,
    linear_statistics,
)
from ejkernel_pallas.tpu.cross_entropy.kernels.tile import LossRefs
from ejkernel_pallas.tpu.cross_entropy.spec import make_spec
from ejkernel_pallas.tpu.mosaic.launch import KernelCall, Operand, launch, vmem_limit_bytes
from ejkernel_pallas.tpu.mosaic.vectors import LANES


def forward(record: CrossEntropy, config: TpuLossTiles) -> tuple[Any, CrossEntropyResiduals]:
    """Returns the losses of a record.

    Args:
        record: The canonical arguments.
        config: Blocks.

    Returns:
        The family's output. There are no residuals: the backward pass computes the logits again.
    """
    assert record.lm_head is not None  # records with logits are refused
    spec = make_spec(record, config)
    states = plan.input_states(record, spec)
    inputs = {
        "states": plan.input_operand(states, spec),
        "head": plan.head_operand(record.lm_head, spec),
        "targets": plan.column_operand(record.targets, spec),
    }
    rows = jax.ShapeDtypeStruct((states.shape[0], LANES), jnp.float32)
    outputs = {"statistics": Operand(rows, (spec.block_t, LANES), lambda *step: (step[0], 0))}
    of_lanes = pltpu.VMEM((spec.block_t, LANES), jnp.float32)
    scratch = {
        "largest": of_lanes,
        "entry": pltpu.VMEM((spec.block_t, LANES), jnp.int32),
        "total": of_lanes,
        "expected": of_lanes,
    }
    results = launch(
        KernelCall(
            name="ejkernel_cross_entropy_linear_statistics",
            kernel=functools.partial(linear_statistics, spec=spec),
            refs=LossRefs,
            grid=(spec.num_token_blocks, spec.num_entry_blocks),
            num_parallel_axes=1,
            scalar_tables={},
            inputs=inputs,
            outputs=outputs,
            scratch=scratch,
            vmem_limit=vmem_limit_bytes((*inputs.values(), *outputs.values()), scratch)
            + plan.working_bytes(inputs["states"], inputs["head"], spec),
        )
    )
    return _losses(record, results["statistics"]), CrossEntropyResiduals()


def _losses(record: CrossEntropy, statistics: jax.Array) -> tuple[jax.Array, ...]:
    """Returns the family's output."""
    active, weights = record.weights != 0, record.weights.astype(jnp.float32)
    columns = statistics[: record.weights.shape[0]]
    lse, largest, entry, expected = (
        jnp.where(active, columns[:, index], 0) for index in (LSE, LARGEST, ENTRY, EXPECTED)
    )
    loss = weights * (lse * target_probability_sums(record) - expected + record.z_loss * lse**2)
    loss = jnp.where(active, loss, 0)
    return jnp.sum(loss, keepdims=True) if record.sum_over_tokens else loss, lse, largest, entry
