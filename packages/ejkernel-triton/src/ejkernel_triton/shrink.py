"""Shrinks configurations until a chip's shared memory holds their tiles."""

import dataclasses
from collections.abc import Callable, Iterable
from typing import Any


def shrink_until_it_fits(
    config: Any, needed_bytes: Callable[[Any], int], available_bytes: int, steps: Iterable[tuple[str, int]]
) -> Any:
    """Returns a configuration whose tiles fit shared memory; the smallest one if none fits.

    Args:
        config: The configuration to begin with.
        needed_bytes: Returns the bytes that a configuration needs.
        available_bytes: Bytes of shared memory.
        steps: Fields in the order in which they are made smaller, each with its smallest value. Stages become one less,
            other fields half.
    """
    for name, smallest in steps:
        while getattr(config, name) > smallest and needed_bytes(config) > available_bytes:
            value = getattr(config, name)
            config = dataclasses.replace(config, **{name: value - 1 if name.endswith("stages") else value // 2})
    return config
