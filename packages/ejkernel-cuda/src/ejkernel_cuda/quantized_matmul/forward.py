"""The call of the quantised matmul's kernels (csrc/quantized_matmul.cu)."""

import jax
import jax.numpy as jnp
import numpy as np

from ejkernel.families.quantized_matmul import QuantizedMatmul, columns
from ejkernel_cuda.library import registered
from ejkernel_cuda.quantized_matmul.tiles import MAX_SPLITS, QuantizedTiles, attributes


def forward(record: QuantizedMatmul, config: QuantizedTiles) -> tuple[jax.Array, tuple[()]]:
    """The output of a record.

    Args:
        record: The canonical arguments.
        config: Tiles, splits and stages.

    Returns:
        [M, N] in x's dtype. There are no residuals.
    """
    x, shape = record.x, (record.x.shape[0], columns(record))
    # Blocks that are no cluster leave their sums, which XLA adds up in a fixed order.
    splits = max(1, min(config.splits, MAX_SPLITS))
    separate = splits > 1 and not config.cluster
    call = jax.ffi.ffi_call(
        registered("ejkernel_quantized_matmul"),
        (
            jax.ShapeDtypeStruct(shape, x.dtype),
            jax.ShapeDtypeStruct((splits, *shape) if separate else (0,), jnp.float32),
        ),
        # The elements of a batch have weights of their own, so each is a call.
        vmap_method="sequential",
    )
    output, parts = call(
        x,
        record.packed,
        record.scales,
        jnp.zeros(0, jnp.float16) if record.zeros is None else record.zeros,
        **{name: np.int32(value) for name, value in attributes(record).items()},
        transpose=record.transpose,
        splits=np.int32(splits),
        wide=config.block_n >= 256,
        stages=np.int32(config.num_stages),
        cluster=config.cluster,
    )
    return parts.sum(axis=0).astype(x.dtype) if separate else output, ()
