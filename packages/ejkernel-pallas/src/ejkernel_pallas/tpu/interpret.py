"""TPU kernels on other devices: interpreted, for their numbers.

With `EJKERNEL_TPU_INTERPRET=1` in the environment, implementations for TPUs serve the CPU too, and their kernels are
interpreted there by Pallas: slow, and with the numbers that they have. Blocks that reach beyond an array are filled
with NaN.
"""

import os

VARIABLE = "EJKERNEL_TPU_INTERPRET"


def interpreting() -> bool:
    """Returns whether this process interprets TPU kernels; what `interpret=` of `pallas_call` is to be."""
    return os.environ.get(VARIABLE, "0").lower() in ("1", "true", "yes", "on")


def devices() -> frozenset[str]:
    """Returns what an implementation for TPUs says that it serves."""
    return frozenset({"tpu", "cpu"}) if interpreting() else frozenset({"tpu"})
