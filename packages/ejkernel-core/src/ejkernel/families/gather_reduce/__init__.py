"""The gather-reduce family: the record its operations lower to and its meaning."""

from typing import Any

import numpy as np

from ejkernel.families.contract import Family
from ejkernel.families.gather_reduce.record import GatherReduce, accumulator, is_valid_index, take_rows
from ejkernel.families.gather_reduce.reference import reference
from ejkernel.planning.requests import PADDING, UNUSED, claim_entries

__all__ = ["FAMILY", "GatherReduce", "accumulator", "is_valid_index", "reference", "requests", "take_rows"]


def requests(record: GatherReduce) -> tuple[dict[str, Any], ...]:
    """Returns the owners of a record's entries: the tokens, with the rows that only one of them names."""
    indices, owners = np.asarray(record.indices), np.full(record.rows.shape[0], UNUSED)
    for token, row in np.argwhere(np.ones(indices.shape, bool)):
        if 0 <= indices[token, row] < owners.size:
            claim_entries(owners, indices[token, row], token)
    # Rows that no token names have no gradient.
    return ({"m": np.where(owners == UNUSED, PADDING, owners), "t": np.arange(indices.shape[0])},)


FAMILY = Family(
    name="gather_reduce",
    record=GatherReduce,
    differentiable=("rows", "weights"),
    dtype=lambda record: record.rows.dtype,
    head_dims=lambda record: (record.rows.shape[-1],),
    axes={"rows": "m d", "indices": "t k", "inverse": "m n", "weights": "t k", "output": "t d"},
    # Each shard is a separate call, since channels are independent.
    shardable="d",
    reference=reference,
    requests=requests,
)
