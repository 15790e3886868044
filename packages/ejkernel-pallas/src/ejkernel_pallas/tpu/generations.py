"""Differences between chip generations that kernels and tiles depend on, by the kinds of devices."""

from typing import Any

from ejkernel.ops.chips import TPUS


def has_256_wide_mxu(device_kind: str) -> bool:
    """Returns whether matrix units are 256 by 256: on v6e and v7x."""
    return "v6" in device_kind or is_v7x(device_kind)


def is_v7x(device_kind: str) -> bool:
    """Returns whether the chip is a v7x.

    Its matrix units accumulate; it copies keys about as fast as it multiplies them in decoding; and the compiler takes
    twice as long for large products.
    """
    return "7x" in device_kind


def num_cores(device: Any) -> int:
    """Returns the number of cores that share the parallel grid steps of a kernel: 2 on v5p; 1 of an unknown device."""
    return next((chip.cores for chip in TPUS.values() if device is not None and chip.kind == device.kind), 1)
