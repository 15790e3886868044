"""Tiled softmax attention in Mosaic TPU.

The requirements of the kernels are data in this module, which imports nothing of Pallas.
"""

from collections.abc import Iterable
from typing import Any

from ejkernel.arithmetic import cdiv
from ejkernel.families.tiled_attention import (
    DROPOUT_FIELDS,
    FAMILY,
    MASK_FIELDS,
    SOFTMAX_FIELDS,
    causal_window_bounds,
    invariance_limits,
)
from ejkernel.families.tiled_attention.block_maps import pattern_refusals
from ejkernel.families.tiled_attention.mask_functions import mask_function_as_window
from ejkernel.ops import ConfigSpace, Implementation
from ejkernel_pallas.tpu.mosaic.split_functions import function_refusal_reasons
from ejkernel_pallas.tpu.requirements import make_mosaic_tpu_implementation, tpu_requires
from ejkernel_pallas.tpu.tiled_attention import config

SUPPORTED_OPTIONAL_FIELDS = (
    MASK_FIELDS
    | SOFTMAX_FIELDS
    | DROPOUT_FIELDS
    | {"bias", "pattern", "precision", "lse_cotangent", "score_mod", "mask_mod"}
)
"""Optional fields that the kernels support."""

MAX_TILE_PAIRS = 2**17
"""The largest number of tile pairs: their list then takes half of scalar memory."""
MAX_QUERY_TILES = 2**14
"""The largest number of query tiles, and twice that of key tiles, that the bits of a list entry can hold."""


def _refusal_reasons(record: Any) -> Iterable[str]:
    """Yields the reasons to refuse a record that `Requires` cannot express."""
    yield from (f"pattern: {reason}" for reason in pattern_refusals(record))
    yield from function_refusal_reasons(record)
    yield from pair_list_refusal_reasons(mask_function_as_window(record))


def pair_list_refusal_reasons(record: Any) -> tuple[str, ...]:
    """Returns why the list of a record's tile pairs does not fit scalar memory with the default tile sizes."""
    block = 512 if config.prefers_small_tiles(record) else 1024
    (left, right), arrays = (
        causal_window_bounds(record),
        (record.q_segment_ids, record.q_positions, record.kv_positions),
    )
    queries, keys = (cdiv(x.shape[1], block) for x in (record.query, record.key))
    if record.mask_mod is not None:
        read, (batch, _, heads, _) = record.mask_mod.program.inputs_read, record.query.shape
        pairs = queries * keys * (batch if "b" in read or any(x is not None for x in arrays) else 1)
        pairs *= heads if "h" in read else 1
    elif any(x is not None for x in arrays):
        pairs = queries * keys * max(x.shape[0] for x in arrays if x is not None)
    elif left is not None and right is not None:
        pairs = queries * min(keys, (left + right) // block + 2)
    else:
        pairs = queries * keys if (left, right) == (None, None) else queries * (keys + 1) // 2
    if max(queries, 2 * keys) > MAX_QUERY_TILES:
        most = f"{MAX_QUERY_TILES} and {MAX_QUERY_TILES // 2}"
        return (f"query: got {queries} tiles of queries and {keys} of keys, the kernels take at most {most}",)
    return (
        (f"query: got {pairs} tile pairs, the kernels take at most {MAX_TILE_PAIRS}, which fit scalar memory",)
        if pairs > MAX_TILE_PAIRS
        else ()
    )


def implementations() -> tuple[Implementation, ...]:
    """Returns the implementation."""
    return (
        make_mosaic_tpu_implementation(
            FAMILY,
            ConfigSpace.of(
                config,
                forward=config.TpuForward,
                backward=config.TpuBackward,
                kind=config.tuned_table_key,
                fixed_if_invariant=("block_kv", "chunk_q", "chunk_kv", "batch_invariant"),
            ),
            tpu_requires(
                head_dims=range(1, 257), supported_fields=SUPPORTED_OPTIONAL_FIELDS, refusal_reasons=_refusal_reasons
            ),
            fields_without_gradient=frozenset({"relative_bias"}),
            invariant_to=frozenset({"batch", "padding", "chunking"}),
            invariance_limits=invariance_limits,
        ),
    )
