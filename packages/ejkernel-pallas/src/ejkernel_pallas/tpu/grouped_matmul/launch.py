"""The one door to `pallas_call` for these kernels."""

import dataclasses
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from ejkernel_pallas.tpu.grouped_matmul.visits import Visit, Visits, visit
from ejkernel_pallas.tpu.interpret import interpreting

ROOM = 8 * 2**20
"""Bytes that the compiler may take beside blocks and scratch memory."""


@dataclasses.dataclass(frozen=True)
class Operand:
    """One array of a kernel.

    Attributes:
        array: What is passed, or for results its shape and dtype.
        block: Shape of a block; None drops an axis.
        index: From the visit and the other two indices of the grid to the block's place.
    """

    array: Any
    block: tuple[int | None, ...]
    index: Callable[[Visit, Any, Any], tuple[Any, ...]]

    @property
    def bytes(self) -> int:
        """Of one block."""
        return math.prod(size or 1 for size in self.block) * jnp.dtype(self.array.dtype).itemsize

    def spec(self, axis: int) -> pl.BlockSpec:
        """The block's specification on a grid whose given axis goes along the visits."""

        def place(*step: Any) -> tuple[Any, ...]:
            *indices, table = step
            return self.index(visit(table, indices.pop(axis)), *indices)

        return pl.BlockSpec(self.block, place)


def launch(
    kernel: Callable[..., None],
    *,
    visits: Visits,
    grid: tuple[Any, Any, Any],
    axis: int,
    inputs: dict[str, Operand],
    outputs: dict[str, Operand],
    scratch: dict[str, jax.ShapeDtypeStruct],
    name: str,
) -> dict[str, jax.Array]:
    """Runs a kernel over a grid whose first axis is independent; its results by name.

    Args:
        kernel: Called with the table, then blocks of inputs and outputs and scratch memory, named by `names`.
        visits: What the kernel visits.
        grid: Steps along each axis.
        axis: Which of the axes goes along the visits.
        inputs: What the kernel reads; `outputs`, what it writes; `scratch`, what it keeps.
        name: In traces and dumps.
    """
    names = (*inputs, *outputs, *scratch)
    made = pl.pallas_call(
        lambda *refs: kernel(*refs, names=names),
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=1,
            grid=grid,
            in_specs=[x.spec(axis) for x in inputs.values()],
            out_specs=[x.spec(axis) for x in outputs.values()],
            scratch_shapes=[pltpu.VMEM(x.shape, x.dtype) for x in scratch.values()],
        ),
        out_shape=[jax.ShapeDtypeStruct(x.array.shape, x.array.dtype) for x in outputs.values()],
        compiler_params=pltpu.CompilerParams(
            dimension_semantics=("parallel", "arbitrary", "arbitrary"),
            vmem_limit_bytes=_limit((*inputs.values(), *outputs.values()), scratch),
        ),
        interpret=interpreting(),
        name=name,
    )(visits.table, *(x.array for x in inputs.values()))
    return dict(zip(outputs, made, strict=True))


def _limit(operands: tuple[Operand, ...], scratch: dict[str, jax.ShapeDtypeStruct]) -> int:
    """Bytes of VMEM that a kernel asks for: two blocks of every operand, scratch memory, and room for the compiler."""
    taken = 2 * sum(x.bytes for x in operands) + sum(math.prod(x.shape) * x.dtype.itemsize for x in scratch.values())
    return taken + max(ROOM, taken // 4)
