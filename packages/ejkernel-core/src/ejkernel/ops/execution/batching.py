"""A kernel over a batch, with one configuration for all of it."""

from collections.abc import Callable
from typing import Any

import jax
import numpy as np

from ejkernel.ops.execution.executor import Executor
from ejkernel.ops.execution.kernel import Kernel


def vmap_with_config(executor: Executor, kernel: Kernel[Any, Any], in_axes: Any = 0) -> Callable[..., Any]:
    """Returns the kernel over a batch of calls; the configuration is the one that a single call of the batch would
    have.

    Args:
        executor: Chooses the configuration, when the function is called.
        kernel: The kernel.
        in_axes: As for `jax.vmap`: of each positional argument. Keyword arguments are shared by the batch.

    Raises:
        ValueError: No positional argument is batched.
    """

    def run(*args: Any, **kwargs: Any) -> Any:
        axes = in_axes if isinstance(in_axes, tuple | list) else (in_axes,) * len(args)
        if len(axes) != len(args) or not any(axis is not None for axis in axes):
            wants = "an axis or None for each, and at least one axis"
            raise ValueError(f"in_axes: got {in_axes!r} for {len(args)} positional arguments, wants {wants}")
        # A None among the arguments has no axis to map.
        axes = tuple(None if arg is None else axis for arg, axis in zip(args, axes, strict=True))
        one = [_shapes_of_element(arg, axis) for arg, axis in zip(args, axes, strict=True)]
        config = executor.choose_config(kernel, *one, **kwargs)
        return jax.vmap(lambda *each: executor(kernel, *each, **{**kwargs, "cfg": config}), in_axes=axes)(*args)

    return run


def _shapes_of_element(arg: Any, axis: int | None) -> Any:
    """Returns the shapes of one element of a batch."""
    if axis is None:
        return arg
    return jax.tree.map(lambda x: jax.ShapeDtypeStruct(np.delete(x.shape, axis % x.ndim).tolist(), x.dtype), arg)
