"""A record's arrays as the kernels take them: what is absent is None."""

import jax

from ejkernel.families.tiled_attention import TiledAttention, dropout_numbers
from ejkernel_triton.tiled_attention.block_lists import Blocks


def operands(record: TiledAttention, blocks: Blocks) -> tuple[jax.Array | None, ...]:
    """The inputs of every kernel, in their order; the backward kernels take more behind them.

    Query, key, value, block lists, segment ids of queries and keys, positions of queries and keys, bias, mask, sinks
    [1, H], dropout's keys of the rows [B, H, T] and of the columns [1, S], and tile masks.
    """
    return (
        record.query,
        record.key,
        record.value,
        blocks.table,
        record.q_segment_ids,
        record.kv_segment_ids,
        record.q_positions,
        record.kv_positions,
        record.bias,
        record.mask,
        None if record.softmax_aux is None else record.softmax_aux[None],
        *(dropout_numbers(record) if record.dropout_prob > 0.0 else (None, None)),
        blocks.tile_masks,
    )
