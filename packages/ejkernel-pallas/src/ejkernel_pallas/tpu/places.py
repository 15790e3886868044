"""Places in memory that the compiler takes for others than they are."""

from typing import Any

from jax.experimental import pallas as pl


def apart(start: Any, by: Any, zero: Any) -> Any:
    """`start`, as a place that the compiler cannot know: `start + by * zero`.

    What it knows to be the same it loads once for all that use it, and what it has just stored not at all: it keeps
    both in registers, and spills where they are too few. What is loaded from here is loaded.

    Args:
        start: Where it is.
        by: A multiple of what places have to be multiples of; another number is another place to the compiler. With 0
            or a traced one the place is left as it is.
        zero: 0, out of scalar memory.
    """
    return start + pl.multiple_of(by * zero, by) if isinstance(by, int) and by else start
