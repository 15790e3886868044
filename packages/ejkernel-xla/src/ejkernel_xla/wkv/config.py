"""The loop over tokens: the heuristic, and the candidates that are worth measuring."""

import dataclasses
from typing import Any

from ejkernel.families.wkv import WKV
from ejkernel.ops.params import Direction
from ejkernel_xla.sizes import check_positive


@dataclasses.dataclass(frozen=True, kw_only=True)
class TokenLoop:
    """The configuration of either pass.

    Attributes:
        unroll: Tokens per iteration of the loop.
        batch_invariant: Whether each row is computed alone, one token at a time.
    """

    unroll: int
    batch_invariant: bool = False

    def __post_init__(self) -> None:
        check_positive(self)


PUBLIC_FIELDS = {"unroll": "unroll"}
"""Public configuration field -> field of this."""


def heuristic(record: WKV, device: Any, direction: Direction) -> TokenLoop:
    """Returns the loop for a record on a device, not measured."""
    return TokenLoop(unroll=1)


def batch_invariant(record: WKV, device: Any, direction: Direction) -> TokenLoop:
    """Returns the loop of all calls in a `batch_invariant` block."""
    return TokenLoop(unroll=1, batch_invariant=True)


def candidates(record: WKV, device: Any, direction: Direction) -> tuple[TokenLoop, ...]:
    """Returns loops worth measuring for a record on a device."""
    return tuple(TokenLoop(unroll=n) for n in (1, 4, 16))
