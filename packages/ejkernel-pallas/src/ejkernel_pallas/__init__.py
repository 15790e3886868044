"""The Pallas backend: Mosaic TPU kernels for TPUs, and Mosaic GPU kernels for NVIDIA's Hopper.

Importing this module does not import Pallas. What a kernel needs is data in its `Implementation`, so a machine
without the device gets a refusal that says so, not an import error.
"""

from ejkernel.ops import hookimpl
from ejkernel.ops.model import Implementation
from ejkernel_pallas.gpu import grouped_matmul as grouped_matmul_of_gpus
from ejkernel_pallas.gpu import latent_attention as latent_attention_of_gpus
from ejkernel_pallas.gpu import paged_attention as paged_attention_of_gpus
from ejkernel_pallas.gpu import ring_attention as ring_attention_of_gpus
from ejkernel_pallas.gpu import tiled_attention as tiled_attention_of_gpus
from ejkernel_pallas.tpu import grouped_matmul as grouped_matmul_of_tpus
from ejkernel_pallas.tpu import paged_attention as paged_attention_of_tpus
from ejkernel_pallas.tpu import quantized_matmul as quantized_matmul_of_tpus
from ejkernel_pallas.tpu import ring_attention as ring_attention_of_tpus
from ejkernel_pallas.tpu import tiled_attention as tiled_attention_of_tpus


@hookimpl
def ejkernel_implementations() -> tuple[Implementation, ...]:
    """Return the implementations this package registers; an operation it does not serve is simply absent."""
    return (
        *tiled_attention_of_gpus.implementations(),
        *ring_attention_of_gpus.implementations(),
        *grouped_matmul_of_gpus.implementations(),
        *latent_attention_of_gpus.implementations(),
        *paged_attention_of_gpus.implementations(),
        *tiled_attention_of_tpus.implementations(),
        *grouped_matmul_of_tpus.implementations(),
        *quantized_matmul_of_tpus.implementations(),
        *ring_attention_of_tpus.implementations(),
        *paged_attention_of_tpus.implementations(),
    )
