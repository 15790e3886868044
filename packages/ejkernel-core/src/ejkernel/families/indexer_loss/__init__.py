"""The indexer loss family: how far an indexer's distribution over the listed keys is from attention's."""

from ejkernel.families.contract import Family
from ejkernel.families.indexer_loss.record import IndexerLoss, IndexerLossResiduals, accumulator, indexer_loss_per_query
from ejkernel.families.indexer_loss.reference import reference

__all__ = ["FAMILY", "IndexerLoss", "IndexerLossResiduals", "accumulator", "indexer_loss_per_query", "reference"]

FAMILY = Family(
    name="indexer_loss",
    record=IndexerLoss,
    head_dims=lambda record: (record.query.shape[-1],),
    axes={"output": "b t"},
    # Each shard is a separate call: the loss is one of each query, and all keys are present. It sums over heads.
    shardable="bt",
    reference=reference,
    invariances=lambda record: frozenset({"batch", "padding", "chunking"}),
)
