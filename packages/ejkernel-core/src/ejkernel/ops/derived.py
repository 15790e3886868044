"""Derives properties of an operation from the signature of its public function, so that the declaration need not repeat
them.
"""

import inspect
import typing
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import AbstractArray

from ejkernel.ops.params import BaseOperationConfig


def config_of(function: Callable[..., Any]) -> type[BaseOperationConfig]:
    """Returns the configuration class that the annotation of `cfg` names first."""
    annotation = inspect.signature(function, eval_str=True).parameters["cfg"].annotation
    for option in typing.get_args(annotation) or (annotation,):
        if isinstance(option, type) and issubclass(option, BaseOperationConfig):
            return option
    raise ValueError(f"cfg: got the annotation {annotation!r} in {function.__name__}, wants a configuration class")


def axes_of(function: Callable[..., Any], other: Mapping[str, str]) -> dict[str, str]:
    """Returns the axis letters of the positional arrays in public order. Letters in `other` replace annotated
    letters.

    Raises:
        ValueError: An annotation has a size that is no letter, and `other` does not have the argument.
    """
    letters: dict[str, str] = {}
    for name, parameter in inspect.signature(function, eval_str=True).parameters.items():
        axes = other.get(name, next(_shapes(parameter.annotation), None))
        if parameter.kind is parameter.KEYWORD_ONLY or axes is None:
            continue
        if name not in other and any(len(axis) != 1 or not axis.isalpha() for axis in axes.split()):
            raise ValueError(f"axes: {name} of {function.__name__} is annotated {axes!r}, wants letters; give its axes")
        letters[name] = axes
    return letters | {name: axes for name, axes in other.items() if name not in letters}


def _shapes(annotation: Any) -> Iterator[str]:
    """Yields the shapes of an annotation of arrays, without the marks of axes that are broadcast."""
    for option in typing.get_args(annotation) or (annotation,):
        if isinstance(option, type) and issubclass(option, AbstractArray):
            yield option.dim_str.replace("#", "").strip()


def normal_inputs(args: Any, key: jax.Array) -> Any:
    """Returns the argument record of a call with normal numbers in the place of `jax.ShapeDtypeStruct`s.

    Raises:
        ValueError: An array has integers, which have a meaning that only the operation knows.
    """
    leaves, tree = jax.tree.flatten(args)
    if not all(jnp.issubdtype(leaf.dtype, jnp.floating) for leaf in leaves):
        raise ValueError(f"make_inputs: {type(args).__name__} has integers; give the operation a make_inputs")
    keys = jax.random.split(key, max(len(leaves), 1))
    arrays = [jax.random.normal(k, x.shape, jnp.float32).astype(x.dtype) for k, x in zip(keys, leaves, strict=False)]
    return jax.tree.unflatten(tree, arrays)
