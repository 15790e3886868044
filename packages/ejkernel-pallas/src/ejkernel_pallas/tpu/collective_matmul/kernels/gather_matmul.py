"""Multiplies the rows of all devices, which travel in halves around the ring in both directions.

HBM         rows [2, half, K] ── stream ─► slots [2, half, K] ── stream ─► next device
                     └───────────────┬───────────┘
MXU         one tile of y times a tile of both halves that are here
HBM                                  └─► output [P, 2, half, N]
"""

from typing import Any, NamedTuple

import jax

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


class GatherRefs(NamedTuple):
    """The refs of the kernel.

    Attributes:
        streams: Both streams of rows.
        rows: This device's rows [2, half, K].
        y: [K, N], or [N, K].
        output: [P, 2, half, N].
        sums: Scratch memory.
    """

    streams: tuple[Stream, Stream]
    rows: Ref
    y: Ref
    output: Ref
    sums: Ref


def gather_matmul(rows: jax.Array, y: jax.Array, y_axis: int, spec: CollectiveSpec) -> jax.Array:
    """Returns the rows of all devices times y.

    Args:
        rows: [M, K], this device's rows.
        y: [K, N], or [N, K].
        y_axis: The contracted axis of y.
        spec: The constants.

    Returns:
        [P M, N] in the operands' dtype.
    """
    num_rows, num_columns = rows.shape[0], y.shape[1 - y_axis]
    halves = pad_axis(pad_axis(rows, 0, 2 * ROW_MULTIPLE), 1, LANES).reshape(2, -1, -(-rows.shape[1] // LANES) * LANES)
    y = pad_axis(pad_axis(y, 0, LANES), 1, LANES)
    _, half, contracted = halves.shape
    tile = spec.fit_tiles(half, y.shape[1 - y_axis], contracted)
    slots = Operand(jax.ShapeDtypeStruct((2, half, contracted), rows.dtype))
    shape = jax.ShapeDtypeStruct((spec.num_devices, 2, half, y.shape[1 - y_axis]), rows.dtype)

    def kernel(refs: GatherRefs) -> None:
        _multiply_arrivals(refs, spec, tile, ContractedAxes(1, y_axis))

    results = launch(
        KernelCall(
            name="ejkernel_all_gather_matmul",
            kernel=kernel,
            refs=lambda **refs: GatherRefs(Stream.both(spec.axis_name, spec.num_devices, refs), **refs),
            scalar_tables={"device": spec.device_index},
            inputs={"rows": Operand(halves), "y": Operand(y)},
            outputs={"output": Operand(shape), **{f"{name}_slots": slots for name in DIRECTIONS}},
            scratch=sum_scratch(2, tile) | stream_scratch(),
            vmem_limit=spec.vmem_limit(tile, num_sums=2),
            has_inner_pipelines=True,
            compiler_params=spec.compiler_params,
        )
    )
    output = results["output"].reshape(spec.num_devices, 2 * half, -1)
    return output[:, :num_rows, :num_columns].reshape(-1, num_columns)


def _multiply_arrivals(refs: GatherRefs, spec: CollectiveSpec, tile: TileShape, axes: ContractedAxes) -> None:
    """Multiplies each pair of halves by y when it is here."""

    def process(step: Any, halves: tuple[Ref, Ref]) -> None:
        products = [Product(half, refs.y) for half in halves]
        outputs = [refs.output.at[stream.device_at(-step), n] for n, stream in enumerate(refs.streams)]
        multiply_rows(spec, tile, axes, products, outputs, refs.sums, shares_b=True)

    for_each_arrival(refs.streams, (refs.rows.at[0], refs.rows.at[1]), process)
