"""Powers of two that tiles have for sizes."""


def padded(size: int, minimum: int = 1) -> int:
    """Returns the smallest power of two that is at least `size` and at least `minimum`, itself a power of two."""
    return max(minimum, 1 << (size - 1).bit_length())


def padded_for_dot(size: int) -> int:
    """Returns the smallest power of two that is at least `size` and that `tl.dot` supports: at least 16."""
    return padded(size, 16)
