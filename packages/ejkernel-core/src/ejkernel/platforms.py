"""The names of toolchains and of kinds of devices, as enumerations; every argument takes the plain strings too."""

import enum


class Platform(enum.StrEnum):
    """Toolchains that a call can ask for with `platform=`."""

    TRITON = "triton"
    PALLAS = "pallas"
    CUDA = "cuda"
    XLA = "xla"
    AUTO = "auto"


class Backend(enum.StrEnum):
    """Kinds of devices that an implementation is made for."""

    GPU = "gpu"
    TPU = "tpu"
    CPU = "cpu"
    ANY = "any"
