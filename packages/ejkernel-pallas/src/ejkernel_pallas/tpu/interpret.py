"""Runs TPU kernels on other devices in Pallas's interpreter, to check their results.

With `EJKERNEL_TPU_INTERPRET=1` in the environment, implementations for TPUs serve the CPU too, and their kernels are
interpreted there by Pallas: slowly, with the results of a TPU. Blocks that extend past an array are filled with NaN.
"""

import os

INTERPRET_VARIABLE = "EJKERNEL_TPU_INTERPRET"


def is_interpreting() -> bool:
    """Returns whether this process interprets TPU kernels, for `interpret=` of `pallas_call`."""
    return os.environ.get(INTERPRET_VARIABLE, "0").lower() in ("1", "true", "yes", "on")


def served_device_kinds() -> frozenset[str]:
    """Returns the device kinds that implementations for TPUs serve."""
    return frozenset({"tpu", "cpu"}) if is_interpreting() else frozenset({"tpu"})
