"""Plans the chunks of queries, whose scores are in memory at a time."""

from ejkernel.arithmetic import cdiv
from ejkernel.families.lightning_indexer import LightningIndexer
from ejkernel_triton.launch import is_interpreting

MAX_SCORE_BYTES = 2**28
"""The most memory that the scores of a chunk of queries take, unless one query of every batch row needs more. Each
element of an axis of `jax.vmap` has as much again.
"""


def queries_per_chunk(record: LightningIndexer) -> int:
    """Returns the queries whose scores fit MAX_SCORE_BYTES, in chunks of about the same size."""
    batch, tokens = record.query.shape[:2]
    if is_interpreting():
        return cdiv(tokens, 2)
    chunks = cdiv(tokens, max(1, MAX_SCORE_BYTES // (4 * batch * record.key.shape[1])))
    return cdiv(tokens, chunks)
