"""Conformance cases from rows of a table, for any operation."""

from collections.abc import Callable, Iterable
from typing import Any, TypeVar

import jax

from ejkernel.ops.model import Case

Sizes = TypeVar("Sizes")
Row = tuple[str, Sizes, Callable[[jax.Array], dict[str, Any]], tuple[str, ...], tuple[str, ...]]
"""Name, sizes, extra arguments from a key, optional record fields the case is about, further tags."""


def table(
    arguments: type, inputs: Callable[[jax.Array, Sizes], dict[str, Any]], rows: Iterable[Row[Sizes]]
) -> tuple[Case, ...]:
    """Cases of an operation.

    Args:
        arguments: Its argument record.
        inputs: (PRNG key, sizes) -> the arguments that every case gives.
        rows: The cases; what a row gives itself wins.
    """

    def maker(sizes: Sizes, extra: Callable[[jax.Array], dict[str, Any]]) -> Callable[[jax.Array], Any]:
        def make(key: jax.Array) -> Any:
            given, options = jax.random.split(key)
            return arguments(**{**inputs(given, sizes), **extra(options)})

        return make

    return tuple(tagged(name, maker(sizes, extra), exercises, tags) for name, sizes, extra, exercises, tags in rows)


def tagged(name: str, make: Callable[[jax.Array], Any], exercises: Iterable[str], tags: Iterable[str]) -> Case:
    """A case that CI runs, unless it is there to be timed."""
    everywhere = () if "bench" in tags else ("ci",)
    return Case(name=name, make=make, tags=frozenset((*everywhere, *tags)), exercises=frozenset(exercises))
