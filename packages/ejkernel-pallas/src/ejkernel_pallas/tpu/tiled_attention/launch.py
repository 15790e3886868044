"""The one door to `pallas_call` for these kernels."""

from collections.abc import Callable
from typing import Any

import jax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from ejkernel_pallas.tpu.tiled_attention.operands import Operand, Where
from ejkernel_pallas.tpu.tiled_attention.visits import key_tile, query_tile

VMEM_LIMIT = 48 * 2**20
"""Bytes that a kernel may take: what the chip with the least memory has, with room for what XLA keeps there."""


def walk(b: Any, h: Any, step: Any, table: Any, *, batched: bool) -> tuple[Any, Any, Any, Any]:
    """Where step (batch row, head, visit) of a grid is."""
    entry = table[step + b * (table.shape[0] // pl.num_programs(0)) if batched else step]
    return b, h, query_tile(entry), key_tile(entry)


def launch(
    kernel: Callable[..., None],
    *,
    grid: tuple[int, ...],
    tables: tuple[Any, ...],
    where: Where,
    inputs: dict[str, Operand],
    outputs: dict[str, Operand],
    scratch: dict[str, Any],
    name: str,
) -> dict[str, jax.Array]:
    """Runs a kernel over a grid of which the first two axes are independent; its results by name.

    Args:
        kernel: Called with the tables, then blocks of inputs and outputs and scratch memory, named by `names`.
        grid: Steps along each axis.
        tables: int32 vectors that index maps and the kernel read.
        where: Of a grid step.
        inputs: What the kernel reads.
        outputs: What it writes.
        scratch: What it keeps between steps.
        name: In traces and dumps.
    """
    names = (*inputs, *outputs, *scratch)
    made = pl.pallas_call(
        lambda *refs: kernel(*refs, names=names),
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=len(tables),
            grid=grid,
            in_specs=[x.spec(where) for x in inputs.values()],
            out_specs=[x.spec(where) for x in outputs.values()],
            scratch_shapes=list(scratch.values()),
        ),
        out_shape=[jax.ShapeDtypeStruct(x.array.shape, x.array.dtype) for x in outputs.values()],
        compiler_params=pltpu.CompilerParams(
            dimension_semantics=("parallel", "parallel") + ("arbitrary",) * (len(grid) - 2),
            vmem_limit_bytes=VMEM_LIMIT,
        ),
        name=name,
    )(*tables, *(x.array for x in inputs.values()))
    return dict(zip(outputs, made, strict=True))
