"""Differences between chip generations that kernels and tiles depend on, by the kinds of devices."""


def is_wide(kind: str) -> bool:
    """Returns whether matrix units are 256 by 256: on v6e and v7x."""
    return "v6" in kind or is_v7x(kind)


def is_v7x(kind: str) -> bool:
    """Returns whether the chip is a v7x.

    Its matrix units accumulate; it copies keys about as fast as it multiplies them in decoding; and the compiler takes
    twice as long for large products.
    """
    return "7x" in kind
