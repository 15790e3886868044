"""The FFI call of paged decode attention over codes (csrc/paged_decode/codes.cu)."""

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from ejkernel.families.paged_attention import PagedAttention
from ejkernel.families.paged_attention import pages as paged_cache
from ejkernel.planning import turboquant
from ejkernel_cuda.library import register_handler
from ejkernel_cuda.paged_codes.config import HEADS_PER_BLOCK
from ejkernel_cuda.paged_decode.config import PagedDecodeGrid, thread_blocks_and_queues
from ejkernel_cuda.paged_decode.forward import result_shapes, scalar_attributes, sequence_operands


def forward(record: PagedAttention, config: PagedDecodeGrid) -> tuple[tuple[jax.Array, ...], None]:
    """Returns output [T, H, Dv], lse [T, H] and, if new tokens are written, the updated pages."""
    record, pages = paged_cache.write_new_tokens(record)
    num_thread_blocks, num_queues = thread_blocks_and_queues(record, config, HEADS_PER_BLOCK)
    key_bits, value_bits = record.code_bits or (0, 0)
    assert record.value_pages is not None  # there are codes
    assert record.key_norms is not None
    assert record.value_norms is not None
    assert record.key_codebook is not None
    assert record.value_codebook is not None
    assert record.rotation is not None
    rotation = record.rotation.astype(jnp.float32)
    # The kernel's own copy of the output, in the coordinates of the cache.
    rotated_output = jax.ShapeDtypeStruct(record.query.shape, record.query.dtype)
    call = jax.ffi.ffi_call(
        register_handler("ejkernel_paged_codes"),
        (*result_shapes(record, num_thread_blocks), rotated_output),
        vmap_method="sequential",
    )
    output, lse, *_ = call(
        record.query,
        record.key_pages,
        record.value_pages,
        *sequence_operands(record),
        jnp.zeros(0, jnp.uint8) if record.key_signs is None else record.key_signs,
        record.key_norms,
        record.value_norms,
        record.key_codebook.astype(jnp.float32),
        record.value_codebook.astype(jnp.float32),
        _query_map(rotation, record.projection),
        rotation,
        **scalar_attributes(record, num_queues),
        key_bits=np.int32(key_bits),
        value_bits=np.int32(value_bits),
    )
    return (output, lse, *pages), None


def _query_map(rotation: jax.Array, projection: jax.Array | None) -> jax.Array:
    """Returns the matrix [D + Q, D] whose product with a query is `turboquant.extended_queries`."""
    if projection is None:
        return rotation
    factor = turboquant.residual_factor(projection.shape[0])
    projected = factor * jnp.matmul(projection.astype(rotation.dtype), rotation, precision=lax.Precision.HIGHEST)
    return jnp.concatenate((rotation, projected))
