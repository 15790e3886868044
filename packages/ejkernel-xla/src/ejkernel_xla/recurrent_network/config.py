"""Blocks of tokens: the heuristic, and the candidates that are worth measuring."""

import dataclasses
from typing import Any

from ejkernel.arithmetic import at_most, known_or
from ejkernel.families.recurrent_network import RecurrentNetwork
from ejkernel.ops.params import Direction
from ejkernel_xla.sizes import check_positive

CACHED_TOKENS = {"forward": 256, "backward": 512}
"""Tokens of all rows in one product on a CPU: enough for efficient products, few enough that the results fit a cache.
The backward pass has more, since it also adds products to the gradients of weights."""

ASSUMED_ROWS, ASSUMED_TOKENS = 8, 256
"""Rows and tokens for which blocks are planned if their counts are symbolic."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class TokenBlocks:
    """The configuration of either pass.

    Attributes:
        block_t: Tokens whose inputs are multiplied at once.
        unroll: Tokens per iteration of the loop.
        batch_invariant: Whether rows are computed in tiles of `TILE_ROWS`, one token at a time.
    """

    block_t: int
    unroll: int
    batch_invariant: bool = False

    def __post_init__(self) -> None:
        check_positive(self)


PUBLIC_FIELDS = {"block_t": "block_t", "unroll": "unroll"}
"""Public configuration field -> field of this."""


def heuristic(record: RecurrentNetwork, device: Any, direction: Direction) -> TokenBlocks:
    """Returns the blocks for a record on a device, not measured."""
    tokens = (
        _tokens_in_cache(record, direction) if device.platform == "cpu" else known_or(record.x.shape[1], ASSUMED_TOKENS)
    )
    return TokenBlocks(block_t=max(1, tokens), unroll=1)


def batch_invariant(record: RecurrentNetwork, device: Any, direction: Direction) -> TokenBlocks:
    """Returns the blocks of all calls in a `batch_invariant` block: only a single token has the same sums in each."""
    return TokenBlocks(block_t=1, unroll=1, batch_invariant=True)


def candidates(record: RecurrentNetwork, device: Any, direction: Direction) -> tuple[TokenBlocks, ...]:
    """Returns blocks worth measuring for a record on a device."""
    every = max(1, record.x.shape[1])
    pairs = dict.fromkeys(((_tokens_in_cache(record, direction), 1), (every, 1), (every, 4)))
    return tuple(TokenBlocks(block_t=tokens, unroll=unroll) for tokens, unroll in pairs)


def _tokens_in_cache(record: RecurrentNetwork, direction: Direction) -> int:
    rows, tokens, _ = record.x.shape
    return max(1, at_most(CACHED_TOKENS[direction] // max(1, known_or(rows, ASSUMED_ROWS)), tokens))
