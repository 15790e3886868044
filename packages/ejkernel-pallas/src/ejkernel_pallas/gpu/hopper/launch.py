"""How a kernel is launched."""

from collections.abc import Callable
from typing import Any

import jax
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp

from ejkernel.arithmetic import cdiv


def launch(
    body: Callable[[dict[str, Any], Any, dict[str, Any]], None],
    operands: dict[str, jax.Array],
    outputs: list[jax.ShapeDtypeStruct],
    scratch: dict[str, Any],
    blocks: int,
    warpgroups: int,
    cluster: dict[str, int] | None = None,
) -> tuple[jax.Array, ...]:
    """Runs a kernel.

    Args:
        body: Takes references to operands, by name, to outputs, and to scratch, by name.
        operands: Arrays that it reads.
        outputs: What it writes.
        scratch: Shared memory and barriers.
        blocks: Thread blocks.
        warpgroups: Warpgroups that multiply; one more fetches.
        cluster: Name and number of the blocks of a cluster, of which there are `blocks` then.

    Returns:
        The outputs.
    """
    names, places = tuple(operands), tuple(scratch)

    def entry(*refs: Any) -> None:
        given, made, rest = refs[: len(names)], refs[len(names) : len(names) + len(outputs)], refs[-len(places) :]
        body(dict(zip(names, given, strict=True)), made, dict(zip(places, rest, strict=True)))

    return plgpu.kernel(
        entry,
        out_type=outputs,
        scratch_types=list(scratch.values()),
        grid=(blocks,),
        grid_names=("block",),
        cluster=tuple((cluster or {}).values()),
        cluster_names=tuple(cluster or {}),
        num_threads=warpgroups + 1,
        thread_name="warpgroup",
        # The kernels synchronise by themselves, and Mosaic's lane semantics leave their registers to them.
        compiler_params=plgpu.CompilerParams(
            approx_math=True, unsafe_no_auto_barriers=True, lowering_semantics=plgpu.LoweringSemantics.Lane
        ),
    )(*operands.values())


def transforms(swizzle: int = 128, itemsize: int = 2) -> tuple[Any, ...]:
    """The layout of operands of WGMMA in shared memory, of `itemsize` bytes, with a swizzle of so many bytes."""
    # Swizzle atoms: eight rows of as many bytes as the swizzle has. WGMMA's descriptors address shared memory by them.
    return plgpu.TilingTransform((8, swizzle // itemsize)), plgpu.SwizzleTransform(swizzle)


TRANSFORMS = transforms()
"""The layout of 16-bit operands of WGMMA with the 128-byte swizzle."""


def matrix(shape: tuple[int, ...], dtype: Any, swizzle: int = 128) -> Any:
    """Returns shared memory in the layout that WGMMA reads."""
    return plgpu.SMEM(shape, dtype, transforms=transforms(swizzle, jnp.dtype(dtype).itemsize))


def whole(x: jax.Array, rows: int) -> jax.Array:
    """Returns rows of zeros up to what copies want: whole groups of eight, and no fewer than one copy has.

    Copies leave out what lies beyond an array's end, so that no more is needed.
    """
    # The eight rows of a swizzle atom are the least that a copy moves.
    rows = max(rows, cdiv(x.shape[1], 8) * 8)
    return jnp.pad(x, ((0, 0), (0, max(0, rows - x.shape[1])), (0, 0), (0, 0)))
