"""Launches Mosaic GPU kernels."""

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
    num_blocks: int,
    consumer_warpgroups: int,
    cluster_axis_size: dict[str, int] | None = None,
) -> tuple[jax.Array, ...]:
    """Runs a kernel.

    Args:
        body: Called with references to operands, by name, to outputs, and to scratch, by name.
        operands: Arrays that it reads.
        outputs: Shapes and dtypes of the outputs.
        scratch: Shared memory and barriers.
        num_blocks: Thread blocks.
        consumer_warpgroups: Consumer warpgroups; one more is the producer.
        cluster_axis_size: Name of the cluster axis and blocks per cluster; `num_blocks` then counts clusters.

    Returns:
        The outputs.
    """
    names, scratch_names = tuple(operands), tuple(scratch)

    def kernel_entry(*refs: Any) -> None:
        operand_refs, output_refs, scratch_refs = (
            refs[: len(names)],
            refs[len(names) : len(names) + len(outputs)],
            refs[-len(scratch_names) :],
        )
        body(
            dict(zip(names, operand_refs, strict=True)),
            output_refs,
            dict(zip(scratch_names, scratch_refs, strict=True)),
        )

    return plgpu.kernel(
        kernel_entry,
        out_type=outputs,
        scratch_types=list(scratch.values()),
        grid=(num_blocks,),
        grid_names=("block",),
        cluster=tuple((cluster_axis_size or {}).values()),
        cluster_names=tuple(cluster_axis_size or {}),
        num_threads=consumer_warpgroups + 1,
        thread_name="warpgroup",
        # The kernels synchronise explicitly, and manage their registers by Mosaic's lane semantics.
        compiler_params=plgpu.CompilerParams(
            approx_math=True, unsafe_no_auto_barriers=True, lowering_semantics=plgpu.LoweringSemantics.Lane
        ),
    )(*operands.values())


def wgmma_transforms(swizzle_bytes: int = 128, itemsize: int = 2) -> tuple[Any, ...]:
    """Returns the layout of WGMMA operands in shared memory, of `itemsize` bytes per element, with a swizzle of
    `swizzle_bytes` bytes.
    """
    # Swizzle atoms: eight rows of `swizzle_bytes`. WGMMA's descriptors address shared memory in these units.
    return plgpu.TilingTransform((8, swizzle_bytes // itemsize)), plgpu.SwizzleTransform(swizzle_bytes)


WGMMA_TRANSFORMS = wgmma_transforms()
"""The layout of 16-bit operands of WGMMA with the 128-byte swizzle."""


def wgmma_operand_smem(shape: tuple[int, ...], dtype: Any, swizzle_bytes: int = 128) -> Any:
    """Returns shared memory in the layout of WGMMA operands."""
    return plgpu.SMEM(shape, dtype, transforms=wgmma_transforms(swizzle_bytes, jnp.dtype(dtype).itemsize))


def pad_rows(x: jax.Array, min_rows: int) -> jax.Array:
    """Pads rows with zeros as copies require: to a multiple of eight, and to at least the rows of one copy.

    Copies skip what is past an array's end, so no more padding is needed.
    """
    # A copy moves at least the eight rows of a swizzle atom.
    min_rows = max(min_rows, cdiv(x.shape[1], 8) * 8)
    return jnp.pad(x, ((0, 0), (0, max(0, min_rows - x.shape[1])), (0, 0), (0, 0)))
