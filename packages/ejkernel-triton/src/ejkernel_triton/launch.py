"""Launches Triton kernels, the only place that does, in the way that the process supports:

- on a device, through jax-triton;
- with `TRITON_INTERPRET=1` in the environment, by Triton's interpreter in a callback, on any device and under `jit`;
- inside `collect_launches`, not at all: launches are listed, to be compiled for a named target.

Elements of outputs that a kernel does not write are undefined on a device and NaN in the interpreter.
"""

import contextlib
import contextvars
import dataclasses
import functools
import os
import warnings
from collections.abc import Callable, Generator, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import custom_batching

from ejkernel import _compat as core_compat
from ejkernel.ops.device import current_device
from ejkernel.planning.in_place import call_unfused
from ejkernel_triton import _compat

ShapeDtype = jax.ShapeDtypeStruct


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class Launch:
    """One launch of a kernel.

    Attributes:
        kernel: The `triton.jit` function; its parameters are inputs, outputs and constants.
        inputs: Shapes of the input arrays.
        outputs: Shapes of the arrays that it writes.
        grid: Number of programs.
        num_warps: Warps per program.
        num_stages: Depth of the software pipelines.
        constants: Its `tl.constexpr` arguments by name.
        aliases: Input index -> output index, for inputs that an output is initialised with, in the same memory.
    """

    kernel: Any
    inputs: tuple[ShapeDtype, ...]
    outputs: tuple[ShapeDtype, ...]
    grid: int
    num_warps: int
    num_stages: int
    constants: Mapping[str, Any]
    aliases: Mapping[int, int] = dataclasses.field(default_factory=dict[int, int])


_collected_launches: contextvars.ContextVar[list[Launch] | None] = contextvars.ContextVar("collecting", default=None)


@contextlib.contextmanager
def collect_launches() -> Generator[list[Launch]]:
    """Lists the launches of functions that are traced inside the block, instead of running them: their outputs are 0.

    JAX caches traces by function, so pass one that is used nowhere else, such as a `lambda`.
    """
    launches: list[Launch] = []
    token = _collected_launches.set(launches)
    try:
        yield launches
    finally:
        _collected_launches.reset(token)


def is_interpreting() -> bool:
    """Returns whether this process interprets Triton kernels, which depends on the environment when Triton is
    imported.
    """
    return os.environ.get("TRITON_INTERPRET", "0").lower() in ("1", "true", "yes", "on")


def launch(
    kernel: Any,
    inputs: Sequence[jax.Array | None],
    outputs: Sequence[ShapeDtype | int],
    *,
    batch: int,
    grid: int,
    num_warps: int,
    num_stages: int,
    constants: Mapping[str, Any],
) -> tuple[jax.Array, ...]:
    """Runs a kernel.

    The first axis of every array is the batch. An entry of an array may serve several consecutive rows of the batch:
    the constant `per` has their number for each array, by the array's name in capitals, and row b reads entry `b //
    per.NAME`. So `jax.vmap` launches a kernel once, for a larger batch.

    Args:
        kernel: A `triton.jit` function whose parameters are the inputs, the outputs and the constants, in this order.
        inputs: Arrays. For None, an input that is absent according to the constants, the first array is passed instead.
        outputs: Shapes and dtypes of the outputs; or, for one that is partly written, the index of the input that it
            starts as, whose memory it reuses. The kernel reads such an input through the output's pointer; the array
            that is passed for the input itself is unspecified. Such outputs come before all others
            (`_compat.call_kernel` says why).
        batch: Number of batch rows.
        grid: Number of programs, proportional to the batch.
        num_warps: Warps per program.
        num_stages: Depth of the software pipelines.
        constants: Hashable `tl.constexpr` arguments other than `per`, none of which depends on the batch.

    Returns:
        The outputs.

    Raises:
        ValueError: An output that reuses an input's memory comes after one that does not.
    """
    # A kernel's signature is fixed, so an absent array is replaced by another one, which the kernel does not read.
    arrays = tuple(inputs[0] if x is None else x for x in inputs)
    aliases = _find_aliases(outputs)
    shapes = [_shape_and_dtype(arrays[x]) if isinstance(x, int) else x for x in outputs]
    call = Launch(
        kernel=kernel,
        inputs=tuple(map(_shape_and_dtype, arrays)),
        outputs=tuple(shapes),
        grid=grid,
        num_warps=num_warps,
        num_stages=num_stages,
        constants={**constants, "per": _rows_per_entry(kernel, batch, [*inputs, *shapes])},
        aliases=aliases,
    )
    # Returns zeros, so that tracing goes on to launches that read them.
    if (launches := _collected_launches.get()) is not None:
        launches.append(call)
        return tuple(jnp.zeros(x.shape, x.dtype) for x in shapes)
    run = custom_batching.custom_vmap(
        _make_interpreter_call(call) if _compat.is_interpreted(kernel) else _make_device_call(call)
    )
    options = {"batch": batch, "num_warps": num_warps, "num_stages": num_stages, "constants": constants}
    run.def_vmap(_vmap_rule(call, inputs, outputs, options))
    return core_compat.as_varying(run(*core_compat.as_varying(arrays, arrays)), arrays)


def _vmap_rule(
    call: Launch, inputs: Sequence[jax.Array | None], outputs: Sequence[ShapeDtype | int], options: Mapping[str, Any]
) -> Callable[..., tuple[tuple[jax.Array, ...], tuple[bool, ...]]]:
    """Returns the function that folds a vmapped axis of a launch into its batch; the arguments are those of `launch`,
    `options` without the grid.
    """

    def fold_vmapped_axis(
        axis_size: int, are_vmapped: list[bool], *vmapped_arrays: jax.Array
    ) -> tuple[tuple[jax.Array, ...], tuple[bool, ...]]:
        folded_inputs = _fold_vmapped_inputs(vmapped_arrays, axis_size, are_vmapped, call.aliases)
        launch_inputs = [None if x is None else y for x, y in zip(inputs, folded_inputs, strict=True)]
        folded_outputs = [
            x if isinstance(x, int) else ShapeDtype((axis_size * x.shape[0], *x.shape[1:]), x.dtype) for x in outputs
        ]
        # Calls `launch` again, so that an outer vmap finds this rule too.
        folded_options: dict[str, Any] = {
            **options,
            "batch": axis_size * options["batch"],
            "grid": axis_size * call.grid,
        }
        results = launch(call.kernel, launch_inputs, folded_outputs, **folded_options)
        shapes = [(axis_size, *x.shape) for x in call.outputs]
        return tuple(x.reshape(y) for x, y in zip(results, shapes, strict=True)), (True,) * len(results)

    return fold_vmapped_axis


def _find_aliases(outputs: Sequence[ShapeDtype | int]) -> dict[int, int]:
    """Returns input index -> output index of the outputs that reuse an input's memory.

    Raises:
        ValueError: Such an output comes after one that does not.
    """
    aliases = {x: n for n, x in enumerate(outputs) if isinstance(x, int)}
    if any(n >= len(aliases) for n in aliases.values()):
        raise ValueError(
            f"outputs: got the memory of an input for outputs {sorted(aliases.values())} of {len(outputs)}, wants such "
            "outputs before all others, as the kernel's parameters too"
        )
    return aliases


def _fold_vmapped_inputs(
    arrays: Sequence[jax.Array], axis_size: int, are_vmapped: Sequence[bool], aliases: Mapping[int, int]
) -> list[jax.Array]:
    """Returns the inputs of a single launch for all `axis_size` elements of a vmapped axis, which become batch rows."""
    # An array that is written needs its own copy for every element of the vmapped axis.
    written = [n in aliases and not b for n, b in enumerate(are_vmapped)]
    copies = [jnp.broadcast_to(x, (axis_size, *x.shape)) if w else x for x, w in zip(arrays, written, strict=True)]
    return [_fold_into_batch(x, axis_size, b or w) for x, b, w in zip(copies, are_vmapped, written, strict=True)]


def _shape_and_dtype(x: Any) -> ShapeDtype:
    return ShapeDtype(x.shape, x.dtype)


def _fold_into_batch(x: jax.Array, axis_size: int, is_vmapped: bool) -> jax.Array:
    """Returns an array for a batch that is `axis_size` times as large: mapped, or shared without a copy if it has one
    row.
    """
    if not is_vmapped:
        if x.shape[0] == 1:
            return x
        x = jnp.broadcast_to(x, (axis_size, *x.shape))
    return x.reshape(-1, *x.shape[2:])


def _rows_per_entry(kernel: Any, batch: int, arrays: Sequence[Any]) -> Any:
    """Returns the constant `per` of a kernel: for each array, the number of batch rows that share an entry of it."""
    # Not strict, since constants follow the arrays among a kernel's parameters.
    named = zip(kernel.arg_names, arrays, strict=False)
    per = {name.upper(): batch // x.shape[0] for name, x in named if x is not None}
    # A dataclass, so that a kernel can read `per.QUERY`; one type per set of names, so that equal constants compare
    # equal.
    return _rows_per_entry_type(tuple(per))(**per)


@functools.cache
def _rows_per_entry_type(array_names: tuple[str, ...]) -> type:
    return dataclasses.make_dataclass("Per", [(name, int) for name in array_names], frozen=True)


def _make_device_call(call: Launch) -> Callable[..., tuple[jax.Array, ...]]:
    capability = current_device().compute_capability

    def run(*arrays: jax.Array) -> tuple[jax.Array, ...]:
        with warnings.catch_warnings():
            # jax-triton 0.4 recommends references instead, which 0.3 does not support.
            warnings.filterwarnings("ignore", "input_output_aliases is deprecated", DeprecationWarning)
            return _compat.call_kernel(
                call.kernel,
                arrays,
                call.outputs,
                call.aliases,
                grid=(call.grid,),
                num_warps=call.num_warps,
                num_stages=call.num_stages,
                compute_capability=None if capability is None else round(capability * 10),
                **_compat.fp_fusion_argument(),
                **call.constants,
            )

    return functools.partial(call_unfused, run) if call.aliases else run


def _make_interpreter_call(call: Launch) -> Callable[..., tuple[jax.Array, ...]]:
    from ejkernel_triton import interpreter

    def run(*arrays: jax.Array) -> tuple[jax.Array, ...]:
        def callback(*values: Any) -> tuple[Any, ...]:
            return interpreter.run(call.kernel, values, call.outputs, call.grid, call.constants, call.aliases)

        return jax.pure_callback(callback, call.outputs, *arrays, vmap_method="sequential")

    return run
