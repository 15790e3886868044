"""Plans the chunks of queries, whose scores are in memory at a time."""

from ejkernel.arithmetic import cdiv
from ejkernel.families.lightning_indexer import LightningIndexer

MAX_SCORE_BYTES = 2**28
"""The most memory that the scores of a chunk of queries take, unless one query of every batch row needs more."""


def score_pitch(record: LightningIndexer) -> int:
    """Returns the entries of a row of scores, which the selection reads in fours."""
    return cdiv(record.key.shape[1], 4) * 4


def queries_per_chunk(record: LightningIndexer) -> int:
    """Returns the queries whose scores fit MAX_SCORE_BYTES, in chunks of about the same size."""
    batch, tokens = record.query.shape[:2]
    chunks = cdiv(tokens, max(1, MAX_SCORE_BYTES // (4 * batch * score_pitch(record))))
    return cdiv(tokens, chunks)
