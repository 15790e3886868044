"""Opaque offsets: addresses that the compiler cannot fold."""

from typing import Any

from jax.experimental import pallas as pl


def opaque_offset(offset: Any, step: Any, opaque_zero: Any) -> Any:
    """Returns `offset` as an offset that the compiler cannot fold: `start + step * opaque_zero`.

    The compiler loads from equal addresses once, and forwards a value that was just stored instead of loading it. In
    both cases the value stays in registers, and spills under register pressure. An opaque offset forces the reload.

    Args:
        offset: The offset.
        step: A multiple of the alignment that the offset must have; different values are different addresses to the
            compiler. With 0, or with a traced value, the offset is returned unchanged.
        opaque_zero: 0, read from scalar memory.
    """
    return offset + pl.multiple_of(step * opaque_zero, step) if isinstance(step, int) and step else offset
