"""The causal convolution family: the record its operations lower to and its meaning."""

from typing import Any

import numpy as np

from ejkernel.families.causal_convolution.record import (
    CausalConvolution,
    accumulator,
    activate,
    states,
    token_sequences_and_positions,
)
from ejkernel.families.causal_convolution.reference import reference
from ejkernel.families.causal_convolution.token_shards import record_for_explain, run_on_token_shard
from ejkernel.families.contract import Family, TokenShardFunctions
from ejkernel.planning.requests import packed_requests
from ejkernel.types.invariances import invariances_of_recurrences

__all__ = [
    "FAMILY",
    "CausalConvolution",
    "accumulator",
    "activate",
    "reference",
    "requests",
    "states",
    "token_sequences_and_positions",
]


def requests(record: CausalConvolution) -> tuple[dict[str, Any], ...]:
    """Returns the owners of a record's entries: packed sequences, or the rows."""
    if record.cu_seqlens is None:
        return ({"b": np.arange(record.x.shape[0])},)
    return (packed_requests(record.cu_seqlens, record.x.shape[1], record.sequence_state, record.state_slots),)


FAMILY = Family(
    name="causal_convolution",
    record=CausalConvolution,
    differentiable=("x", "weight", "bias", "initial_state", "sequence_state"),
    dtype=lambda record: record.x.dtype,
    head_dims=lambda record: (record.weight.shape[1],),
    axes={
        "x": "b t i",
        "weight": "i w",
        "bias": "i",
        "initial_state": "b i s",
        "cu_seqlens": "n",
        "sequence_state": "r i s",
        "state_slots": "n",
        # Final states of packed sequences have b = N there: a packed call has one row, which cannot be split.
        "output": ("b t i", "b i s"),
    },
    # Each shard is a separate call, since rows and channels are independent.
    shardable="bi",
    token_sharding=TokenShardFunctions(run=run_on_token_shard, kernel_record_for_explain=record_for_explain),
    reference=reference,
    requests=requests,
    invariances=invariances_of_recurrences,
)
