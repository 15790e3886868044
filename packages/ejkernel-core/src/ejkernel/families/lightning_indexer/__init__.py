"""The lightning indexer family: the record its operations lower to and its meaning."""

from ejkernel.families.contract import Family
from ejkernel.families.lightning_indexer.record import (
    LightningIndexer,
    TopKeyIndicesAndScores,
    accumulator,
    axes,
    floats_from_ordered_integers,
    nothing_selected,
    num_keys,
    rectify,
    take_keys,
    wide_query_dtype,
    with_wide_query,
)
from ejkernel.families.lightning_indexer.reference import reference

__all__ = [
    "FAMILY",
    "LightningIndexer",
    "TopKeyIndicesAndScores",
    "accumulator",
    "axes",
    "floats_from_ordered_integers",
    "nothing_selected",
    "num_keys",
    "rectify",
    "reference",
    "take_keys",
    "wide_query_dtype",
    "with_wide_query",
]


def invariances(record: LightningIndexer) -> frozenset[str]:
    """Returns what the rows of a record may depend on; `pages` is included only if there are pages."""
    return frozenset({"batch", "padding", "chunking", *(("pages",) if record.block_tables is not None else ())})


FAMILY = Family(
    name="lightning_indexer",
    record=LightningIndexer,
    head_dims=lambda record: (record.query.shape[-1],),
    axes=axes,
    # Each shard is a separate call: `key_starts` and `key_ends` are split with the queries, and all keys are present.
    shardable="bt",
    reference=reference,
    invariances=invariances,
)
