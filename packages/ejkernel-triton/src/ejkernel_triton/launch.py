"""The one door to Triton: a kernel with its arrays, launched in whichever way the process can.

- on a device, through jax-triton;
- with `TRITON_INTERPRET=1` in the environment, by Triton's interpreter in a callback, on any device and under `jit`;
- inside `collected`, not at all: what would be launched is listed, ready to be compiled for a named target.

Outputs are written by the kernel alone: what it leaves out is undefined on a device and NaN in the interpreter.
"""

import contextlib
import contextvars
import dataclasses
import os
from collections.abc import Callable, Generator, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import custom_batching

from ejkernel import _compat as core_compat
from ejkernel.ops.device import current_device
from ejkernel_triton import _compat

Shape = jax.ShapeDtypeStruct


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class Launch:
    """One launch of a kernel.

    Attributes:
        kernel: The `triton.jit` function: inputs, outputs, then constants.
        inputs: Shapes of the input arrays.
        outputs: Shapes of the arrays that it writes.
        grid: Programs.
        num_warps: Warps a program.
        num_stages: Depth of the software pipelines.
        constants: Its `tl.constexpr` arguments by name.
    """

    kernel: Any
    inputs: tuple[Shape, ...]
    outputs: tuple[Shape, ...]
    grid: int
    num_warps: int
    num_stages: int
    constants: Mapping[str, Any]


_collecting: contextvars.ContextVar[list[Launch] | None] = contextvars.ContextVar("collecting", default=None)


@contextlib.contextmanager
def collected() -> Generator[list[Launch]]:
    """Lists the launches of functions traced inside the block, instead of carrying them out: their outputs are 0."""
    launches: list[Launch] = []
    token = _collecting.set(launches)
    try:
        yield launches
    finally:
        _collecting.reset(token)


def interpreting() -> bool:
    """Whether this process interprets Triton kernels: Triton's own switch, which it reads when it is imported."""
    return os.environ.get("TRITON_INTERPRET", "0").lower() in ("1", "true", "yes", "on")


def launch(
    kernel: Any,
    inputs: Sequence[jax.Array | None],
    outputs: Sequence[Shape],
    *,
    grid: int,
    num_warps: int,
    num_stages: int,
    constants: Mapping[str, Any],
) -> tuple[jax.Array, ...]:
    """Runs a kernel.

    Args:
        kernel: A `triton.jit` function whose parameters are the inputs, the outputs and the constants, in this order.
        inputs: Arrays. None, for an input that the constants say is not there, passes the first array in its place.
        outputs: Shapes and dtypes of what it writes.
        grid: Number of programs.
        num_warps: Warps a program.
        num_stages: Depth of the software pipelines.
        constants: Hashable `tl.constexpr` arguments.

    Returns:
        The outputs.
    """
    arrays = tuple(inputs[0] if x is None else x for x in inputs)
    call = Launch(
        kernel=kernel,
        inputs=tuple(Shape(x.shape, x.dtype) for x in arrays if x is not None),
        outputs=tuple(outputs),
        grid=grid,
        num_warps=num_warps,
        num_stages=num_stages,
        constants=dict(constants),
    )
    if (launches := _collecting.get()) is not None:
        launches.append(call)
        return tuple(jnp.zeros(x.shape, x.dtype) for x in outputs)
    run = _interpreted(call) if _compat.is_interpreted(kernel) else _on_device(call)
    made = custom_batching.sequential_vmap(run)(*core_compat.as_varying(arrays, arrays))
    return core_compat.as_varying(made, arrays)


def _on_device(call: Launch) -> Callable[..., tuple[jax.Array, ...]]:
    capability = current_device().compute_capability

    def run(*arrays: jax.Array) -> tuple[jax.Array, ...]:
        options: dict[str, Any] = {_compat.output_argument(): list(call.outputs), **call.constants}
        made = _compat.triton_call()(
            *arrays,
            kernel=call.kernel,
            grid=(call.grid,),
            num_warps=call.num_warps,
            num_stages=call.num_stages,
            compute_capability=None if capability is None else round(capability * 10),
            **options,
        )
        return tuple(made)

    return run


def _interpreted(call: Launch) -> Callable[..., tuple[jax.Array, ...]]:
    from ejkernel_triton import interpreter

    def run(*arrays: jax.Array) -> tuple[jax.Array, ...]:
        def callback(*values: Any) -> tuple[Any, ...]:
            return interpreter.run(call.kernel, values, call.outputs, call.grid, call.constants)

        return jax.pure_callback(callback, call.outputs, *arrays, vmap_method="sequential")

    return run
