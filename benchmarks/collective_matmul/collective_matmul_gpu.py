"""All-gather and reduce-scatter products over the GPUs of one host against the product alone.

    python benchmarks/collective_matmul/collective_matmul_gpu.py                    # 8192 x 8192 x 28672 a GPU
    python benchmarks/collective_matmul/collective_matmul_gpu.py --sizes 4096 4096 14336
    python benchmarks/collective_matmul/collective_matmul_gpu.py --check            # no times, small, on any devices

`mosaic` wants `XLA_FLAGS=--xla_gpu_enable_command_buffer=-CUSTOM_CALL`.

Sizes are the rows of the whole product, the model's width, and the features of one GPU. The product alone has what
it multiplies on every GPU and sends nothing: no other side can be faster. `collective` is XLA's all-gather or
reduce-scatter and one product, and `ring` is ours; `, peer` copies without a kernel of NCCL. `mosaic` is our kernel of
Mosaic GPU. JAX's `collective_matmul_mgpu` has the all-gather alone. All sides get the same normal bfloat16 numbers,
which are others on each GPU, and have to agree with the product of the whole, in both passes, before anything is timed.
Sides are interleaved, and medians are printed. `gradients` is the output, and the gradients of both arrays for it:
three products.
"""

import argparse
import dataclasses
import functools
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from ejkernel.modules import (
    AllGatherMatmulConfig,
    ReduceScatterMatmulConfig,
    all_gather_matmul,
    reduce_scatter_matmul,
)

sys.path.append(str(Path(__file__).parents[1]))
import shared.report
import shared.turns

AXIS = "gpus"
ROWS, COLUMNS_SPEC = P(AXIS), P(None, AXIS)
TOLERANCE = 1e-2
"""Of the relative error of bfloat16 results, in the Frobenius norm; rows of another device have an error above 1."""
CALLS = 6
"""Calls before the one that is compared: XLA captures programs into CUDA graphs after the first ones."""
PEER = {"xla_gpu_collective_permute_mode": "COLLECTIVES_PEER_MEMORY"}
OVERLAP = {"xla_gpu_enable_latency_hiding_scheduler": True}
COLUMNS = ("product", "pass", "side", "median ms", "TFLOP/s a GPU", "of the product alone")


@dataclasses.dataclass(frozen=True)
class Side:
    """A way to compute a product on one device of the mesh.

    Attributes:
        call: (x, y) of the device -> output of the device.
        is_alone: Whether the device has what it multiplies, and sends nothing.
        options: Of XLA's compiler.
        has_gradients: Whether its gradients are timed.
        is_optional: Whether it is left out where JAX or XLA do not have it.
    """

    call: Callable[[jax.Array, jax.Array], jax.Array]
    is_alone: bool = False
    options: dict[str, Any] = dataclasses.field(default_factory=dict)
    has_gradients: bool = True
    is_optional: bool = False


def jax_all_gather_matmul(x: jax.Array, y: jax.Array, tile_n: int) -> jax.Array:
    """JAX's own kernel."""
    from jax.experimental.pallas.ops.gpu import collective_matmul_mgpu, hopper_matmul_mgpu  # noqa: TID251

    config = hopper_matmul_mgpu.TuningConfig(
        tile_m=128, tile_n=tile_n, tile_k=64, max_concurrent_steps=4, grid_tile_width=8
    )
    return collective_matmul_mgpu.all_gather_lhs_matmul(x, y, AXIS, config=config, dtype=x.dtype)


def sides_of(product: str, on_gpu: bool) -> dict[str, Side]:
    """The sides of `"all-gather"` or `"reduce-scatter"`."""
    op, config = {
        "all-gather": (all_gather_matmul, AllGatherMatmulConfig),
        "reduce-scatter": (reduce_scatter_matmul, ReduceScatterMatmulConfig),
    }[product]

    def ours(overlap: bool, **options: Any) -> Side:
        call = functools.partial(op, axis_name=AXIS, cfg=config(overlap=overlap), platform="xla")
        return Side(call, options={**OVERLAP, **options} if on_gpu else {})

    alone = jnp.matmul if product == "all-gather" else lambda x, y: x @ y.T
    sides = {"product alone": Side(alone, is_alone=True), "collective": ours(overlap=False), "ring": ours(overlap=True)}
    if on_gpu:
        kernel = functools.partial(op, axis_name=AXIS, platform="pallas")
        sides["mosaic"] = Side(kernel, is_optional=True)
        sides["ring, peer"] = dataclasses.replace(ours(overlap=True, **PEER), is_optional=True)
    if on_gpu and product == "all-gather":
        for tile_n in (128, 256):
            call = functools.partial(jax_all_gather_matmul, tile_n=tile_n)
            sides[f"jax collective_matmul_mgpu, tile_n {tile_n}"] = Side(call, has_gradients=False, is_optional=True)
    return sides


def specs_of(product: str, is_alone: bool) -> tuple[tuple[P, P], P, tuple[P, P]]:
    """How the arrays, the output and the gradients of a product are split.

    What a device alone computes of an array that it has not alone, are the device's rows of the result here.
    """
    if product == "all-gather":
        x_spec = P() if is_alone else ROWS
        return (x_spec, COLUMNS_SPEC), COLUMNS_SPEC, (ROWS, COLUMNS_SPEC)
    return (COLUMNS_SPEC, COLUMNS_SPEC), ROWS, (COLUMNS_SPEC, COLUMNS_SPEC)


def arrays_of(product: str, sizes: tuple[int, int, int], mesh: Mesh) -> dict[bool, tuple[jax.Array, ...]]:
    """x and y of the whole product, as a device alone wants them, and as the others do."""
    rows, width, features = sizes
    total = features * mesh.size
    shapes = ((rows, width), (width, total)) if product == "all-gather" else ((rows, total), (width, total))
    contracted = width if product == "all-gather" else total

    def make() -> tuple[jax.Array, ...]:
        keys = jax.random.split(jax.random.key(0))
        return tuple(
            jax.random.normal(key, shape, jnp.bfloat16) * jnp.bfloat16(contracted**-0.25)
            for key, shape in zip(keys, shapes, strict=True)
        )

    shardings = {alone: [NamedSharding(mesh, spec) for spec in specs_of(product, alone)[0]] for alone in (True, False)}
    return {alone: jax.jit(make, out_shardings=tuple(found))() for alone, found in shardings.items()}


def with_gradients(
    call: Callable[[jax.Array, jax.Array], jax.Array], x: jax.Array, y: jax.Array
) -> tuple[jax.Array, ...]:
    """The output of a call, and the gradients of both arrays for it."""
    output, pull = jax.vjp(call, x, y)
    return output, *pull(output)


def compiled(product: str, side: Side, mesh: Mesh, arrays: tuple[jax.Array, ...], gradients: bool) -> Any:
    """A side's program, of the output or of the gradients of both arrays."""
    in_specs, out_spec, gradient_specs = specs_of(product, side.is_alone)
    call = functools.partial(with_gradients, side.call) if gradients else side.call
    out_specs = (out_spec, *gradient_specs) if gradients else out_spec
    mapped = jax.shard_map(call, mesh=mesh, in_specs=in_specs, out_specs=out_specs, check_vma=False)
    return jax.jit(mapped).lower(*arrays).compile(compiler_options=side.options)


def expected(product: str, mesh: Mesh, arrays: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
    """The output and the gradients of the whole product, which XLA splits over the devices as it likes."""
    call = jnp.matmul if product == "all-gather" else lambda x, y: x @ y.T
    _, out_spec, gradient_specs = specs_of(product, is_alone=False)
    shardings = tuple(NamedSharding(mesh, spec) for spec in (out_spec, *gradient_specs))
    return jax.jit(functools.partial(with_gradients, call), out_shardings=shardings)(*arrays)


@jax.jit
def relative_error(got: jax.Array, want: jax.Array) -> jax.Array:
    """In the Frobenius norm."""
    want = want.astype(jnp.float32)
    return jnp.linalg.norm(got.astype(jnp.float32) - want) / jnp.linalg.norm(want)


def check(product: str, which: str, name: str, results: Any, references: tuple[jax.Array, ...]) -> None:
    """Prints the largest error of a side's results, and stops where it is too large."""
    found = results if isinstance(results, tuple) else (results,)
    error = max(float(relative_error(*pair)) for pair in zip(found, references[: len(found)], strict=True))
    print(f"<!-- {product}, {which}, {name}: relative error {error:.1e} -->", flush=True)
    assert error < TOLERANCE, name


def measure(product: str, sizes: tuple[int, int, int], mesh: Mesh, rounds: int, on_gpu: bool) -> list[list[str]]:
    """The rows of a product's table; without rounds, checks alone."""
    sides, table = sides_of(product, on_gpu), []
    arrays = arrays_of(product, sizes, mesh)
    references = expected(product, mesh, arrays[False])
    for which in ("forward", "gradients"):
        programs: dict[str, Any] = {}
        for name, side in sides.items():
            if which == "gradients" and not side.has_gradients:
                continue
            try:
                programs[name] = compiled(product, side, mesh, arrays[side.is_alone], which == "gradients")
            except (ImportError, NotImplementedError, ValueError, jax.errors.JaxRuntimeError) as error:
                if not side.is_optional:
                    raise
                print(f"<!-- {name} is left out: {str(error).splitlines()[0]} -->", flush=True)
        for name, program in programs.items():
            if not sides[name].is_alone:
                for _ in range(CALLS):
                    jax.block_until_ready(program(*arrays[False]))
                results = program(*arrays[False])
                check(product, which, name, results, references)
        if rounds:
            table += timed_rows(product, which, sizes, programs, arrays, sides, rounds)
    return table


def timed_rows(
    product: str,
    which: str,
    sizes: tuple[int, int, int],
    programs: dict[str, Any],
    arrays: dict[bool, tuple[jax.Array, ...]],
    sides: dict[str, Side],
    rounds: int,
) -> list[list[str]]:
    """One row per side."""
    runs = {name: functools.partial(program, *arrays[sides[name].is_alone]) for name, program in programs.items()}
    seconds = shared.turns.time_in_turns(runs, rounds)
    operations = 2 * sizes[0] * sizes[1] * sizes[2] * (1 if which == "forward" else 3)
    return [
        [
            product,
            which,
            name,
            f"{one * 1e3:.3f}",
            f"{operations / one / 1e12:.0f}",
            f"{seconds['product alone'] / one:.3f}",
        ]
        for name, one in seconds.items()
    ]


def main() -> None:
    """Prints the table."""
    parser = argparse.ArgumentParser(description="All-gather and reduce-scatter products against the product alone.")
    parser.add_argument("--sizes", type=int, nargs=3, default=(8192, 8192, 28672), help="rows, width, features a GPU")
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--check", action="store_true", help="compare small products, without times, on any devices")
    parser.add_argument("--quick", action="store_true", help="fewer rounds")
    options = parser.parse_args()
    on_gpu = jax.default_backend() == "gpu"
    if not options.check and not shared.report.has_gpu():
        return
    mesh = jax.make_mesh((jax.device_count(),), (AXIS,), (AxisType.Auto,))
    sizes = (512, 256, 512) if options.check else tuple(options.sizes)
    rounds = 0 if options.check else 3 if options.quick else options.rounds
    print(shared.report.heading())
    print(f"{mesh.size} devices; bfloat16; {' x '.join(map(str, sizes))} a device\n", flush=True)
    rows = [
        row for product in ("all-gather", "reduce-scatter") for row in measure(product, sizes, mesh, rounds, on_gpu)
    ]
    print(shared.report.markdown_table(COLUMNS, rows))


if __name__ == "__main__":
    main()
