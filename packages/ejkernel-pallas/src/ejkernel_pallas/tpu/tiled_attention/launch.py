"""The one door to `pallas_call` for these kernels."""

from collections.abc import Callable
from typing import Any

import jax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from ejkernel_pallas.tpu.interpret import interpreting
from ejkernel_pallas.tpu.tiled_attention.operands import Operand, Where
from ejkernel_pallas.tpu.tiled_attention.visits import entry_at, key_tile, query_tile

VMEM_LIMIT = 48 * 2**20
"""Bytes that a kernel may take: what the chip with the least memory has, with room for what XLA keeps there."""


def walk(b: Any, h: Any, step: Any, table: Any, *, apart: tuple[bool, bool]) -> tuple[Any, Any, Any, Any]:
    """Where step (batch row, head, visit) of a grid is."""
    entry = entry_at(table, apart, b, h, step, (pl.num_programs(1), pl.num_programs(2)))
    return b, h, query_tile(entry), key_tile(entry)


def apart(table: Any) -> tuple[bool, bool]:
    """Whether batch rows, and heads, have visits of their own in a table [B|1, H|1, ...]."""
    return table.shape[0] > 1, table.shape[1] > 1


def launch(
    kernel: Callable[..., None],
    *,
    grid: tuple[int, ...],
    table: Any,
    where: Where,
    inputs: dict[str, Operand],
    outputs: dict[str, Operand],
    scratch: dict[str, Any],
    name: str,
) -> dict[str, jax.Array]:
    """Runs a kernel over a grid of which the first two axes are independent; its results by name.

    Args:
        kernel: Called with the table, then blocks of inputs and outputs and scratch memory, named by `names`.
        grid: Steps along each axis.
        table: int32 array that `where` and the kernel read, as one vector.
        where: Of a grid step.
        inputs: What the kernel reads.
        outputs: What it writes.
        scratch: What it keeps between steps.
        name: In traces and dumps.
    """
    names = (*inputs, *outputs, *scratch)
    tables = [table.reshape(-1), *(x.table for x in inputs.values() if x.table is not None)]
    places = {name: n for n, name in enumerate((name for name, x in inputs.items() if x.table is not None), 1)}

    def spec(name: str, x: Operand) -> pl.BlockSpec:
        def index(*step: Any) -> tuple[Any, ...]:
            own = () if x.table is None else (step[len(grid) + places[name]],)
            return x.index(*where(*step[: len(grid) + 1]), *own)

        return pl.BlockSpec(x.block, index)

    made = pl.pallas_call(
        lambda *refs: kernel(refs[0], *refs[len(tables) :], names=names),
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=len(tables),
            grid=grid,
            in_specs=[spec(*item) for item in inputs.items()],
            out_specs=[spec(*item) for item in outputs.items()],
            scratch_shapes=list(scratch.values()),
        ),
        out_shape=[jax.ShapeDtypeStruct(x.array.shape, x.array.dtype) for x in outputs.values()],
        compiler_params=pltpu.CompilerParams(
            dimension_semantics=("parallel", "parallel") + ("arbitrary",) * (len(grid) - 2),
            vmem_limit_bytes=VMEM_LIMIT,
        ),
        interpret=interpreting(),
        name=name,
    )(*tables, *(x.array for x in inputs.values()))
    return dict(zip(outputs, made, strict=True))
