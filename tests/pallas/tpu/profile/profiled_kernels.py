"""Small kernels that together use every unit the scheduler model knows, and scalar code of every kind."""

import importlib
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec

from ejkernel_pallas.tpu.profile import Workload

# Only backends import Pallas; what is measured here stands in for one.
pl = importlib.import_module("jax.experimental.pallas")
pltpu = importlib.import_module("jax.experimental.pallas.tpu")


def softmax() -> Workload:
    """Reductions over lanes, and exponentials."""

    def softmax_kernel(x: Any, out: Any) -> None:
        out[...] = jax.nn.softmax(x[...], axis=-1)

    x = jax.ShapeDtypeStruct((512, 256), jnp.float32)
    spec = pl.BlockSpec((128, 256), lambda i: (i, 0))
    call = pl.pallas_call(
        softmax_kernel, grid=(4,), in_specs=[spec], out_specs=spec, out_shape=x, name="softmax_kernel"
    )
    return Workload(function=call, args=(x,))


def transposed() -> Workload:
    """Transpositions, whose results come out of the cross-lane units in order."""

    def transposed_kernel(x: Any, out: Any) -> None:
        out[...] = x[...].T

    x = jax.ShapeDtypeStruct((512, 128), jnp.float32)
    in_spec, out_spec = pl.BlockSpec((128, 128), lambda i: (i, 0)), pl.BlockSpec((128, 128), lambda i: (0, i))
    shape = jax.ShapeDtypeStruct((128, 512), jnp.float32)
    call = pl.pallas_call(
        transposed_kernel, grid=(4,), in_specs=[in_spec], out_specs=out_spec, out_shape=shape, name="transposed_kernel"
    )
    return Workload(function=call, args=(x,))


def matmul(m: int = 512, k: int = 512, n: int = 256, block: int = 256) -> Workload:
    """A product with an accumulator: conditions on the grid, and the matrix units."""

    def matmul_kernel(a: Any, b: Any, out: Any, total: Any) -> None:
        @pl.when(pl.program_id(2) == 0)
        def _() -> None:
            total[...] = jnp.zeros_like(total)

        total[...] += jnp.dot(a[...], b[...], preferred_element_type=jnp.float32)

        @pl.when(pl.program_id(2) == k // block - 1)
        def _() -> None:
            out[...] = total[...].astype(out.dtype)

    call = pl.pallas_call(
        matmul_kernel,
        grid=(m // block, n // block, k // block),
        in_specs=[
            pl.BlockSpec((block, block), lambda i, j, s: (i, s)),
            pl.BlockSpec((block, block), lambda i, j, s: (s, j)),
        ],
        out_specs=pl.BlockSpec((block, block), lambda i, j, s: (i, j)),
        out_shape=jax.ShapeDtypeStruct((m, n), jnp.bfloat16),
        scratch_shapes=[pltpu.VMEM((block, block), jnp.float32)],
        name="matmul_kernel",
    )
    a, b = jax.ShapeDtypeStruct((m, k), jnp.bfloat16), jax.ShapeDtypeStruct((k, n), jnp.bfloat16)
    return Workload(function=call, args=(a, b), flops=2 * m * n * k)


def neighbours(devices: int = 8) -> Workload:
    """Every device sends its part to the next, and waits for that of the one before."""

    def neighbours_kernel(after: Any, x: Any, out: Any, sent: Any, arrived: Any) -> None:
        there = {"x": after[0]}
        copy = pltpu.make_async_remote_copy(x, out, sent, arrived.at[1], device_id=there)
        copy.start()
        copy.wait()

    def part(x: Any) -> Any:
        after = (jax.lax.axis_index("x") + jnp.ones(1, jnp.int32)) % devices
        spec = pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=1,
            in_specs=[pl.BlockSpec(memory_space=pl.ANY)],
            out_specs=pl.BlockSpec(memory_space=pl.ANY),
            scratch_shapes=[pltpu.SemaphoreType.DMA, pltpu.SemaphoreType.DMA((2,))],
        )
        params = pltpu.CompilerParams(has_side_effects=True)
        call = pl.pallas_call(
            neighbours_kernel, grid_spec=spec, out_shape=x, compiler_params=params, name="neighbours_kernel"
        )
        return call(after, x)

    def function(x: Any) -> Any:
        mesh, spec = jax.sharding.get_abstract_mesh(), PartitionSpec("x")
        return jax.shard_map(part, mesh=mesh, in_specs=spec, out_specs=spec, check_vma=False)(x)

    x = jax.ShapeDtypeStruct((512 * devices, 128), jnp.float32)
    return Workload(function=function, args=(x,), mesh_axes={"x": devices}, partition_specs=(PartitionSpec("x"),))


LENGTHS = np.array([3, 0, 5, 1], np.int32)
TABLE = np.array([[2, 0, 1, 0, 0], [0] * 5, [6, 3, 7, 4, 5], [1, 0, 0, 0, 0]], np.int32)


def pages(lengths: Any = LENGTHS, table: Any = TABLE) -> Workload:
    """Sums of the pages that a table names: a loop whose length, and copies whose source, are prefetched scalars."""

    def pages_kernel(lengths: Any, table: Any, pages: Any, out: Any, page: Any, arrived: Any) -> None:
        row = pl.program_id(0)

        def add(k: Any, total: Any) -> Any:
            copy = pltpu.make_async_copy(pages.at[table[row, k]], page, arrived)
            copy.start()
            copy.wait()
            return total + page[...]

        out[...] = jax.lax.fori_loop(0, lengths[row], add, jnp.zeros(out.shape, jnp.float32))

    memory = jax.ShapeDtypeStruct((8, 16, 128), jnp.float32)
    spec = pltpu.PrefetchScalarGridSpec(
        num_scalar_prefetch=2,
        grid=(4,),
        in_specs=[pl.BlockSpec(memory_space=pl.ANY)],
        out_specs=pl.BlockSpec((16, 128), lambda i, *_: (i, 0)),
        scratch_shapes=[pltpu.VMEM((16, 128), jnp.float32), pltpu.SemaphoreType.DMA],
    )
    shape = jax.ShapeDtypeStruct((64, 128), jnp.float32)
    call = pl.pallas_call(pages_kernel, grid_spec=spec, out_shape=shape, name="pages_kernel")
    return Workload(function=call, args=(lengths, table, memory))
