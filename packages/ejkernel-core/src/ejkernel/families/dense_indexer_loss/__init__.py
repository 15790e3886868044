"""The dense indexer loss family: how far an indexer's distribution over all keys is from attention's."""

from ejkernel.families.contract import Family
from ejkernel.families.dense_indexer_loss.record import DenseIndexerLoss, DenseIndexerLossResiduals, accumulator
from ejkernel.families.dense_indexer_loss.reference import reference

__all__ = ["FAMILY", "DenseIndexerLoss", "DenseIndexerLossResiduals", "accumulator", "reference"]

FAMILY = Family(
    name="dense_indexer_loss",
    record=DenseIndexerLoss,
    head_dims=lambda record: (record.query.shape[-1], record.query_index.shape[-1]),
    axes={"output": "b t"},
    # Each shard is a separate call: the loss is one of each query, and all keys are present. It sums over heads.
    shardable="bt",
    reference=reference,
)
