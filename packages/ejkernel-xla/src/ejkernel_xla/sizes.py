"""The shared checks of the sizes in configurations of all families."""

import dataclasses
from typing import Any

ASSUMED_KEYS = 8192
"""Keys for which memory is planned if their count is symbolic."""


def check_positive(config: Any) -> None:
    """Refuses a configuration with a size that is none.

    Raises:
        ValueError: A field is a number below 1.
    """
    for field in dataclasses.fields(config):
        value = getattr(config, field.name)
        if not isinstance(value, bool) and value < 1:
            raise ValueError(f"cfg: got {field.name}={value}, wants at least 1")
