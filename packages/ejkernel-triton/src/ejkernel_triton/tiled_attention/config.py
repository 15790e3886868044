"""Tile sizes and launch parameters: the heuristic for calls without a measured configuration, and the candidates.

Shared memory determines which tiles fit a chip; among those, the matrix unit, the head dimension and features that take
registers decide. The Hopper tiles for 16 bits, and for float32 with head dimension 128, were measured on an H200, for
calls without such features; all others are large tiles whose kernels, compiled for the chip, spill no registers.
"""

import dataclasses
from typing import Literal, NamedTuple

import jax.numpy as jnp
from jax import lax

from ejkernel.families.tiled_attention import TiledAttention
from ejkernel.ops.chips import KIBI, gpu_of
from ejkernel.ops.device import DeviceInfo
from ejkernel.ops.params import Direction
from ejkernel_triton.sizes import pad_to_dot_size
from ejkernel_triton.tiled_attention.spec import (
    attends_to_everything,
    has_modified_scores,
    has_segments_or_positions,
    longest_padded_row,
    shared_memory_pair_bytes,
    shared_memory_row_bytes,
)

PassName = Literal["forward", "keys", "queries"]
MatrixUnit = Literal["hopper", "hopper, float32", "blackwell", "ampere", "float32", "no unit", "amd", "interpreter"]


@dataclasses.dataclass(frozen=True, kw_only=True)
class KernelTile:
    """The tile and the launch parameters of one kernel.

    Attributes:
        block_q: Queries per tile.
        block_kv: Keys per tile.
        num_warps: Warps per program.
        num_stages: Pipeline stages of the copies of the rows that a program streams.
    """

    block_q: int
    block_kv: int
    num_warps: int
    num_stages: int


@dataclasses.dataclass(frozen=True, kw_only=True)
class TritonForward(KernelTile):
    """The configuration of the forward kernel."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class GradientTile(KernelTile):
    """The configuration of one of the backward kernels."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class TritonBackward:
    """The configuration of the backward kernels.

    Attributes:
        dkv: Tiles of the kernel that accumulates the gradients of keys and values.
        dq: Tiles of those that accumulate the gradients of queries, and of a bias.
    """

    dkv: GradientTile
    dq: GradientTile


def _field_paths_of_all_kernels(field: str) -> tuple[str, ...]:
    return field, f"dkv.{field}", f"dq.{field}"


PUBLIC_FIELDS = {
    "q_blocksize": _field_paths_of_all_kernels("block_q"),
    "kv_blocksize": _field_paths_of_all_kernels("block_kv"),
    "num_warps": _field_paths_of_all_kernels("num_warps"),
    "num_stages": _field_paths_of_all_kernels("num_stages"),
}
"""Maps fields of the public configuration to fields of these: a public size sets it in both backward kernels."""


class Tile(NamedTuple):
    """A tile: rows that a program keeps, rows that it streams, warps and stages."""

    stationary_rows: int
    streamed_rows: int
    warps: int
    stages: int


# By bytes per row of the operands, the larger of queries and values, padded: up to 128, 256, 512, and 1024 in float32.
PreferredTilesByRowSize = tuple[tuple[Tile, ...], ...]

FORWARD_TILES: dict[MatrixUnit, PreferredTilesByRowSize] = {
    "hopper": (
        (Tile(64, 64, 4, 3), Tile(64, 128, 4, 2), Tile(128, 64, 8, 3)),
        (Tile(64, 64, 4, 3), Tile(128, 128, 8, 3), Tile(64, 32, 4, 3)),
        (Tile(128, 64, 8, 2), Tile(128, 32, 8, 3), Tile(64, 32, 4, 2)),
    ),
    "ampere": (
        (Tile(128, 64, 4, 3), Tile(128, 64, 4, 2), Tile(64, 64, 4, 2)),
        (Tile(128, 64, 8, 2), Tile(64, 64, 4, 2), Tile(64, 32, 4, 2)),
        (Tile(64, 64, 8, 2), Tile(64, 32, 8, 2), Tile(64, 32, 4, 1)),
    ),
    "amd": (
        (Tile(128, 64, 4, 1), Tile(64, 64, 4, 1)),
        (Tile(128, 32, 4, 1), Tile(64, 32, 4, 1)),
        (Tile(64, 32, 4, 1), Tile(32, 16, 4, 1)),
        (Tile(32, 16, 4, 1), Tile(16, 16, 4, 1)),
    ),
    "interpreter": ((Tile(32, 32, 4, 1), Tile(16, 64, 4, 1)),) * 4,
}

KEY_GRADIENT_TILES: dict[MatrixUnit, PreferredTilesByRowSize] = {
    "hopper": (
        (Tile(64, 64, 4, 3), Tile(64, 32, 4, 3), Tile(64, 64, 4, 2)),
        (Tile(64, 64, 4, 2), Tile(64, 32, 4, 3), Tile(128, 64, 8, 3)),
        (Tile(128, 32, 8, 2), Tile(64, 32, 4, 2), Tile(32, 32, 4, 2)),
    ),
    "ampere": (
        (Tile(64, 64, 4, 2), Tile(64, 32, 4, 2)),
        (Tile(64, 32, 4, 2), Tile(64, 32, 4, 1)),
        (Tile(64, 32, 8, 1), Tile(32, 16, 4, 1)),
    ),
    "amd": (
        (Tile(64, 64, 4, 1), Tile(64, 32, 4, 1)),
        (Tile(64, 32, 4, 1), Tile(32, 32, 4, 1)),
        (Tile(32, 16, 4, 1),),
        (Tile(16, 16, 4, 1),),
    ),
    "interpreter": ((Tile(32, 16, 4, 1), Tile(16, 32, 4, 1)),) * 4,
}

QUERY_GRADIENT_TILES: dict[MatrixUnit, PreferredTilesByRowSize] = {
    "hopper": (
        (Tile(64, 64, 4, 3), Tile(64, 64, 4, 2), Tile(128, 64, 8, 4)),
        (Tile(128, 64, 8, 3), Tile(64, 64, 4, 2), Tile(128, 64, 8, 4)),
        (Tile(64, 32, 4, 3), Tile(64, 64, 4, 2), Tile(64, 32, 4, 1)),
    ),
    "ampere": (
        (Tile(64, 64, 4, 2), Tile(64, 32, 4, 2)),
        (Tile(64, 32, 4, 2), Tile(64, 32, 4, 1)),
        (Tile(64, 32, 4, 1), Tile(32, 16, 2, 1)),
    ),
    "amd": (
        (Tile(64, 64, 4, 1), Tile(64, 32, 4, 1)),
        (Tile(64, 32, 4, 1), Tile(32, 32, 2, 1)),
        (Tile(32, 16, 2, 1),),
        (Tile(16, 16, 1, 1),),
    ),
    "interpreter": ((Tile(32, 32, 2, 1), Tile(16, 64, 1, 1)),) * 4,
}

# float32 is multiplied in three products of operands split in two. They take the fewest registers if the warps of a
# program share the streamed rows, as in tiles that stream more rows than they keep.
FORWARD_TILES["float32"] = (
    (Tile(32, 64, 4, 1), Tile(32, 128, 8, 1)),
    (Tile(32, 64, 4, 1), Tile(32, 64, 8, 1)),
    (Tile(32, 64, 8, 1), Tile(16, 64, 4, 1)),
    (Tile(16, 64, 8, 1), Tile(16, 32, 4, 1)),
)
KEY_GRADIENT_TILES["float32"] = (
    (Tile(32, 64, 4, 1), Tile(32, 64, 8, 1)),
    (Tile(32, 64, 8, 1), Tile(16, 64, 4, 1)),
    (Tile(16, 64, 8, 1), Tile(16, 32, 4, 1)),
    (Tile(16, 64, 8, 1), Tile(16, 32, 4, 1)),
)
QUERY_GRADIENT_TILES["float32"] = (
    (Tile(32, 64, 8, 1), Tile(32, 32, 2, 1)),
    (Tile(32, 64, 8, 1), Tile(16, 32, 4, 1)),
    (Tile(32, 64, 8, 1), Tile(16, 64, 8, 1)),
    (Tile(16, 64, 8, 1), Tile(16, 32, 4, 1)),
)
FORWARD_TILES["hopper, float32"] = (
    (Tile(64, 64, 4, 1), Tile(128, 64, 8, 1)),
    (Tile(64, 64, 4, 1), Tile(128, 64, 8, 1), Tile(64, 64, 4, 2)),
    (Tile(128, 64, 8, 1), Tile(128, 32, 8, 1), Tile(64, 32, 4, 1), Tile(32, 64, 8, 1)),
    FORWARD_TILES["float32"][3],
)
KEY_GRADIENT_TILES["hopper, float32"] = (
    (Tile(64, 64, 4, 1), Tile(64, 32, 4, 2)),
    (Tile(128, 32, 8, 1), Tile(64, 64, 4, 1), Tile(64, 32, 4, 2)),
    (Tile(32, 32, 4, 1), *KEY_GRADIENT_TILES["float32"][2]),
    KEY_GRADIENT_TILES["float32"][3],
)
QUERY_GRADIENT_TILES["hopper, float32"] = (
    (Tile(64, 64, 4, 1), Tile(64, 32, 4, 2)),
    (Tile(64, 64, 4, 1), Tile(32, 64, 8, 1)),
    (*QUERY_GRADIENT_TILES["float32"][2], Tile(64, 64, 4, 1)),
    QUERY_GRADIENT_TILES["float32"][3],
)

# Without the matrix unit a thread holds whole rows of both operands of a product. With head dimensions 64 and 128 these
# were measured on an H200, where some that spill up to 170 bytes are faster than smaller ones that do not spill.
FORWARD_TILES["no unit"] = ((Tile(32, 64, 8, 1), Tile(16, 64, 8, 1)),) * 3 + (FORWARD_TILES["float32"][3],)
KEY_GRADIENT_TILES["no unit"] = (
    (Tile(16, 64, 8, 1), Tile(16, 32, 4, 1)),
    (Tile(16, 64, 8, 1), Tile(16, 32, 4, 1)),
    (Tile(16, 16, 4, 1), Tile(32, 64, 8, 1)),
    KEY_GRADIENT_TILES["float32"][3],
)
QUERY_GRADIENT_TILES["no unit"] = ((Tile(32, 64, 8, 1), Tile(16, 64, 8, 1)),) * 3 + (
    QUERY_GRADIENT_TILES["float32"][3],
)

# Blackwell's matrix unit keeps accumulators in tensor memory; only the forward pass of long rows has fewer registers.
KEY_GRADIENT_TILES["blackwell"], QUERY_GRADIENT_TILES["blackwell"] = (
    KEY_GRADIENT_TILES["hopper"],
    QUERY_GRADIENT_TILES["hopper"],
)
FORWARD_TILES["blackwell"] = (*FORWARD_TILES["hopper"][:2], (Tile(128, 32, 8, 3), Tile(64, 32, 4, 2)))

PreferredTileOverrides = dict[tuple[PassName, MatrixUnit], dict[int, tuple[Tile, ...]]]

# Preferred tiles by the size of rows, as above, if segment ids or positions are loaded too.
SEGMENT_OR_POSITION_TILES: PreferredTileOverrides = {
    ("forward", "ampere"): {2: (Tile(64, 32, 8, 2),)},
    ("forward", "float32"): {1: (Tile(32, 64, 8, 1),), 2: (Tile(16, 64, 8, 1),)},
    ("forward", "hopper, float32"): {2: (Tile(16, 64, 8, 1),)},
    ("keys", "ampere"): {1: (Tile(32, 64, 8, 2),)},
    ("keys", "hopper"): {1: (Tile(64, 32, 4, 3),)},
    ("keys", "hopper, float32"): {2: KEY_GRADIENT_TILES["float32"][2]},
    ("queries", "ampere"): {2: (Tile(64, 16, 4, 3), Tile(16, 64, 8, 1))},
    ("queries", "hopper"): {2: (Tile(64, 16, 4, 3),)},
    ("queries", "hopper, float32"): {1: (Tile(32, 64, 8, 1),)},
}
# Preferred tiles if more is computed per score: with a soft cap, bias, mask or dropout.
MODIFIED_SCORE_TILES: PreferredTileOverrides = {
    ("forward", "hopper"): {2: (Tile(128, 32, 8, 3),)},
    ("forward", "hopper, float32"): {2: (Tile(32, 64, 8, 1),)},
    ("forward", "ampere"): {0: (Tile(64, 32, 4, 3),), 2: (Tile(64, 32, 8, 2),)},
    ("forward", "amd"): {0: (Tile(64, 64, 4, 1),)},
    ("keys", "hopper"): {0: (Tile(64, 32, 4, 3),), 1: (Tile(64, 32, 4, 3),)},
    ("keys", "hopper, float32"): {0: (Tile(64, 32, 4, 2),), 2: KEY_GRADIENT_TILES["float32"][2]},
    ("keys", "blackwell"): {0: (Tile(64, 32, 4, 3),), 1: (Tile(64, 32, 4, 3),)},
    ("keys", "float32"): {1: (Tile(16, 64, 8, 1),)},
    ("keys", "ampere"): {0: (Tile(32, 64, 4, 2),), 1: (Tile(32, 64, 8, 2),)},
    ("keys", "amd"): {0: (Tile(64, 32, 4, 1),)},
    ("queries", "ampere"): {0: (Tile(64, 32, 4, 2),), 2: (Tile(64, 16, 4, 3), Tile(16, 64, 8, 1))},
    ("queries", "hopper"): {2: (Tile(64, 16, 4, 3),)},
    ("queries", "hopper, float32"): {1: (Tile(32, 64, 8, 1),)},
}

TILES_OF_PASS: dict[PassName, dict[MatrixUnit, PreferredTilesByRowSize]] = {
    "forward": FORWARD_TILES,
    "keys": KEY_GRADIENT_TILES,
    "queries": QUERY_GRADIENT_TILES,
}


def heuristic(record: TiledAttention, device: DeviceInfo, direction: Direction) -> TritonForward | TritonBackward:
    """Returns the configuration for a record on a device, not measured."""
    return candidates(record, device, direction)[0]


def candidates(
    record: TiledAttention, device: DeviceInfo, direction: Direction
) -> tuple[TritonForward, ...] | tuple[TritonBackward, ...]:
    """Returns configurations worth measuring for a record on a device, the most likely first."""
    if direction == "forward":
        return tuple(dict.fromkeys(_forward_config(record, tile) for tile in _fitting_tiles(record, device, "forward")))
    keys, queries = _fitting_tiles(record, device, "keys"), _fitting_tiles(record, device, "queries")
    pairs = [(tile, queries[0]) for tile in keys] + [(keys[0], tile) for tile in queries[1:]]
    return tuple(dict.fromkeys(_backward_config(record, *pair) for pair in pairs))


def forward_tile(params: TritonForward) -> Tile:
    """Returns the tile of a forward configuration.

    Raises:
        ValueError: A field has a value that no kernel can be compiled with.
    """
    _check_config(params, "")
    return Tile(params.block_q, params.block_kv, params.num_warps, params.num_stages)


def backward_tiles(params: TritonBackward) -> tuple[Tile, Tile]:
    """Returns the tiles of a backward configuration: of the programs that accumulate for keys, and for queries.

    Raises:
        ValueError: A field has a value that no kernel can be compiled with.
    """
    dkv, dq = params.dkv, params.dq
    _check_config(dkv, "dkv.")
    _check_config(dq, "dq.")
    return (
        Tile(dkv.block_kv, dkv.block_q, dkv.num_warps, dkv.num_stages),
        Tile(dq.block_q, dq.block_kv, dq.num_warps, dq.num_stages),
    )


def _check_config(params: TritonForward | GradientTile, field_prefix: str) -> None:
    for field in dataclasses.fields(params):
        name, value = field.name, getattr(params, field.name)
        minimum = 16 if name.startswith("block") else 1
        if value < minimum or (name != "num_stages" and value & (value - 1)):
            requirement = "at least 1" if name == "num_stages" else f"a power of two of at least {minimum}"
            raise ValueError(f"cfg: got {field_prefix}{name}={value}, the triton kernels want {requirement}")


def matrix_unit(device: DeviceInfo, record: TiledAttention) -> MatrixUnit:
    """Returns the kind of matrix unit that multiplies a record's operands."""
    if device.platform == "cpu":
        return "interpreter"
    architecture, is_float32 = gpu_of(device).architecture, jnp.dtype(record.query.dtype).itemsize > 2
    if architecture == "cdna3":
        return "amd"
    if is_float32 and record.precision == lax.Precision.HIGHEST:
        return "no unit"
    if architecture == "hopper":
        return "hopper, float32" if is_float32 else "hopper"
    if is_float32:
        return "float32"
    return "blackwell" if architecture == "blackwell" else "ampere"  # Ada's matrix unit is Ampere's


def _fitting_tiles(record: TiledAttention, device: DeviceInfo, pass_name: PassName) -> tuple[Tile, ...]:
    """Returns the tiles of a preference that fit the device's shared memory; the last one if none is known to."""
    itemsize = jnp.dtype(record.query.dtype).itemsize
    row_size_bytes = itemsize * longest_padded_row(record)
    matrix_unit_name, size_class = matrix_unit(device, record), min(3, max(0, (row_size_bytes // 128).bit_length() - 1))
    unit_exceptions = SEGMENT_OR_POSITION_TILES if has_segments_or_positions(record) else {}
    if has_modified_scores(record):
        unit_exceptions = MODIFIED_SCORE_TILES
    exceptional_tiles = unit_exceptions.get((pass_name, matrix_unit_name), {}).get(size_class, ())
    usual_tiles = TILES_OF_PASS[pass_name][matrix_unit_name][size_class]
    shared_memory_bytes = gpu_of(device).shared_memory
    row_budget_bytes = shared_memory_bytes - (0 if pass_name == "forward" else 4 * KIBI)
    tiles = dict.fromkeys((*exceptional_tiles, *usual_tiles))
    fitting = [x for x in tiles if shared_memory_row_bytes(record, pass_name, x) <= row_budget_bytes]
    if matrix_unit_name in ("hopper", "blackwell"):  # all stages are in shared memory, which leaves the least room
        fitting = [
            tile
            for tile in fitting
            if shared_memory_row_bytes(record, pass_name, tile) + shared_memory_pair_bytes(record, tile)
            <= shared_memory_bytes
        ]
    fitting = fitting or [usual_tiles[-1]]
    stationary_rows = fitting[0].stationary_rows
    # If no tile is on a causal diagonal, long tiles are faster.
    if (
        pass_name == "forward"
        and itemsize <= 2
        and unit_exceptions is not MODIFIED_SCORE_TILES
        and not exceptional_tiles
        and attends_to_everything(record)
    ):
        fitting.sort(key=lambda tile: 0 if tile.stationary_rows != stationary_rows else -tile.streamed_rows)
    return tuple(fitting)


def _forward_config(record: TiledAttention, tile: Tile) -> TritonForward:
    queries = _clamp_block_size(tile.stationary_rows, record.query.shape[1])
    keys = _clamp_block_size(tile.streamed_rows, record.key.shape[1])
    return TritonForward(block_q=queries, block_kv=keys, num_warps=tile.warps, num_stages=tile.stages)


def _backward_config(record: TiledAttention, key_gradient_tile: Tile, query_gradient_tile: Tile) -> TritonBackward:
    t, s = record.query.shape[1], record.key.shape[1]
    stationary_rows, streamed_rows = (
        _clamp_block_size(query_gradient_tile.stationary_rows, t),
        _clamp_block_size(query_gradient_tile.streamed_rows, s),
    )
    return TritonBackward(
        dkv=GradientTile(
            block_q=_clamp_block_size(key_gradient_tile.streamed_rows, t),
            block_kv=_clamp_block_size(key_gradient_tile.stationary_rows, s),
            num_warps=key_gradient_tile.warps,
            num_stages=key_gradient_tile.stages,
        ),
        dq=GradientTile(
            block_q=stationary_rows,
            block_kv=streamed_rows,
            num_warps=query_gradient_warps(stationary_rows, streamed_rows),
            num_stages=query_gradient_tile.stages,
        ),
    )


def query_gradient_warps(stationary_rows: int, streamed_rows: int) -> int:
    """Returns the warps of programs that accumulate for queries: one per 16 queries, or per 8 keys if the tile has
    more keys.
    """
    return stationary_rows // 16 if stationary_rows >= streamed_rows else streamed_rows // 8


def _clamp_block_size(block: int, length: int) -> int:
    """Returns a block size no longer than a length needs; matrix products need powers of two from 16 on."""
    return min(block, pad_to_dot_size(length))
