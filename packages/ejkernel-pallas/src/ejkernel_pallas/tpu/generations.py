"""Differences between chip generations that kernels and tiles depend on, by the kinds of devices."""


def has_256_wide_mxu(device_kind: str) -> bool:
    """Returns whether matrix units are 256 by 256: on v6e and v7x."""
    return "v6" in device_kind or is_v7x(device_kind)


def is_v7x(device_kind: str) -> bool:
    """Returns whether the chip is a v7x.

    Its matrix units accumulate; it copies keys about as fast as it multiplies them in decoding; and the compiler takes
    twice as long for large products.
    """
    return "7x" in device_kind
