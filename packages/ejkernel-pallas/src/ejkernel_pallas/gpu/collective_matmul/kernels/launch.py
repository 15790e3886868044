"""Launches of the kernels: shared memory, what devices exchange, and the number of blocks."""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax.custom_batching import sequential_vmap

from ejkernel_pallas.gpu.collective_matmul.kernels import gather_rows as rows_kernel
from ejkernel_pallas.gpu.collective_matmul.kernels.gather_matmul import gather_matmul_kernel
from ejkernel_pallas.gpu.collective_matmul.kernels.matmul_scatter import matmul_scatter_kernel
from ejkernel_pallas.gpu.collective_matmul.kernels.tiles import Call, SharedMemory, product_scratch
from ejkernel_pallas.gpu.collective_matmul.spec import CONSUMER_WARPGROUPS, CollectiveSpec
from ejkernel_pallas.gpu.hopper.launch import launch
from ejkernel_pallas.gpu.hopper.sizes import WGMMA_M
from ejkernel_pallas.gpu.hopper.tile_scheduler import num_multiprocessors


def gather_and_multiply(
    spec: CollectiveSpec, x: jax.Array, y: jax.Array, *, keeps_rows: bool
) -> tuple[jax.Array, jax.Array]:
    """Returns the rows of all devices times y, [P M, N], and those rows, [P M, K], this device's only if
    `keeps_rows`.
    """
    rows = spec.num_devices * spec.rows_per_device
    output = jax.ShapeDtypeStruct((rows, spec.num_columns), spec.dtype)
    kernel = functools.partial(gather_matmul_kernel, keeps_rows=keeps_rows)
    if spec.num_devices == 1:
        return _launch_product(kernel, spec, (output,), x, y)[0], x
    gathered = jax.ShapeDtypeStruct((rows, spec.contracted_size), spec.dtype)
    product, gathered_rows = _launch_product(kernel, spec, (output, gathered), x, y)
    return product, gathered_rows


def multiply_and_scatter(spec: CollectiveSpec, x: jax.Array, y: jax.Array) -> jax.Array:
    """Returns this device's rows of the sum of all devices' x times y, [M / P, N]."""
    shape = spec.rows_per_device, spec.num_columns
    outputs = [jax.ShapeDtypeStruct(shape, spec.dtype)]
    if spec.num_devices > 1:
        outputs.append(jax.ShapeDtypeStruct((spec.num_devices - 1, *shape), jnp.float32))
    return _launch_product(matmul_scatter_kernel, spec, tuple(outputs), x, y)[0]


def gather_rows(spec: CollectiveSpec, x: jax.Array) -> jax.Array:
    """Returns the rows of all devices, [P M, K]."""
    if spec.axis_name is None:
        return x
    (rows, width), blocks, axis_name = x.shape, num_multiprocessors(), spec.axis_name
    stage = rows_kernel.STAGES, WGMMA_M, rows_kernel.piece_columns(width)
    scratch = {
        "pieces": plgpu.SMEM(stage, x.dtype),
        "full": plgpu.Barrier(num_arrivals=1, num_barriers=rows_kernel.STAGES),
        "free": plgpu.Barrier(num_arrivals=1, num_barriers=rows_kernel.STAGES),
    }

    @sequential_vmap
    def run(x: jax.Array) -> jax.Array:
        def body(operands: dict[str, Any], outputs: Any, buffers: dict[str, Any]) -> None:
            arrivals = pl.get_global(plgpu.SemaphoreType.REGULAR)
            rows_kernel.gather_rows_kernel(
                rows_kernel.Call(axis_name, spec.num_devices, blocks, operands["x"], outputs[0], arrivals, **buffers)
            )

        shape = jax.ShapeDtypeStruct((spec.num_devices * rows, width), x.dtype)
        return launch(body, {"x": x}, [shape], scratch, blocks, 1)[0]

    return run(x)


def _launch_product(
    kernel: Callable[[Call], None],
    spec: CollectiveSpec,
    shapes: tuple[jax.ShapeDtypeStruct, ...],
    x: jax.Array,
    y: jax.Array,
) -> tuple[jax.Array, ...]:
    """Runs a kernel of products, whose second output is what other devices write."""
    blocks = min(num_multiprocessors(), spec.num_devices * spec.tiles_per_device)

    @sequential_vmap
    def run(x: jax.Array, y: jax.Array) -> tuple[jax.Array, ...]:
        def body(operands: dict[str, Any], outputs: Any, buffers: dict[str, Any]) -> None:
            exchange, arrivals = None, None
            if spec.num_devices > 1:
                exchange, arrivals = outputs[1], pl.get_global(plgpu.SemaphoreType.REGULAR((spec.arrivals,)))
            shared = SharedMemory(**buffers)
            kernel(Call(spec, blocks, operands["x"], operands["y"], outputs[0], exchange, arrivals, shared))

        return tuple(launch(body, {"x": x, "y": y}, list(shapes), product_scratch(spec), blocks, CONSUMER_WARPGROUPS))

    return run(x, y)
