"""Powers of two that tiles have for sizes, and the sizes that the constants of all attention kernels include."""

import dataclasses
from typing import Any


@dataclasses.dataclass(frozen=True, kw_only=True)
class AttentionSizes:
    """Sizes of the arrays of attention and of its tiles, among the constants of the kernels.

    Attributes:
        T: Queries.
        S: Keys.
        H: Query heads.
        HK: KV heads.
        G: Query heads per KV head.
        D: Head dimension of queries and keys.
        DV: Head dimension of values.
        BD: Columns of a tile of queries or keys: D, padded to a size that `tl.dot` supports, unless a spec says others.
        BV: Columns of a tile of values: DV, padded the same way.
    """

    T: int
    S: int
    H: int
    HK: int
    G: int
    D: int
    DV: int
    BD: int
    BV: int


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
