"""Packed sequences, cumulative sums of gates, and shardings: the plain `jnp` helpers around the operations.

Everything here can be called under `jax.jit`, with traced cumulative lengths. Where the size of a result depends on
their values, an argument gives that size; it is needed under a trace alone.
"""

from ejkernel.compat.utils import cdiv
from ejkernel.compat.xla_utils.cotangents import identity_dtype_convert
from ejkernel.compat.xla_utils.cumsum import chunk_global_cumsum, chunk_local_cumsum
from ejkernel.compat.xla_utils.packed import (
    prepare_chunk_indices,
    prepare_chunk_offsets,
    prepare_cu_seqlens_from_mask,
    prepare_lens,
    prepare_lens_from_mask,
    prepare_position_ids,
    prepare_sequence_ids,
    prepare_token_indices,
)
from ejkernel.compat.xla_utils.sharding import get_corrected_named_sharding, reorder_sequence

__all__ = [
    "cdiv",
    "chunk_global_cumsum",
    "chunk_local_cumsum",
    "get_corrected_named_sharding",
    "identity_dtype_convert",
    "prepare_chunk_indices",
    "prepare_chunk_offsets",
    "prepare_cu_seqlens_from_mask",
    "prepare_lens",
    "prepare_lens_from_mask",
    "prepare_position_ids",
    "prepare_sequence_ids",
    "prepare_token_indices",
    "reorder_sequence",
]
