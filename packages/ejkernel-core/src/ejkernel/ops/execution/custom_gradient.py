"""The gradient that a kernel of the caller's own brings: `fwd_with_residuals` and `vjp` as a `jax.custom_vjp`."""

import dataclasses
import inspect
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.custom_derivatives import SymbolicZero

from ejkernel.types.residual_trees import ResidualTrees

KernelMethod = Callable[..., Any]


@jax.tree_util.register_static
@dataclasses.dataclass(frozen=True)
class _DifferentiatedLeaves:
    """The array leaves of the positional arguments that are differentiated."""

    is_differentiated: tuple[bool, ...]


def call(name: str, forward: KernelMethod, backward: KernelMethod, cfg: Any, kwargs: dict[str, Any], *args: Any) -> Any:
    """Calls a kernel such that it is differentiated by its own method.

    Args:
        name: The kernel's, for messages.
        forward: Its `fwd_with_residuals`.
        backward: Its `vjp`.
        cfg: The configuration of both.
        kwargs: Keyword arguments, which have no gradient.
        *args: Positional arguments.

    Raises:
        NotImplementedError: A gradient is taken of a keyword argument, or of an argument for which `vjp` returns None.
        TypeError: `vjp` returns another number of gradients than there are positional arguments.
    """
    leaves, structure = jax.tree.flatten((args, kwargs))
    is_array = [isinstance(leaf, jax.Array | np.ndarray) for leaf in leaves]
    constants = [None if array else leaf for leaf, array in zip(leaves, is_array, strict=True)]
    of_args = sum(is_array[: len(jax.tree.leaves(args))])

    def arguments_from_arrays(arrays: Any) -> Any:
        rest = iter(arrays)
        merged = [next(rest) if array else leaf for leaf, array in zip(constants, is_array, strict=True)]
        return jax.tree.unflatten(structure, merged)

    def run_primal(*arrays: Any) -> Any:
        positional, keywords = arguments_from_arrays(arrays)
        return forward(*positional, cfg=cfg, **keywords)[0]

    def run_forward(*arrays: Any) -> tuple[Any, Any]:
        if any(x.perturbed for x in arrays[of_args:]):
            raise NotImplementedError(
                f"{name}: got a keyword, wants a positional argument: vjp has gradients of positional arguments alone"
            )
        values = tuple(x.value for x in arrays)
        positional, keywords = arguments_from_arrays(values)
        output, residuals = forward(*positional, cfg=cfg, **keywords)
        differentiated = _DifferentiatedLeaves(tuple(bool(x.perturbed) for x in arrays[:of_args]))
        return output, trees.pack((values, output, residuals, differentiated))

    def run_backward(packed: list[jax.Array], cotangent: Any) -> tuple[Any, ...]:
        values, output, residuals, differentiated = trees.unpack(packed)
        positional, keywords = arguments_from_arrays(values)
        cotangent = jax.tree.map(_zeros_for_symbolic, cotangent, is_leaf=lambda x: isinstance(x, SymbolicZero))
        outputs = (output,) if _takes_output_argument(backward) else ()
        gradients = backward(residuals, *outputs, cotangent, *positional, cfg=cfg, **keywords)
        cotangents = _gradients_of_leaves(name, positional, gradients, differentiated.is_differentiated)
        return (*cotangents, *(_zero_gradient(x) for x in values[of_args:]))

    trees = ResidualTrees()
    differentiable = jax.custom_vjp(run_primal)
    differentiable.defvjp(run_forward, run_backward, symbolic_zeros=True)
    return differentiable(*(leaf for leaf, array in zip(leaves, is_array, strict=True) if array))


def _takes_output_argument(backward: KernelMethod) -> bool:
    """Returns whether a `vjp` is written with the output between residuals and cotangent."""
    names = list(inspect.signature(backward).parameters)
    return names[1:3] == ["y", "dy"]


def _gradients_of_leaves(
    name: str, args: tuple[Any, ...], gradients: Any, is_differentiated: tuple[bool, ...]
) -> list[Any]:
    """Returns one gradient for each array leaf of the positional arguments."""
    if isinstance(gradients, dict) or len(gradients) != len(args):
        got = type(gradients).__name__ if isinstance(gradients, dict) else f"{len(gradients)} gradients"
        raise TypeError(f"{name}: vjp returned {got}, wants one for each of {len(args)} positional arguments")
    cotangents: list[Any] = []
    for number, (arg, gradient) in enumerate(zip(args, gradients, strict=True)):
        arrays = [leaf for leaf in jax.tree.leaves(arg) if isinstance(leaf, jax.Array | np.ndarray)]
        differentiated = is_differentiated[len(cotangents) : len(cotangents) + len(arrays)]
        if gradient is None and any(differentiated):
            raise NotImplementedError(f"{name}: vjp returned no gradient of positional argument {number}")
        leaves = [None] * len(arrays) if gradient is None else jax.tree.leaves(gradient, is_leaf=lambda x: x is None)
        if len(leaves) != len(arrays):
            raise TypeError(
                f"{name}: vjp returned {len(leaves)} arrays for positional argument {number}, wants {len(arrays)}"
            )
        cotangents += [
            _zero_gradient(x) if g is None or not _is_float(x) else g for x, g in zip(arrays, leaves, strict=True)
        ]
    return cotangents


def _zeros_for_symbolic(cotangent: Any) -> Any:
    """Returns an array of zeros in the place of a symbolic one."""
    if not isinstance(cotangent, SymbolicZero):
        return cotangent
    aval: Any = cotangent.aval
    return jnp.zeros(aval.shape, aval.dtype)


def _is_float(x: Any) -> bool:
    return jnp.issubdtype(x.dtype, jnp.inexact)


def _zero_gradient(x: Any) -> Any:
    return jnp.zeros_like(x) if _is_float(x) else np.zeros(x.shape, jax.dtypes.float0)
