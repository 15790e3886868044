"""Runs kernels that update some elements of an array in place."""

from collections.abc import Callable
from typing import Any

import jax
import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu

from ejkernel.planning.in_place import call_unfused


def update_in_place(
    body: Callable[[dict[str, Any], dict[str, Any]], None],
    operands: dict[str, jax.Array],
    updated_arrays: dict[str, jax.Array],
    num_blocks: int,
) -> dict[str, jax.Array]:
    """Runs a kernel with one warpgroup per block, which may read and write `updated_arrays`.

    XLA passes the arrays themselves if nothing else reads them later, and copies of them otherwise.

    Args:
        body: Called with references to operands and to updated arrays, by name.
        operands: Arrays that it reads.
        updated_arrays: Arrays that are partly overwritten.
        num_blocks: Thread blocks.

    Returns:
        The arrays after the kernel.
    """
    mesh = plgpu.Mesh(grid=(num_blocks,), grid_names=("block",), num_threads=1, thread_name="warpgroup")
    params = plgpu.CompilerParams(
        approx_math=True, unsafe_no_auto_barriers=True, lowering_semantics=plgpu.LoweringSemantics.Lane
    )

    # `plgpu.kernel` does not support references, since it has its own batching rule.
    def run(refs: dict[str, Any]) -> None:
        def kernel_entry(*refs_in_order: Any) -> None:
            refs_by_name = dict(zip((*operands, *refs), refs_in_order, strict=True))
            body({name: refs_by_name[name] for name in operands}, {name: refs_by_name[name] for name in refs})

        pl.kernel(kernel_entry, out_type=(), mesh=mesh, compiler_params=params)(*operands.values(), *refs.values())

    names = tuple(updated_arrays)

    def call(*arrays: jax.Array) -> tuple[jax.Array, ...]:
        results = pl.run_state(run)(dict(zip(names, arrays, strict=True)))
        return tuple(results[name] for name in names)

    return dict(zip(names, call_unfused(call, *updated_arrays.values()), strict=True))
