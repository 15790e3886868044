"""The chunked linear recurrence family: the record its operations lower to and its meaning."""

from typing import Any

import numpy as np

from ejkernel.families.contract import Family, TokenShardFunctions
from ejkernel.families.linear_recurrence.record import (
    TOKEN_FIELDS,
    LinearRecurrence,
    SlottedStates,
    accumulator,
    final_states_shape,
    has_decay_per_channel,
    has_token_states,
    num_state_heads,
    real_and_segment_start_tokens,
    slotted_states,
    states,
    to_recorded_state_layout,
    unchanged_states,
    with_plain_states,
)
from ejkernel.families.linear_recurrence.reference import reference
from ejkernel.families.linear_recurrence.token_shards import (
    SPLIT_RECURRENCE_FUNCTIONS,
    record_for_explain,
    run_on_token_shard,
)
from ejkernel.planning.requests import SHARED, packed_requests, segment_owners
from ejkernel.types.invariances import invariances_of_recurrences

__all__ = [
    "FAMILY",
    "TOKEN_FIELDS",
    "LinearRecurrence",
    "SlottedStates",
    "accumulator",
    "axes",
    "final_states_shape",
    "has_decay_per_channel",
    "has_token_states",
    "num_state_heads",
    "real_and_segment_start_tokens",
    "reference",
    "requests",
    "slotted_states",
    "states",
    "to_recorded_state_layout",
    "unchanged_states",
    "with_plain_states",
]


def axes(record: LinearRecurrence) -> dict[str, Any]:
    """Returns axis letters of a record's fields and of its outputs: h counts the heads that have a state, g those they
    share.

    Either queries have a head each and share keys and values, or values have one each and share queries and keys.
    """
    shared_queries = record.query.shape[2] < record.value.shape[2]
    state = "h v k" if record.transposed_states else "h k v"
    return {
        "query": "b t g k" if shared_queries else "b t h k",
        "key": "b t g k",
        "value": "b t h v" if shared_queries else "b t g v",
        "decay": "b t h k",
        "value_decay": "b t h v",
        "beta": "b t h",
        "dt": "b t h",
        "skip": "b t h",
        "low_rank_write": "b t h k",
        "low_rank_read": "b t h k",
        "initial_state": f"b {state}",
        "cu_seqlens": "n",
        "sequence_state": f"n {state}",
        "segment_ids": "b t",
        "state_slots": "n",
        "parents": "b t",
        # Final states of packed sequences have b = N there: a packed call has one row, which cannot be split.
        # Trees have a state for every token, if they are kept.
        "output": ("b t h v", f"b t {state}" if has_token_states(record) else f"b {state}"),
    }


def requests(record: LinearRecurrence) -> tuple[dict[str, Any], ...]:
    """Returns the owners of a record's entries: packed sequences, segments of rows, or the rows."""
    if record.cu_seqlens is not None:
        return (packed_requests(record.cu_seqlens, record.query.shape[1], record.sequence_state, record.state_slots),)
    if record.segment_ids is None:
        return ({"b": np.arange(record.query.shape[0])},)
    owners = segment_owners(record.segment_ids)
    first, last = (
        np.array([next((x for x in row if x >= 0), SHARED) for row in rows]) for rows in (owners, owners[:, ::-1])
    )
    # The first segment of a row continues its initial state, and the last one leaves the final state.
    return ({"b t": owners, "initial_state": first[:, None, None, None], "output.1": last[:, None, None, None]},)


FAMILY = Family(
    name="linear_recurrence",
    record=LinearRecurrence,
    differentiable=(*TOKEN_FIELDS, "initial_state", "sequence_state"),
    dtype=lambda record: record.query.dtype,
    head_dims=lambda record: (record.query.shape[-1], record.value.shape[-1]),
    axes=axes,
    # Each shard is a separate call, since rows and heads are independent.
    shardable="bhg",
    aligned=(("h", "g"),),
    token_sharding=TokenShardFunctions(
        run=run_on_token_shard,
        kernel_record_for_explain=record_for_explain,
        recurrence=SPLIT_RECURRENCE_FUNCTIONS,
    ),
    reference=reference,
    requests=requests,
    invariances=invariances_of_recurrences,
)
