"""Sums products over the rows of all devices, which travel in halves around the ring in both directions.

The kernel is `gather_matmul` with another product: each pair of halves, transposed, times the rows of the same devices
of an array that is here. The float32 sum is in HBM, and is read and written once per pair.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from ejkernel_pallas.tpu.collective_matmul.kernels.streams import (
    DIRECTIONS,
    Stream,
    for_each_arrival,
    stream_scratch,
)
from ejkernel_pallas.tpu.collective_matmul.kernels.tiles import ContractedAxes, Product, multiply_rows, sum_scratch
from ejkernel_pallas.tpu.collective_matmul.spec import ROW_MULTIPLE, CollectiveSpec, TileShape, pad_axis
from ejkernel_pallas.tpu.mosaic.launch import KernelCall, Operand, Ref, launch
from ejkernel_pallas.tpu.mosaic.vectors import LANES


class GradientRefs(NamedTuple):
    """The refs of the kernel.

    Attributes:
        streams: Both streams of rows.
        local_rows: This device's rows of the array that travels [2, half, A].
        all_rows: The rows of all devices of the array that is here [P, 2, half, B].
        total: The sum [A, B] float32.
        sums: Scratch memory.
    """

    streams: tuple[Stream, Stream]
    local_rows: Ref
    all_rows: Ref
    total: Ref
    sums: Ref


def weight_gradient(local_rows: jax.Array, all_rows: jax.Array, spec: CollectiveSpec) -> jax.Array:
    """Returns `gathered(local_rows)^T all_rows`.

    Args:
        local_rows: [M, A], this device's rows.
        all_rows: [P M, B].
        spec: The constants.

    Returns:
        [A, B] float32.
    """
    shape = local_rows.shape[1], all_rows.shape[1]
    local = pad_axis(pad_axis(local_rows, 0, 2 * ROW_MULTIPLE), 1, LANES)
    every = all_rows.reshape(spec.num_devices, local_rows.shape[0], -1)
    every = pad_axis(pad_axis(every, 1, 2 * ROW_MULTIPLE), 2, LANES)
    half = local.shape[0] // 2
    tile = spec.fit_tiles(local.shape[1], every.shape[2], half)
    slots = Operand(jax.ShapeDtypeStruct((2, half, local.shape[1]), local.dtype))

    def kernel(refs: GradientRefs) -> None:
        _add_arrivals(refs, spec, tile)

    results = launch(
        KernelCall(
            name="ejkernel_collective_weight_gradient",
            kernel=kernel,
            refs=lambda **refs: GradientRefs(Stream.both(spec.axis_name, spec.num_devices, refs), **refs),
            scalar_tables={"device": spec.device_index},
            inputs={
                "local_rows": Operand(local.reshape(2, half, -1)),
                "all_rows": Operand(every.reshape(spec.num_devices, 2, half, -1)),
            },
            outputs={
                "total": Operand(jax.ShapeDtypeStruct((local.shape[1], every.shape[2]), jnp.float32)),
                **{f"{name}_slots": slots for name in DIRECTIONS},
            },
            scratch=sum_scratch(1, tile) | stream_scratch(),
            vmem_limit=spec.vmem_limit(tile, num_sums=2),
            has_inner_pipelines=True,
            compiler_params=spec.compiler_params,
        )
    )
    return results["total"][: shape[0], : shape[1]]


def _add_arrivals(refs: GradientRefs, spec: CollectiveSpec, tile: TileShape) -> None:
    """Adds the product of each pair of halves to the sum when it is here; the first pair begins the sum."""

    def process(step: Any, halves: tuple[Ref, Ref]) -> None:
        sources = [refs.all_rows.at[stream.device_at(-step), n] for n, stream in enumerate(refs.streams)]
        products = [Product(*pair) for pair in zip(halves, sources, strict=True)]
        earlier = None if isinstance(step, int) else refs.total  # step 0 is not in the loop
        multiply_rows(spec, tile, ContractedAxes(0, 0), products, [refs.total], refs.sums, earlier=earlier)

    for_each_arrival(refs.streams, (refs.local_rows.at[0], refs.local_rows.at[1]), process)
