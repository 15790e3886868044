"""Tiles, splits and stages of the quantised matmul's kernels: the heuristic, and candidates worth measuring."""

import dataclasses
from typing import Any

from ejkernel.families.quantized_matmul import QuantizedMatmul, columns
from ejkernel.ops.config.params import Direction
from ejkernel.ops.device import DeviceInfo
from ejkernel_cuda.dense_decode.splits import CHIPS

TILES = (256, 128)
"""Columns of a block; integers of 4 bits alone have both."""
WARPS = 8
"""Warps of a block."""
MAX_SPLITS = 8
"""Blocks of a cluster on every chip that has clusters."""
STAGES = (3, 4)
"""Pipeline stages: three at least, of which one is multiplied, one has its scales prepared, and one is copied."""
OVERHEAD = 384
"""What a block costs beside its share of k, in elements of k: it starts, fills its pipeline, and adds up sums."""
PACE = {1: 0.8, 2: 1.0, 3: 1.1}
"""Speed of a multiprocessor with so many blocks: while warps of one wait, those of others run."""
CLUSTERED = {1: 1.0, 2: 1.0, 3: 0.89, 4: 0.93, 5: 0.89, 6: 0.88, 7: 0.84, 8: 0.9}
"""Part of the chip that clusters of so many blocks can fill: all blocks of one are in one of its parts (H200)."""
CANDIDATES = 12
"""Configurations worth measuring: those that should take the least time."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class QuantizedTiles:
    """Configuration of the kernel.

    Attributes:
        block_n: Columns of a block: 256, or 128 of integers of 4 bits.
        splits: Split-K: blocks that share the contracted elements of the same columns.
        num_stages: Pipeline stages of the copies to shared memory.
        cluster: Whether the splits are a cluster, which adds up their sums; otherwise XLA does.
    """

    block_n: int
    splits: int
    num_stages: int
    cluster: bool


FACES = {"splits": "splits", "num_stages": "num_stages"}
"""Fields of the public configuration and what they set here."""


def heuristic(record: QuantizedMatmul, device: DeviceInfo, direction: Direction) -> QuantizedTiles:
    """The configuration that should take the least time."""
    return candidates(record, device, direction)[0]


def candidates(record: QuantizedMatmul, device: DeviceInfo, direction: Direction) -> tuple[QuantizedTiles, ...]:
    """Configurations worth measuring, from the fastest by rule."""
    capability = device.compute_capability or 9.0
    # Clusters are in the code for 9.0 and for 12.0. Other chips run what is compiled for 8.0.
    cluster = capability == 9.0 or capability >= 12.0
    chip = CHIPS.get(capability, CHIPS[9.0])
    found: list[tuple[float, QuantizedTiles]] = []
    for block_n in TILES if attributes(record)["code"] == 0 else TILES[:1]:
        for stages in STAGES:
            for splits in range(1, MAX_SPLITS + 1):
                tiles = QuantizedTiles(
                    block_n=block_n, splits=splits, num_stages=stages, cluster=cluster and splits > 1
                )
                found.append((cost(record, tiles, chip), tiles))
    found.sort(key=lambda one: one[0])
    return tuple(tiles for time, tiles in found[:CANDIDATES] if time < float("inf"))


def cost(record: QuantizedMatmul, tiles: QuantizedTiles, chip: tuple[int, int]) -> float:
    """Time by rule, in elements that a block contracts; infinite where a block does not fit.

    Wave quantisation: as many blocks as the chip holds run at a time, and a partly empty wave takes as long as a full
    one.

    Args:
        record: The canonical arguments.
        tiles: The configuration.
        chip: Multiprocessors, and KiB of shared memory of each.
    """
    multiprocessors, shared = chip
    resident = min(most_resident(record), shared * 1024 // (block_bytes(record, tiles) + 1024))
    if not resident:
        return float("inf")
    blocks = -(-columns(record) // tiles.block_n) * tiles.splits
    depth = stage_depth(record, tiles.block_n)
    stages = -(-record.x.shape[1] // depth)
    share = -(-stages // tiles.splits) * depth
    slots = int(multiprocessors * resident * (CLUSTERED[tiles.splits] if tiles.cluster else 1.0))
    waves, last = divmod(blocks, slots)
    work = (share + OVERHEAD) * tiles.block_n
    held = -(-last // multiprocessors)
    return work * (waves * resident / PACE[resident] + (held / PACE[held] if held else 0.0))


def row_tiles(record: QuantizedMatmul) -> int:
    """Tiles of 8 rows, of which the kernels have 1, 2 and 8."""
    tiles = -(-record.x.shape[0] // 8)
    return tiles if tiles <= 2 else 8


def most_resident(record: QuantizedMatmul) -> int:
    """Blocks of a multiprocessor, as the launch bounds of csrc/quantized_matmul.cuh have it."""
    return 1 if row_tiles(record) > 2 else 2


def warps_k(record: QuantizedMatmul, block_n: int) -> int:
    """Warps of a block that share the contracted elements of a stage."""
    return WARPS * (32 if record.transpose else 64) // block_n


def stage_depth(record: QuantizedMatmul, block_n: int) -> int:
    """Contracted elements of a stage: 64 a warp, or those of 64 bytes of a transposed row."""
    return warps_k(record, block_n) * (512 // record.format.bits if record.transpose else 64)


def block_bytes(record: QuantizedMatmul, tiles: QuantizedTiles) -> int:
    """Bytes of shared memory of a block, as csrc/quantized_matmul.cuh counts them."""
    form, rows, width = record.format, 8 * row_tiles(record), tiles.block_n
    scale = scale_bytes(record)
    depth, shares = stage_depth(record, width), warps_k(record, width)
    if record.transpose:
        warp_depth = depth // shares
        stage = width * shares * 64 + shares * rows * (2 * warp_depth + 64)
        stage += 2 * width * max(4, depth // form.group_size * scale)
        extra = 0
    else:
        stage = depth * width * form.bits // 8 + rows * (2 * depth + 16)
        stage += 2 * depth * (-(-(width // form.group_size * scale) // 4) * 4 + 8)
        stage = -(-stage // 16) * 16
        extra = 2 * (depth + 4) * ((width - 1) // form.group_size + 2) * 8
    ring = max(stage * tiles.num_stages, shares * rows * (width + 4) * 4)
    return ring + extra + 64


def scale_bytes(record: QuantizedMatmul) -> int:
    """Bytes of a stored scale."""
    return {"affine": 2, "nf4": 4}.get(record.format.mode, 1)


def attributes(record: QuantizedMatmul) -> dict[str, Any]:
    """What the kernels call a format: a kind of code, and one of scales."""
    mode, bits = record.format.mode, record.format.bits
    code = (0 if bits == 4 else 1) if mode == "affine" else 2 if bits == 4 else 3
    scale = {"affine": 0, "nf4": 1}.get(mode, 2 if mode.startswith("mx") else 3)
    return {"code": code, "scale": scale, "log_group": record.format.group_size.bit_length() - 1}
