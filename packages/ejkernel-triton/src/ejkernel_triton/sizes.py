"""Sizes of tiles."""


def padded(size: int, least: int = 1) -> int:
    """The smallest power of two that is neither below a size nor below `least`, itself a power of two."""
    return max(least, 1 << (size - 1).bit_length())
