"""A record's arrays as the kernels take them: what is absent is None."""

import jax

from ejkernel.families.tiled_attention import TiledAttention, dropout_numbers


def operands(record: TiledAttention) -> tuple[jax.Array | None, ...]:
    """The optional arrays in the order in which every kernel takes them.

    Segment ids of queries and keys, positions of queries and keys, bias, mask, sinks [1, H], and dropout's numbers of
    the rows [B, H, T] and of the columns [1, S].
    """
    return (
        record.q_segment_ids,
        record.kv_segment_ids,
        record.q_positions,
        record.kv_positions,
        record.bias,
        record.mask,
        None if record.softmax_aux is None else record.softmax_aux[None],
        *(dropout_numbers(record) if record.dropout_prob > 0.0 else (None, None)),
    )
