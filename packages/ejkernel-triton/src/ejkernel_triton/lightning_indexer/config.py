"""Tile sizes and launch parameters of the indexer's kernels, and the tiles that shared memory holds."""

import dataclasses

from ejkernel.arithmetic import cdiv
from ejkernel.families.lightning_indexer import FAMILY, LightningIndexer, with_wide_query
from ejkernel.ops.chips import KIBI, Gpu, gpu_of
from ejkernel.ops.device import DeviceInfo
from ejkernel.ops.params import Direction
from ejkernel.planning.fixed_sizes import with_fixed_sizes
from ejkernel_triton.launch import is_interpreting
from ejkernel_triton.shrink import shrink_until_it_fits
from ejkernel_triton.sizes import pad_to_dot_size, pad_to_power_of_two, require_powers_of_two

MIN_TILE = 16
"""The smallest side of a tile that `tl.dot` supports."""
MAX_QUERY_ROWS = 256
"""The most rows of queries and heads per program: the columns of WGMMA's largest tile."""
QUERY_BYTES = 64 * KIBI
"""Shared memory for these rows; 16 KiB on AMD's chips, which have 64."""
KEYS_PER_PROGRAM, MIN_KEYS_PER_PROGRAM = 8192, 1024
"""The most and fewest keys per program of `indexer_scores_kernel`: the queries are loaded once for all of them."""
PROGRAMS_PER_MULTIPROCESSOR = 8
"""Programs of `indexer_scores_kernel` per multiprocessor that are enough to fill a chip."""
MIN_CANDIDATES = 2048
"""The fewest keys per row that `select_candidates_kernel` holds in registers."""
MAX_CANDIDATES_OF_FOUR_WARPS = 4096
"""The most keys per row that four warps hold in registers."""
LONG_ROW = 65536
"""Rows of more keys have twice as many candidates: guesses are less precise there, and wrong ones cost more."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class IndexerTiles:
    """Configuration of the kernels of the scores and of the selection.

    Attributes:
        block_q: Queries per program of `indexer_scores_kernel`, with all of their heads.
        block_kv: Keys per tile of `indexer_scores_kernel`.
        keys_per_program: Keys per program of `indexer_scores_kernel`; a multiple of `block_kv`.
        num_warps: Warps per program of `indexer_scores_kernel`.
        num_stages: Pipeline stages of the copies of keys.
        num_candidates: Keys that a program of `select_candidates_kernel` holds in registers, at least `top_k`.
        sample_warps: Warps per program of `guess_threshold_kernel`.
        gather_tile: Scores per step of `gather_candidates_kernel`.
        gather_warps: Warps per program of `gather_candidates_kernel`.
        select_warps: Warps per program of `select_candidates_kernel`.
        sort_warps: Warps per program of `sort_selected_kernel`.
    """

    block_q: int
    block_kv: int
    keys_per_program: int
    num_warps: int
    num_stages: int
    num_candidates: int
    sample_warps: int
    gather_tile: int
    gather_warps: int
    select_warps: int
    sort_warps: int

    def __post_init__(self) -> None:
        """Raises ValueError for sizes that tiles cannot have."""
        require_powers_of_two(
            self,
            "block_q",
            "block_kv",
            "keys_per_program",
            "num_warps",
            "num_candidates",
            "sample_warps",
            "gather_tile",
            "gather_warps",
            "select_warps",
            "sort_warps",
        )


PUBLIC_FIELDS = {"block_q": "block_q", "block_k": "block_kv"}
"""Maps fields of the public configuration to fields of this one."""


def heuristic(record: LightningIndexer, device: DeviceInfo, direction: Direction) -> IndexerTiles:
    """Returns the default tiles for a record on a device."""
    return candidates(record, device, direction)[0]


FIXED_LENGTH = 4096
"""Queries and keys of the call whose configuration serves all calls in a `batch_invariant` block."""


def batch_invariant(record: LightningIndexer, device: DeviceInfo, direction: Direction) -> IndexerTiles:
    """Returns the tiles for all calls in a `batch_invariant` block."""
    return heuristic(
        with_fixed_sizes(record, FAMILY.axes_of(record), {"b": 1, "t": FIXED_LENGTH, "s": FIXED_LENGTH}),
        device,
        direction,
    )


def candidates(record: LightningIndexer, device: DeviceInfo, direction: Direction) -> tuple[IndexerTiles, ...]:
    """Returns tiles worth measuring for a record on a device, the most likely first."""
    record = with_wide_query(record)
    if is_interpreting():
        return (_interpreted_tiles(record),)
    chip = gpu_of(device)
    # An H200 computes scores of 2048 queries, 64 heads and 32768 keys in 1.59 ms with four queries and eight warps, in
    # 1.79 with four warps, in 1.84 with two queries and four warps (docs/lab/token_sparse_attention_gpu.md).
    per_selected_key = 4 if record.key.shape[1] > LONG_ROW else 2
    num_candidates = max(MIN_CANDIDATES, per_selected_key * pad_to_power_of_two(record.top_k))
    row_bytes = _row_bytes(record, chip)
    query_rows = min(MAX_QUERY_ROWS, (QUERY_BYTES if chip.vendor == "nvidia" else QUERY_BYTES // 4) // row_bytes)
    tiles = [
        IndexerTiles(
            block_q=queries_per_program(record, rows),
            block_kv=keys,
            keys_per_program=_keys_per_program(record, queries_per_program(record, rows), chip),
            num_warps=warps,
            num_stages=stages,
            num_candidates=num_candidates,
            sample_warps=8,
            gather_tile=1024,
            gather_warps=4,
            select_warps=8 if num_candidates > MAX_CANDIDATES_OF_FOUR_WARPS else 4,
            sort_warps=16,
        )
        for rows, keys, warps, stages in (
            (query_rows, 64, 8, 3),
            (query_rows, 64, 4, 3),
            (max(1, query_rows // 2), 64, 4, 3),
            (max(1, query_rows // 2), 128, 4, 2),
        )
    ]
    return tuple(dict.fromkeys(shrink_to_shared_memory(record, x, chip) for x in tiles))


def _interpreted_tiles(record: LightningIndexer) -> IndexerTiles:
    """Returns small tiles, so that small arrays take every path of the kernels."""
    return IndexerTiles(
        block_q=queries_per_program(record, MIN_TILE),
        block_kv=MIN_TILE,
        keys_per_program=2 * MIN_TILE,
        num_warps=4,
        num_stages=2,
        num_candidates=pad_to_power_of_two(record.top_k + 1, MIN_TILE),
        sample_warps=4,
        gather_tile=64,
        gather_warps=4,
        select_warps=4,
        sort_warps=4,
    )


def queries_per_program(record: LightningIndexer, query_rows: int) -> int:
    """Returns the queries whose heads fill a number of rows: one at least, and as many as `tl.dot` needs."""
    heads = pad_to_power_of_two(record.query.shape[2])
    enough = max(1, MIN_TILE // heads)
    return max(
        enough, min(1 << (max(1, query_rows // heads).bit_length() - 1), pad_to_power_of_two(record.query.shape[1]))
    )


def _keys_per_program(record: LightningIndexer, block_q: int, chip: Gpu) -> int:
    """Returns the keys per program: fewer where there are few queries."""
    (batch, tokens, *_), keys = record.query.shape, record.key.shape[1]
    chosen = KEYS_PER_PROGRAM
    wanted = PROGRAMS_PER_MULTIPROCESSOR * chip.multiprocessors
    while chosen > MIN_KEYS_PER_PROGRAM and batch * cdiv(tokens, block_q) * cdiv(keys, chosen) < wanted:
        chosen //= 2
    return chosen


def shared_memory_refusal(record: LightningIndexer, device: DeviceInfo) -> str:
    """Returns why the kernels cannot run for a record on a device; empty where they can."""
    if is_interpreting():
        return ""
    chip = gpu_of(device)
    needed_bytes = shared_memory_bytes(record, heuristic(record, device, "forward"), chip)
    if needed_bytes <= chip.shared_memory:
        return ""
    heads, channels = record.query.shape[2:]
    sizes = f"{heads} heads of {channels} channels"
    return f"{sizes} take up to {needed_bytes} bytes of shared memory, and {chip.target} has {chip.shared_memory}"


def shrink_to_shared_memory(record: LightningIndexer, config: IndexerTiles, chip: Gpu) -> IndexerTiles:
    """Returns the configuration with fewer stages, keys and queries until it fits the chip; the smallest if none
    fits.
    """
    steps = (
        ("num_stages", 2),
        ("block_kv", 2 * MIN_TILE),
        ("block_q", queries_per_program(record, 1)),
        ("num_stages", 1),
        ("block_kv", MIN_TILE),
    )
    return shrink_until_it_fits(config, lambda x: shared_memory_bytes(record, x, chip), chip.shared_memory, steps)


def shared_memory_bytes(record: LightningIndexer, config: IndexerTiles, chip: Gpu) -> int:
    """Returns the bytes of a program of `indexer_scores_kernel`: rows of queries, tiles of keys, and scores."""
    rows = config.block_q * pad_to_power_of_two(record.query.shape[2])
    tiles = (rows + config.num_stages * config.block_kv) * _row_bytes(record, chip)
    return tiles + 4 * config.block_kv * config.block_q + KIBI


def _row_bytes(record: LightningIndexer, chip: Gpu) -> int:
    """Returns the bytes of a row of a tile: float32 rows are there twice on NVIDIA's chips, split in two."""
    size = record.query.dtype.itemsize
    return pad_to_dot_size(record.query.shape[3]) * size * (2 if size > 2 and chip.vendor == "nvidia" else 1)
