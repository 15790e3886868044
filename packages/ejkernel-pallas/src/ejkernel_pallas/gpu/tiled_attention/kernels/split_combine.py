"""Merges the outputs of the parts of a split tile of queries (split-KV)."""

import jax

from ejkernel.planning.softmax_merge import PartialAttention, merge


def merge_split_tiles(outputs: jax.Array, lse: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Returns tiles merged from their parts.

    Args:
        outputs: Float32 [tiles, parts, queries, D].
        lse: Float32 [tiles, parts, queries].

    Returns:
        Outputs [tiles, queries, D] and lse [tiles, queries].
    """
    parts = (PartialAttention(outputs[:, n, :, None], lse[:, n, None]) for n in range(lse.shape[1]))
    whole = merge(*parts)
    return whole.output[:, :, 0], whole.lse[:, 0]
