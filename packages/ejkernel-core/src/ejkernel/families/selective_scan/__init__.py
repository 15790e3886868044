"""The selective scan family: the record its operations lower to, its meaning and its residuals."""

from typing import Any

import numpy as np

from ejkernel.families.contract import Family, TokenShardFunctions
from ejkernel.families.selective_scan.record import (
    TOKENS_PER_STORED_STATE,
    ScanResiduals,
    SelectiveScan,
    accumulator,
    first_state,
)
from ejkernel.families.selective_scan.reference import reference
from ejkernel.families.selective_scan.token_shards import (
    SPLIT_RECURRENCE_FUNCTIONS,
    record_for_explain,
    run_on_token_shard,
)
from ejkernel.planning.requests import packed_requests
from ejkernel.types.invariances import invariances_of_recurrences

__all__ = [
    "FAMILY",
    "TOKENS_PER_STORED_STATE",
    "ScanResiduals",
    "SelectiveScan",
    "accumulator",
    "axes",
    "first_state",
    "reference",
    "requests",
]


def axes(record: SelectiveScan) -> dict[str, Any]:
    """Returns axis letters of a record's fields and of its outputs."""
    row = "b" if record.cu_seqlens is None else "n"
    return {
        "x": "b t i",
        "step": "b t i",
        "decay": "i e",
        "write": "b t e",
        "read": "b t e",
        "skip": "i",
        "initial_state": f"{row} i e",
        "cu_seqlens": "n",
        "state_slots": "n",
        # Final states of packed sequences have b = N there: a packed call has one row, which cannot be split.
        "output": ("b t i", "b i e"),
    }


def requests(record: SelectiveScan) -> tuple[dict[str, Any], ...]:
    """Returns the owners of a record's entries: packed sequences, or the rows."""
    if record.cu_seqlens is None:
        return ({"b": np.arange(record.x.shape[0])},)
    return (packed_requests(record.cu_seqlens, record.x.shape[1], record.initial_state, record.state_slots),)


FAMILY = Family(
    name="selective_scan",
    record=SelectiveScan,
    differentiable=("x", "step", "decay", "write", "read", "skip", "initial_state"),
    dtype=lambda record: record.x.dtype,
    head_dims=lambda record: (record.decay.shape[1],),
    axes=axes,
    # Each shard is a separate call, since rows and channels are independent.
    shardable="bi",
    token_sharding=TokenShardFunctions(
        run=run_on_token_shard,
        kernel_record_for_explain=record_for_explain,
        recurrence=SPLIT_RECURRENCE_FUNCTIONS,
    ),
    reference=reference,
    requests=requests,
    invariances=invariances_of_recurrences,
)
