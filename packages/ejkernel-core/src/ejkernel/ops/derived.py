"""Derives properties of an operation from the signature of its public function, so that the declaration need not repeat
them.
"""

import dataclasses
import functools
import inspect
import typing
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import AbstractArray

from ejkernel.ops.params import BaseOperationConfig


def config_class_from_annotation(function: Callable[..., Any]) -> type[BaseOperationConfig]:
    """Returns the configuration class that the annotation of `cfg` names first."""
    annotation = inspect.signature(function, eval_str=True).parameters["cfg"].annotation
    for option in typing.get_args(annotation) or (annotation,):
        if isinstance(option, type) and issubclass(option, BaseOperationConfig):
            return option
    raise ValueError(f"cfg: got the annotation {annotation!r} in {function.__name__}, wants a configuration class")


def axes_of(function: Callable[..., Any], replacement_letters: Mapping[str, str]) -> dict[str, str]:
    """Returns the axis letters of the positional arrays in public order. Letters in `replacement_letters` replace
    annotated letters.

    Raises:
        ValueError: An annotation has a size that is no letter, and `replacement_letters` does not have the argument.
    """
    letters: dict[str, str] = {}
    for name, parameter in inspect.signature(function, eval_str=True).parameters.items():
        axes = replacement_letters.get(name, next(_shape_annotations(parameter.annotation), None))
        if parameter.kind is parameter.KEYWORD_ONLY or axes is None:
            continue
        if name not in replacement_letters and any(len(axis) != 1 or not axis.isalpha() for axis in axes.split()):
            raise ValueError(f"axes: {name} of {function.__name__} is annotated {axes!r}, wants letters; give its axes")
        letters[name] = axes
    return letters | {name: axes for name, axes in replacement_letters.items() if name not in letters}


def _array_types_of_annotation(annotation: Any) -> Iterator[type[AbstractArray]]:
    """Yields the kinds of arrays of an annotation."""
    for option in typing.get_args(annotation) or (annotation,):
        if isinstance(option, type) and issubclass(option, AbstractArray):
            yield option


def _shape_annotations(annotation: Any) -> Iterator[str]:
    """Yields the shapes of an annotation of arrays, without the marks of axes that are broadcast."""
    for option in _array_types_of_annotation(annotation):
        yield option.dim_str.replace("#", "").strip()


def cases_of_uncovered_arrays(
    function: Callable[..., Any], fields: Iterable[str], cases: tuple[Any, ...]
) -> tuple[Any, ...]:
    """Returns a case for every optional floating array of the family that no case is about.

    Such a case is the first one that is about no optional field, with normal numbers in the shape that the annotation
    states. There is none for an array that has an axis of its own.

    Args:
        function: The public function.
        fields: The optional fields of the family's record; an argument of the same name is such an array.
        cases: The cases that the operation declares.
    """
    exercised = frozenset().union(*(case.exercises for case in cases))
    names = sorted(set(fields) & inspect.get_annotations(function).keys() - exercised)
    plain = next((case for case in cases if "ci" in case.tags and not case.exercises), None)
    if not names or plain is None:
        return ()
    required, optional = _shapes_of_arrays(function)
    known = {axis for axes in required.values() for axis in axes}
    derived = []
    for name in names:
        axes = optional.get(name)
        if axes is not None and set(axes) <= known:
            make = functools.partial(_record_with_array, plain.make, required, name, axes)
            derived.append(dataclasses.replace(plain, name=f"{name} alone", make=make, exercises=frozenset({name})))
    return tuple(derived)


def _shapes_of_arrays(function: Callable[..., Any]) -> tuple[dict[str, list[str]], dict[str, list[str]]]:
    """Returns the axes of the required arrays of a function, and those of the optional floating ones."""
    required, optional = {}, {}
    for name, parameter in inspect.signature(function, eval_str=True).parameters.items():
        for array in _array_types_of_annotation(parameter.annotation):
            axes = array.dim_str.replace("#", "").split()
            if parameter.default is parameter.empty:
                required.setdefault(name, axes)
            elif "float32" in array.dtypes:
                optional.setdefault(name, axes)
    return required, optional


def _record_with_array(
    make: Callable[[Any], Any], required_axes: Any, name: str, axes: list[str], key: jax.Array
) -> Any:
    """Returns the record of a case with one more array of normal numbers, whose sizes follow from the others'."""
    record = make(key)
    sizes: dict[str, int] = {}
    for argument, letters in required_axes.items():
        shape = getattr(getattr(record, argument), "shape", ())
        sizes |= dict(zip(letters, shape, strict=True)) if len(shape) == len(letters) else {}
    key = jax.random.fold_in(key, zlib.crc32(name.encode()))
    return dataclasses.replace(record, **{name: jax.random.normal(key, [sizes[axis] for axis in axes])})


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
