"""The door to `pallas_call` for encounters: as that of tiled attention, with results that take the place of inputs."""

import functools
from collections.abc import Callable
from typing import Any

import jax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from ejkernel import _compat
from ejkernel_pallas.tpu.interpret import interpreting
from ejkernel_pallas.tpu.tiled_attention.launch import VMEM_LIMIT, apart, walk
from ejkernel_pallas.tpu.tiled_attention.operands import Operand, Where


def launch(
    kernel: Callable[..., None],
    table: Any,
    *,
    grid: tuple[int, ...],
    inputs: dict[str, Operand],
    outputs: dict[str, Operand],
    scratch: dict[str, Any],
    group: int = 1,
    name: str,
) -> dict[str, jax.Array]:
    """Runs a kernel over a grid of (batch row, head, visit), or (batch row, KV head, visit, query head of it).

    Args:
        kernel: Called with the table, then blocks of inputs and outputs and scratch memory, named by `names`.
        table: Visits, int32 [B|1, 1, steps].
        grid: Steps along each axis.
        inputs: What the kernel reads. One named as a result with `_before` behind it gives that its memory.
        outputs: What it writes.
        scratch: What it keeps between steps.
        group: Query heads a KV head, where the grid tells them apart.
        name: In traces and dumps.
    """
    names = (*inputs, *outputs, *scratch)
    own = apart(table)

    def where(b: Any, h: Any, step: Any, *rest: Any) -> Any:
        *member, table = rest
        _, _, i, j = walk(b, h, step, table, apart=own)
        return b, h * group + member[0] if member else h, i, j

    given = {f"{result}_before": n for n, result in enumerate(outputs)}
    arrays = [x.array for x in inputs.values()]
    arrays = _compat.as_varying([table.reshape(-1), *arrays], arrays)
    made = pl.pallas_call(
        functools.partial(_named, kernel, names),
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=1,
            grid=grid,
            in_specs=[block_of(x, where) for x in inputs.values()],
            out_specs=[block_of(x, where) for x in outputs.values()],
            scratch_shapes=list(scratch.values()),
        ),
        out_shape=[_compat.shape_like(x.array.shape, x.array.dtype, arrays[0]) for x in outputs.values()],
        input_output_aliases={n: given[x] for n, x in enumerate(inputs, 1) if x in given},
        compiler_params=pltpu.CompilerParams(
            dimension_semantics=("parallel", "parallel") + ("arbitrary",) * (len(grid) - 2),
            vmem_limit_bytes=VMEM_LIMIT,
        ),
        interpret=interpreting(),
        name=name,
    )(*arrays)
    return dict(zip(outputs, made, strict=True))


def block_of(x: Operand, where: Where) -> pl.BlockSpec:
    """An operand's block of a grid step."""
    return pl.BlockSpec(x.block, lambda *step: x.index(*where(*step)))


def _named(kernel: Callable[..., None], names: tuple[str, ...], *refs: Any) -> None:
    kernel(*refs, names=names)
