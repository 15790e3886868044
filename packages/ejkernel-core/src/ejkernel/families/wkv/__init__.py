"""The WKV family: the record its operations lower to and its meaning."""

from ejkernel.families.contract import Family
from ejkernel.families.wkv.record import INITIAL_MAX_EXPONENT, WKV, State, accumulator, first_state, state_after_token
from ejkernel.families.wkv.reference import reference

__all__ = [
    "FAMILY",
    "INITIAL_MAX_EXPONENT",
    "WKV",
    "State",
    "accumulator",
    "first_state",
    "reference",
    "state_after_token",
]

FAMILY = Family(
    name="wkv",
    record=WKV,
    dtype=lambda record: record.value.dtype,
    axes={"output": ("b t i", "b c i")},
    # Each shard is a separate call, since rows and channels are independent.
    shardable="bi",
    reference=reference,
    invariances=lambda record: frozenset({"batch", "padding", "chunking"}),
)
