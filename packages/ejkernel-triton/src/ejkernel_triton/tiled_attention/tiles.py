"""Tile sizes and launch parameters: which are used when nobody chose, and which are worth measuring.

What fits a chip follows from its shared memory; of what fits, the preference is by matrix unit and head size. That of
Hopper was measured on an H200, and those of the others are the largest tiles whose kernels, compiled for the chip in 16
bits, keep all of their values in registers. In float32 most kernels spill.
"""

from collections.abc import Callable
from typing import Literal, NamedTuple

import jax.numpy as jnp

from ejkernel.families.tiled_attention import TiledAttention, band
from ejkernel.ops.config.params import BwdParams, Direction, FwdParams
from ejkernel.ops.device import DeviceInfo
from ejkernel_triton.tiled_attention.spec import padded

Generation = Literal["hopper", "hopper, float32", "blackwell", "ampere", "amd", "interpreter"]
KIBI = 1024


SCORES = 1024
"""Scores a warp that leave registers for the rest where scores are bounded, biased, masked or dropped."""


class Tile(NamedTuple):
    """What a program owns and visits: rows of either, warps and stages."""

    own: int
    visit: int
    warps: int
    stages: int


# By size of the operands' rows in bytes, the largest of queries and values, padded: up to 128, 256, 512 and 1024.
Preference = tuple[tuple[Tile, ...], ...]

FORWARD: dict[Generation, Preference] = {
    "hopper": (
        (Tile(64, 64, 4, 3), Tile(64, 128, 4, 2), Tile(128, 64, 8, 3)),
        (Tile(64, 64, 4, 3), Tile(128, 128, 8, 3), Tile(64, 32, 4, 3)),
        (Tile(128, 64, 8, 2), Tile(128, 32, 8, 3), Tile(64, 32, 4, 2)),
        (Tile(64, 32, 4, 2), Tile(64, 16, 4, 2)),
    ),
    "ampere": (
        (Tile(128, 64, 4, 3), Tile(128, 64, 4, 2), Tile(64, 64, 4, 2)),
        (Tile(128, 64, 8, 2), Tile(64, 64, 4, 2), Tile(64, 32, 4, 2)),
        (Tile(64, 64, 8, 2), Tile(64, 32, 8, 2), Tile(64, 32, 4, 1)),
        (Tile(32, 16, 4, 2), Tile(16, 16, 4, 1)),
    ),
    "amd": (
        (Tile(128, 64, 4, 1), Tile(64, 64, 4, 1)),
        (Tile(128, 32, 4, 1), Tile(64, 32, 4, 1)),
        (Tile(64, 32, 4, 1), Tile(32, 16, 4, 1)),
        (Tile(32, 16, 4, 1), Tile(16, 16, 4, 1)),
    ),
    "interpreter": ((Tile(32, 32, 4, 1), Tile(16, 64, 4, 1)),) * 4,
}

KEYS: dict[Generation, Preference] = {
    "hopper": (
        (Tile(64, 64, 4, 3), Tile(64, 32, 4, 3), Tile(64, 64, 4, 2)),
        (Tile(64, 64, 4, 2), Tile(64, 32, 4, 3), Tile(128, 64, 8, 3)),
        (Tile(128, 32, 8, 2), Tile(64, 32, 4, 2), Tile(32, 32, 4, 2)),
        (Tile(32, 16, 4, 2), Tile(16, 16, 4, 1)),
    ),
    "ampere": (
        (Tile(64, 64, 4, 2), Tile(64, 32, 4, 2)),
        (Tile(64, 32, 4, 2), Tile(64, 32, 4, 1)),
        (Tile(64, 32, 8, 1), Tile(32, 16, 4, 1)),
        (Tile(16, 16, 4, 1),),
    ),
    "amd": (
        (Tile(64, 64, 4, 1), Tile(64, 32, 4, 1)),
        (Tile(64, 32, 4, 1), Tile(32, 32, 4, 1)),
        (Tile(32, 16, 4, 1),),
        (Tile(16, 16, 4, 1),),
    ),
    "interpreter": ((Tile(32, 16, 4, 1), Tile(16, 32, 4, 1)),) * 4,
}

QUERIES: dict[Generation, Preference] = {
    "hopper": (
        (Tile(64, 64, 4, 3), Tile(64, 64, 4, 2), Tile(128, 64, 8, 4)),
        (Tile(128, 64, 8, 3), Tile(64, 64, 4, 2), Tile(128, 64, 8, 4)),
        (Tile(64, 32, 4, 3), Tile(64, 64, 4, 2), Tile(64, 32, 4, 1)),
        (Tile(32, 16, 2, 2), Tile(16, 16, 1, 1)),
    ),
    "ampere": (
        (Tile(64, 64, 4, 2), Tile(64, 32, 4, 2)),
        (Tile(64, 32, 4, 2), Tile(64, 32, 4, 1)),
        (Tile(64, 32, 4, 1), Tile(32, 16, 2, 1)),
        (Tile(16, 16, 1, 1),),
    ),
    "amd": (
        (Tile(64, 64, 4, 1), Tile(64, 32, 4, 1)),
        (Tile(64, 32, 4, 1), Tile(32, 32, 2, 1)),
        (Tile(32, 16, 2, 1),),
        (Tile(16, 16, 1, 1),),
    ),
    "interpreter": ((Tile(32, 32, 2, 1), Tile(16, 64, 1, 1)),) * 4,
}

# Hopper multiplies float32 on the unit that Ampere has, in three products.
FORWARD["hopper, float32"] = (
    (Tile(128, 64, 4, 1), Tile(64, 64, 4, 2)),
    (Tile(128, 64, 4, 1), Tile(128, 64, 8, 1), Tile(64, 64, 4, 2)),
    (Tile(128, 64, 8, 1), Tile(32, 64, 4, 1), Tile(128, 32, 8, 2)),
    FORWARD["hopper"][3],
)
KEYS["hopper, float32"] = (
    (Tile(64, 64, 4, 1), Tile(64, 32, 4, 2)),
    (Tile(128, 32, 8, 1), Tile(64, 64, 4, 1), Tile(64, 32, 4, 2)),
    (Tile(32, 32, 4, 1), Tile(64, 32, 4, 1), Tile(32, 16, 4, 2)),
    KEYS["hopper"][3],
)
QUERIES["hopper, float32"] = (
    (Tile(64, 64, 4, 1), Tile(64, 32, 4, 2)),
    (Tile(64, 64, 4, 1), Tile(128, 32, 8, 1)),
    (Tile(64, 64, 4, 1), Tile(64, 32, 4, 1)),
    QUERIES["hopper"][3],
)

# Blackwell's matrix unit keeps sums in a memory of its own; only the forward pass of long rows has fewer registers.
KEYS["blackwell"], QUERIES["blackwell"] = KEYS["hopper"], QUERIES["hopper"]
FORWARD["blackwell"] = (*FORWARD["hopper"][:2], (Tile(128, 32, 8, 3), Tile(64, 32, 4, 2)), FORWARD["hopper"][3])


def heuristic(record: TiledAttention, device: DeviceInfo, direction: Direction) -> FwdParams | BwdParams:
    """Tile sizes for a record on a device, not measured."""
    return candidates(record, device, direction)[0]


def candidates(record: TiledAttention, device: DeviceInfo, direction: Direction) -> tuple[FwdParams | BwdParams, ...]:
    """Tile sizes worth measuring for a record on a device, the most likely first."""
    if direction == "forward":
        found = _fitting(record, device, FORWARD, _forward_bytes)
        made: tuple[FwdParams | BwdParams, ...] = tuple(_forward(record, tile) for tile in found)
    else:
        keys, queries = (_fitting(record, device, table, _backward_bytes) for table in (KEYS, QUERIES))
        pairs = [(tile, queries[0]) for tile in keys] + [(keys[0], tile) for tile in queries[1:]]
        made = tuple(_backward(record, *pair) for pair in pairs)
    return tuple(dict.fromkeys(made))


def forward_tile(params: FwdParams) -> Tile:
    """The tile of a forward configuration.

    Raises:
        ValueError: Something is missing, or is nothing that a kernel can be compiled with.
    """
    return _tile(params, "q_blocksize", "kv_blocksize", "num_warps", "num_stages")


def backward_tiles(params: BwdParams) -> tuple[Tile, Tile]:
    """The tiles of a backward configuration: of the programs that own keys, and of those that own queries.

    Programs that own queries have a warp for every 16 of them.

    Raises:
        ValueError: As `forward_tile`.
    """
    keys = _tile(params, "kv_blocksize", "q_blocksize", "num_warps", "num_stages")
    queries = _tile(params, "blocksize_m", "blocksize_n", "num_warps", "blocksize_k")
    return keys, queries._replace(warps=queries.own // 16)


def _tile(params: FwdParams | BwdParams, own: str, visit: str, warps: str, stages: str) -> Tile:
    values = {name: getattr(params, name) for name in (own, visit, warps, stages)}
    for name, value in values.items():
        least = 16 if name in (own, visit) else 1
        if value is None or value < least or (name != stages and value & (value - 1)):
            wants = "a number" if name == stages else f"a power of two of at least {least}"
            raise ValueError(f"cfg: got {name}={value}, the triton kernels want {wants}")
    return Tile(*values.values())


def splits(record: TiledAttention) -> bool:
    """Whether the gradients of keys and of values are left to two kernels: rows too long for one's registers."""
    return max(padded(record.query.shape[3]), padded(record.value.shape[3])) > 128


def generation(device: DeviceInfo, itemsize: int = 2) -> Generation:
    """The kind of matrix unit, for operands of so many bytes."""
    if device.platform == "cpu":
        return "interpreter"
    if device.vendor == "amd":
        return "amd"
    capability = device.compute_capability or 0.0
    if 9.0 <= capability < 10.0:
        return "hopper" if itemsize <= 2 else "hopper, float32"
    return "blackwell" if 10.0 <= capability < 12.0 else "ampere"


def shared_memory(device: DeviceInfo) -> int:
    """Bytes of shared memory that one program can have."""
    if device.vendor == "amd":
        return 64 * KIBI
    capability = device.compute_capability or 0.0
    if device.platform == "cpu" or 9.0 <= capability < 12.0:
        return 227 * KIBI
    return 163 * KIBI if capability in (8.0, 8.7) else 99 * KIBI


def _fitting(
    record: TiledAttention,
    device: DeviceInfo,
    table: dict[Generation, Preference],
    size: Callable[[Tile, int], int],
) -> tuple[Tile, ...]:
    """The tiles of a preference that the device's shared memory holds; the last where none is known to."""
    itemsize = jnp.dtype(record.query.dtype).itemsize
    row = itemsize * max(padded(record.query.shape[3]), padded(record.value.shape[3]))
    preferred = table[generation(device, itemsize)][min(3, max(0, (row // 128).bit_length() - 1))]
    budget = shared_memory(device)
    if itemsize > 2:  # operands of three products instead of one pass through shared memory again
        budget = budget * 3 // 4 if table is FORWARD else budget * 3 // 5
    found = [tile for tile in preferred if size(tile, row) <= budget] or [preferred[-1]]
    own = found[0].own
    if _is_rich(record):  # what is computed of every score needs registers: small tiles first
        limit = SCORES // 2 if row > 256 or table is KEYS else SCORES
        found.sort(key=lambda tile: tile.own * tile.visit // tile.warps > limit)
    elif table is FORWARD and _is_open(record):  # where no diagonal cuts a tile, long ones are better
        found.sort(key=lambda tile: 0 if tile.own != own else -tile.visit)
    return tuple(found)


def _forward_bytes(tile: Tile, row: int) -> int:
    return (tile.own + 2 * tile.stages * tile.visit) * row


def _backward_bytes(tile: Tile, row: int) -> int:
    return 2 * (tile.own + tile.stages * tile.visit) * row + 4 * KIBI


def _is_rich(record: TiledAttention) -> bool:
    """Whether scores are more than products of queries and keys; segments and positions matter in few tiles only."""
    arrays = (record.bias, record.mask, record.logits_soft_cap)
    return any(x is not None for x in arrays) or record.dropout_prob > 0


def _is_open(record: TiledAttention) -> bool:
    """Whether every query sees every key."""
    return band(record) == (None, None)


def _forward(record: TiledAttention, tile: Tile) -> FwdParams:
    queries, keys = _clamped(tile.own, record.query.shape[1]), _clamped(tile.visit, record.key.shape[1])
    return FwdParams(q_blocksize=queries, kv_blocksize=keys, num_warps=tile.warps, num_stages=tile.stages)


def _backward(record: TiledAttention, keys: Tile, queries: Tile) -> BwdParams:
    t, s = record.query.shape[1], record.key.shape[1]
    return BwdParams(
        q_blocksize=_clamped(keys.visit, t),
        kv_blocksize=_clamped(keys.own, s),
        num_warps=keys.warps,
        num_stages=keys.stages,
        blocksize_m=_clamped(queries.own, t),
        blocksize_n=_clamped(queries.visit, s),
        blocksize_k=queries.stages,
    )


def _clamped(block: int, length: int) -> int:
    """A block no longer than a length needs; matrix products take powers of two from 16 on."""
    return min(block, padded(length))


READS = frozenset(
    {"q_blocksize", "kv_blocksize", "num_warps", "num_stages", "blocksize_m", "blocksize_n", "blocksize_k"}
)
"""Names of the configuration fields that the kernels look at."""
