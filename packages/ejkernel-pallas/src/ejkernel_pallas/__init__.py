"""The Pallas backend: Mosaic TPU kernels for TPUs, and Mosaic GPU kernels for NVIDIA GPUs from Hopper on.

Importing this module does not import Pallas. What a kernel needs is data in its `Implementation`, so a machine
without the device gets a refusal that says so, not an import error.
"""

from ejkernel.ops import hookimpl
from ejkernel.ops.model import Implementation
from ejkernel_pallas.gpu import tiled_attention as tiled_attention_of_gpus


@hookimpl
def ejkernel_implementations() -> tuple[Implementation, ...]:
    """Return the implementations this package registers; an operation it does not serve is simply absent."""
    return tiled_attention_of_gpus.implementations()
