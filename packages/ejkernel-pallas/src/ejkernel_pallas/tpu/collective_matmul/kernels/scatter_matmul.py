"""Sums products over devices: the sums of each device's rows travel around the ring until they are there.

The columns are halved: the sums of one half travel in one direction and those of the other half in the other. While the
sums of one half travel, the product of the other half is computed.

    step                 0                      1                                      P - 1
    products             x[i - 1] y[ahead]      arrived + x[i - 2] y[ahead]            arrived + x[i] y[ahead] -> output
    of device i          x[i + 1] y[back]       arrived + x[i + 2] y[back]             arrived + x[i] y[back]  -> output
    transfers            sums of step 0, under the products of the other half and of step 1, ...
"""

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from ejkernel_pallas.tpu.collective_matmul.kernels.streams import (
    DIRECTIONS,
    Stream,
    stream_scratch,
    wait_for_neighbours,
)
from ejkernel_pallas.tpu.collective_matmul.kernels.tiles import ContractedAxes, Product, multiply_rows, sum_scratch
from ejkernel_pallas.tpu.collective_matmul.spec import ROW_MULTIPLE, CollectiveSpec, TileShape, pad_axis
from ejkernel_pallas.tpu.mosaic.launch import KernelCall, Operand, Ref, launch
from ejkernel_pallas.tpu.mosaic.vectors import LANES


class ScatterRefs(NamedTuple):
    """The refs of the kernel.

    Attributes:
        streams: Both streams of float32 sums.
        x: The rows of all devices [P, rows, K].
        y: [K, N], or [N, K].
        output: This device's rows [rows, N].
        sums: Scratch memory.
    """

    streams: tuple[Stream, Stream]
    x: Ref
    y: Ref
    output: Ref
    sums: Ref


def scatter_matmul(x: jax.Array, y: jax.Array, y_axis: int, spec: CollectiveSpec) -> jax.Array:
    """Returns this device's rows of the sum over devices of x times y.

    Args:
        x: [P M, K].
        y: [K, N], or [N, K].
        y_axis: The contracted axis of y.
        spec: The constants.

    Returns:
        [M, N] in the operands' dtype.
    """
    num_rows, num_columns = x.shape[0] // spec.num_devices, y.shape[1 - y_axis]
    parts = pad_axis(pad_axis(x.reshape(spec.num_devices, num_rows, -1), 1, ROW_MULTIPLE), 2, LANES)
    y = pad_axis(pad_axis(y, y_axis, LANES), 1 - y_axis, 2 * LANES)
    _, rows, contracted = parts.shape
    columns = y.shape[1 - y_axis]
    tile = spec.fit_tiles(rows, columns // 2, contracted)
    slots = Operand(jax.ShapeDtypeStruct((2, rows, columns // 2), jnp.float32))

    def kernel(refs: ScatterRefs) -> None:
        _sum_over_devices(refs, functools.partial(_multiply, refs, spec, tile, ContractedAxes(1, y_axis)))

    results = launch(
        KernelCall(
            name="ejkernel_reduce_scatter_matmul",
            kernel=kernel,
            refs=lambda **refs: ScatterRefs(Stream.both(spec.axis_name, spec.num_devices, refs), **refs),
            scalar_tables={"device": spec.device_index},
            inputs={"x": Operand(parts), "y": Operand(y)},
            outputs={
                "output": Operand(jax.ShapeDtypeStruct((rows, columns), x.dtype)),
                **{f"{name}_slots": slots for name in DIRECTIONS},
            },
            scratch=sum_scratch(1, tile) | stream_scratch(),
            vmem_limit=spec.vmem_limit(tile, num_sums=2),
            has_inner_pipelines=True,
            compiler_params=spec.compiler_params,
        )
    )
    return results["output"][:num_rows, :num_columns]


def _sum_over_devices(refs: ScatterRefs, multiply: Any) -> None:
    """Runs the steps of both streams, one after the other, so that the sums of one travel under the other's product.

    Args:
        refs: The refs.
        multiply: (index of the stream, step, earlier sums, target) -> None; writes a product and the earlier sums.
    """
    last = refs.streams[0].num_devices - 1
    wait_for_neighbours(refs.streams)
    for n, stream in enumerate(refs.streams):
        multiply(n, 0, None, stream.slots.at[0])
        stream.copy(stream.slots.at[0], 1).start()

    def step(number: Any, carry: None) -> None:
        slot = lax.rem(number, 2)
        for n, stream in enumerate(refs.streams):
            _wait_for_sums(stream, slot)
            # The sums that were in the other slot have been sent, so the device before this one may write it.
            stream.signal_free_slot()
            multiply(n, number, stream.slots.at[slot], stream.slots.at[slot])
            stream.wait_free_slot()
            stream.copy(stream.slots.at[slot], 1 - slot).start()

    lax.fori_loop(1, last, step, None)
    for n, stream in enumerate(refs.streams):
        _wait_for_sums(stream, last % 2)
        multiply(n, last, stream.slots.at[last % 2], _columns_of_stream(refs.output, n, 1))


def _wait_for_sums(stream: Stream, slot: Any) -> None:
    """Waits until the previous step's sums have been sent, and until this step's have arrived in a slot."""
    stream.copy(stream.slots.at[1 - slot], slot).wait()


def _multiply(
    refs: ScatterRefs,
    spec: CollectiveSpec,
    tile: TileShape,
    axes: ContractedAxes,
    stream_index: int,
    step: Any,
    earlier: Ref | None,
    target: Ref,
) -> None:
    """Computes what this device adds to the sums that are here at a step: of the device that they reach at the end."""
    stream = refs.streams[stream_index]
    rows = refs.x.at[stream.device_at(spec.num_devices - 1 - step)]
    product = Product(rows, _columns_of_stream(refs.y, stream_index, 1 - axes.b))
    multiply_rows(spec, tile, axes, [product], [target], refs.sums, earlier=earlier)


def _columns_of_stream(array: Ref, stream_index: int, axis: int) -> Ref:
    """Returns the half of a matrix that a stream has, along an axis."""
    half = array.shape[axis] // 2
    piece = pl.ds(stream_index * half, half)
    return array.at[piece, :] if axis == 0 else array.at[:, piece]
