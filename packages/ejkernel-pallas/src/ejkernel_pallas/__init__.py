"""The Pallas backend: Mosaic TPU kernels for TPUs, and Mosaic GPU kernels for NVIDIA's Hopper.

Importing this module does not import Pallas. What a kernel needs is data in its `Implementation`, so that on a machine
without the device a call is refused with a reason, and the import succeeds.
"""

from ejkernel.ops import hookimpl
from ejkernel.ops.model import Implementation
from ejkernel_pallas.gpu import collective_matmul as gpu_collective_matmul
from ejkernel_pallas.gpu import grouped_matmul as gpu_grouped_matmul
from ejkernel_pallas.gpu import latent_attention as gpu_latent_attention
from ejkernel_pallas.gpu import paged_attention as gpu_paged_attention
from ejkernel_pallas.gpu import ring_attention as gpu_ring_attention
from ejkernel_pallas.gpu import tiled_attention as gpu_tiled_attention
from ejkernel_pallas.tpu import causal_convolution as tpu_causal_convolution
from ejkernel_pallas.tpu import collective_matmul as tpu_collective_matmul
from ejkernel_pallas.tpu import cross_entropy as tpu_cross_entropy
from ejkernel_pallas.tpu import grouped_matmul as tpu_grouped_matmul
from ejkernel_pallas.tpu import latent_attention as tpu_latent_attention
from ejkernel_pallas.tpu import lightning_indexer as tpu_lightning_indexer
from ejkernel_pallas.tpu import lightning_indexer_decode as tpu_lightning_indexer_decode
from ejkernel_pallas.tpu import linear_recurrence as tpu_linear_recurrence
from ejkernel_pallas.tpu import paged_attention as tpu_paged_attention
from ejkernel_pallas.tpu import quantized_matmul as tpu_quantized_matmul
from ejkernel_pallas.tpu import ring_attention as tpu_ring_attention
from ejkernel_pallas.tpu import selected_attention as tpu_selected_attention
from ejkernel_pallas.tpu import selected_attention_decode as tpu_selected_attention_decode
from ejkernel_pallas.tpu import selective_scan as tpu_selective_scan
from ejkernel_pallas.tpu import tiled_attention as tpu_tiled_attention
from ejkernel_pallas.tpu import token_sparse_attention as tpu_token_sparse_attention
from ejkernel_pallas.tpu import token_sparse_attention_union as tpu_token_sparse_attention_union


@hookimpl
def ejkernel_implementations() -> tuple[Implementation, ...]:
    """Return the implementations that this package registers."""
    return (
        *gpu_tiled_attention.implementations(),
        *gpu_ring_attention.implementations(),
        *gpu_grouped_matmul.implementations(),
        *gpu_collective_matmul.implementations(),
        *gpu_latent_attention.implementations(),
        *gpu_paged_attention.implementations(),
        *tpu_tiled_attention.implementations(),
        *tpu_grouped_matmul.implementations(),
        *tpu_collective_matmul.implementations(),
        *tpu_quantized_matmul.implementations(),
        *tpu_linear_recurrence.implementations(),
        *tpu_causal_convolution.implementations(),
        *tpu_selected_attention.implementations(),
        *tpu_selected_attention_decode.implementations(),
        *tpu_selective_scan.implementations(),
        *tpu_ring_attention.implementations(),
        *tpu_paged_attention.implementations(),
        *tpu_latent_attention.implementations(),
        *tpu_cross_entropy.implementations(),
        *tpu_lightning_indexer.implementations(),
        *tpu_lightning_indexer_decode.implementations(),
        *tpu_token_sparse_attention.implementations(),
        *tpu_token_sparse_attention_union.implementations(),
    )
