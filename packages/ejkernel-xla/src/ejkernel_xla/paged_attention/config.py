"""Tile sizes: the heuristic, and the candidates that are worth measuring."""

import dataclasses

from ejkernel.arithmetic import at_most, known_or
from ejkernel.families.paged_attention import PagedAttention
from ejkernel.families.paged_attention import pages as paged_cache
from ejkernel.families.paged_attention.rotation import key_head_dim
from ejkernel.ops.device import DeviceInfo
from ejkernel.ops.params import Direction
from ejkernel_xla.sizes import check_positive

BLOCK_KV = 256
"""Keys per tile: long enough for the matrix products, short enough that a window or a short sequence wastes little."""

MAX_BLOCK_Q = 128
"""Most query rows per tile."""

MAX_GATHERED_ELEMENTS = {"cpu": 2**19, "gpu": 2**23, "tpu": 2**23}
"""Key elements gathered at once: on a CPU they stay in its caches, elsewhere they fill the device."""

ASSUMED_SEQUENCES, ASSUMED_QUERIES = 64, 16
"""Sequences, and query rows of each, for which tiles are planned if their counts are symbolic."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class PagedTiles:
    """The configuration.

    Attributes:
        block_q: Query rows of one sequence a tile.
        block_kv: Keys per tile.
        stack: Tiles of query rows in one batched product.
        batch_invariant: Whether all tiles have these sizes, also in calls that cannot fill them.
    """

    block_q: int
    block_kv: int
    stack: int
    batch_invariant: bool = False

    def __post_init__(self) -> None:
        check_positive(self)


PUBLIC_FIELDS = {"q_blocksize": "block_q", "kv_blocksize": "block_kv", "seq_blocksize": "stack"}
"""Public configuration field -> field of this."""


@dataclasses.dataclass(frozen=True)
class PagedTiling:
    """How a record is cut: products have `stack` tiles of `queries` rows of one sequence each, and `keys` keys."""

    queries: int
    keys: int
    stack: int


def tiles(record: PagedAttention, config: PagedTiles) -> PagedTiling:
    """Returns the tiles of a record, of which no axis is empty: none larger than it can fill.

    Raises:
        ValueError: In a `batch_invariant` block, tiles of several rows of a call with a window.
    """
    if config.batch_invariant:
        if config.block_q > 1 and record.sliding_window is not None:
            raise ValueError(
                f"q_blocksize: got {config.block_q} in a batch_invariant block, wants 1 with sliding_window: "
                "the keys of a tile would depend on the row it begins with"
            )
        return PagedTiling(config.block_q, config.block_kv, config.stack)
    rows, sequences = record.query.shape[0], record.kv_lens.shape[0]
    queries = 1 if record.query_start is None else max(1, at_most(config.block_q, rows))
    keys = max(1, at_most(config.block_kv, paged_cache.max_sequence_len(record)))
    return PagedTiling(queries, keys, max(1, at_most(config.stack, sequences + rows // queries)))


def heuristic(record: PagedAttention, device: DeviceInfo, direction: Direction) -> PagedTiles:
    """Returns tile sizes for a record on a device, not measured."""
    return _default_tiles(record, device, BLOCK_KV)


FIXED_BLOCK_KV = 1024
"""Keys per tile in a `batch_invariant` block, except on a CPU, which has `BLOCK_KV`.

On an H200, 64 rows of 4096 keys in one stack took 0.69 ms while other programs ran; with 256 keys 0.79 ms, and 31 ms
row by row, without other programs (benchmarks/results/batch_invariance.md). Rows had the same bits in all stacks.
"""

MAX_FIXED_STACK = 64
"""The most rows in one batched product in such a block."""


def batch_invariant(record: PagedAttention, device: DeviceInfo, direction: Direction) -> PagedTiles:
    """Returns tile sizes for all calls in a `batch_invariant` block: each row is a tile, in prefill and in decoding.

    With a window, the first key differs by row, and a tile of several rows would begin at that of its first row.
    """
    if device.platform == "cpu":
        return PagedTiles(block_q=1, block_kv=BLOCK_KV, stack=1, batch_invariant=True)
    key_elements = FIXED_BLOCK_KV * paged_cache.kv_heads(record) * key_head_dim(record)
    stack = max(1, min(MAX_FIXED_STACK, MAX_GATHERED_ELEMENTS[device.platform] // key_elements))
    return PagedTiles(block_q=1, block_kv=FIXED_BLOCK_KV, stack=stack, batch_invariant=True)


def candidates(record: PagedAttention, device: DeviceInfo, direction: Direction) -> tuple[PagedTiles, ...]:
    """Returns tile sizes worth measuring for a record on a device."""
    return tuple(dict.fromkeys(_default_tiles(record, device, keys) for keys in (64, 128, 256, 512)))


def _default_tiles(record: PagedAttention, device: DeviceInfo, keys: int) -> PagedTiles:
    """Returns query tiles of the average length of a sequence's queries; as many at once as keep their keys close."""
    sequences = max(1, known_or(record.kv_lens.shape[0], ASSUMED_SEQUENCES))
    average = max(1, known_or(record.query.shape[0] // sequences, ASSUMED_QUERIES))
    queries = min(MAX_BLOCK_Q, 2 ** (average - 1).bit_length())
    keys = max(1, at_most(keys, paged_cache.max_sequence_len(record)))
    key_elements = keys * paged_cache.kv_heads(record) * key_head_dim(record)
    score_elements = keys * record.query.shape[1] * queries
    stack = max(1, MAX_GATHERED_ELEMENTS[device.platform] // max(1, key_elements, score_elements))
    return PagedTiles(block_q=queries, block_kv=keys, stack=min(stack, sequences, 64))
