"""The WKV family: the record its operations lower to and its meaning."""

from ejkernel.families.contract import Family
from ejkernel.families.wkv.record import START, WKV, State, accumulator, after_token, first_state
from ejkernel.families.wkv.reference import reference

__all__ = ["FAMILY", "START", "WKV", "State", "accumulator", "after_token", "first_state", "reference"]

FAMILY = Family(
    name="wkv",
    record=WKV,
    dtype=lambda record: record.value.dtype,
    axes={"output": ("b t i", "b c i")},
    # Each shard is a separate call, since rows and channels are independent.
    shardable="bi",
    reference=reference,
)
