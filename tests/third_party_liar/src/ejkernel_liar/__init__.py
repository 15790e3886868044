"""Implementations of flash attention with one fault each, behind every honest one in the order of choice."""

import dataclasses
from typing import Any

from ejkernel.families import tiled_attention
from ejkernel.families.tiled_attention import SoftmaxResiduals, TiledAttention
from ejkernel.ops import NO_CHOICE, Implementation, Requires, hookimpl


def ignores_window(record: TiledAttention, params: Any) -> tuple[Any, SoftmaxResiduals]:
    """Right on every call without a window."""
    return tiled_attention.reference(dataclasses.replace(record, sliding_window=None))


def _declare(name: str, *handles: str, **requires: Any) -> Implementation:
    return Implementation(
        family="tiled_attention",
        name=name,
        platform=name,
        forward="ejkernel_liar:ignores_window",
        priority=-100,
        requires=Requires(
            devices=frozenset({"cpu", "gpu", "tpu"}),
            dtypes=frozenset({"float32", "bfloat16", "float16"}),
            handles=frozenset(handles),
            **requires,
        ),
        config=NO_CHOICE,
    )


@hookimpl
def ejkernel_implementations() -> tuple[Implementation, ...]:
    """The liars."""
    return (
        _declare("liar", "causal", "sliding_window"),
        _declare("vacuous", extra=lambda record: ("it is not a good day for attention",)),
        # No case can show this: it is no field of the record.
        _declare("boaster", "causal", "telepathy"),
    )
