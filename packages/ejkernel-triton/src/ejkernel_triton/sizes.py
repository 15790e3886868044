"""Powers of two that tiles have for sizes."""

from typing import Any


def require_powers_of_two(config: Any, *names: str) -> None:
    """Raises ValueError for a field of a configuration that is not a power of two."""
    for name in names:
        value = getattr(config, name)
        if value < 1 or value & (value - 1):
            raise ValueError(f"{name}: got {value}, wants a power of two")


def pad_to_power_of_two(size: int, minimum: int = 1) -> int:
    """Returns the smallest power of two that is at least `size` and at least `minimum`, itself a power of two."""
    return max(minimum, 1 << (size - 1).bit_length())


def pad_to_dot_size(size: int) -> int:
    """Returns the smallest power of two that is at least `size` and that `tl.dot` supports: at least 16."""
    return pad_to_power_of_two(size, 16)
