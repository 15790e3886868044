"""Tile sizes, and the shared memory that they take."""

import dataclasses

import jax.numpy as jnp

from ejkernel.families.tiled_attention import TiledAttention
from ejkernel.ops.config.params import BwdParams, Direction, FwdParams, given_values
from ejkernel.ops.device import DeviceInfo
from ejkernel_pallas.gpu.tiled_attention.spec import Spec

ROWS = 64
"""Rows of a warpgroup's tile of scores: those of one product instruction."""
SHARED_MEMORY = 227 * 1024
"""Bytes that a block can have on Hopper."""
RESERVE = 4 * 1024
"""Of these, for barriers and for what Mosaic keeps there."""
REGISTERS = {1: (240, 24), 2: (240, 24), 3: (160, 32)}
"""By warpgroups that multiply: registers of their threads, and of those that fetch. A multiprocessor has 65536."""


@dataclasses.dataclass(frozen=True)
class ForwardTile:
    """How the forward kernel cuts its work.

    Attributes:
        warpgroups: Warpgroups that multiply, with 64 queries each.
        keys: Keys a step.
        stages: Tiles of keys, and of values, in shared memory.
        buffers: Tiles of queries in shared memory; with two the next one is fetched early.
    """

    warpgroups: int
    keys: int
    stages: int
    buffers: int

    @property
    def queries(self) -> int:
        """Queries a block."""
        return self.warpgroups * ROWS

    def cuts(self, spec: Spec) -> bool:
        """Whether some tile of scores needs masking."""
        return spec.bounded or spec.keys % self.keys != 0

    @property
    def registers(self) -> int:
        """Of a thread that multiplies."""
        return REGISTERS[self.warpgroups][0]

    @property
    def fetching_registers(self) -> int:
        """Of a thread that fetches."""
        return REGISTERS[self.warpgroups][1]


def forward_bytes(tile: ForwardTile, size: int) -> int:
    """Shared memory of the forward kernel."""
    itemsize = jnp.dtype(jnp.bfloat16).itemsize
    rows = tile.buffers * tile.queries + 2 * tile.stages * tile.keys
    return rows * size * itemsize + (2 * tile.buffers * tile.queries + tile.stages * tile.keys) * 4


@dataclasses.dataclass(frozen=True)
class BackwardTile:
    """How a backward kernel cuts its work.

    Attributes:
        owner: `"keys"` or `"queries"`: what blocks own.
        warpgroups: Warpgroups that multiply, with 64 rows each of what the block owns.
        visit: Rows of a visited tile.
        stages: Visited tiles in shared memory.
    """

    owner: str
    warpgroups: int
    visit: int
    stages: int

    @property
    def own(self) -> int:
        """Rows that a block owns."""
        return self.warpgroups * ROWS

    @property
    def visited(self) -> tuple[str, str]:
        """Arrays that tiles are visited of, in the order in which products want them."""
        return ("q", "do") if self.owner == "keys" else ("k", "v")

    @property
    def owned(self) -> tuple[str, str]:
        """Arrays that tiles are owned of."""
        return ("k", "v") if self.owner == "keys" else ("q", "do")

    @property
    def registers(self) -> int:
        """Of a thread that multiplies."""
        return REGISTERS[self.warpgroups][0]

    @property
    def fetching_registers(self) -> int:
        """Of a thread that fetches."""
        return REGISTERS[self.warpgroups][1]

    def extras(self, spec: Spec, name: str) -> tuple[str, ...]:
        """Arrays with one number for every row that come along with an array."""
        ids = (f"{name}_ids",) if spec.segments and name in ("q", "k") else ()
        return ids + {"q": ("shift",), "do": ("delta",)}.get(name, ())

    def cuts(self, spec: Spec) -> bool:
        """Whether some tile of scores needs masking."""
        keys = self.own if self.owner == "keys" else self.visit
        return spec.bounded or spec.keys % keys != 0


def backward_bytes(tile: BackwardTile, spec: Spec) -> int:
    """Shared memory of a backward kernel."""
    rows, extras = tile.own + tile.stages * tile.visit, 3
    return rows * (2 * spec.size * jnp.dtype(spec.dtype).itemsize + 4 * extras)


READS = frozenset({"q_blocksize", "kv_blocksize", "num_stages", "blocksize_m", "blocksize_n", "blocksize_k"})
"""Names of the configuration fields that the kernels look at."""

FORWARD: dict[int, tuple[tuple[int, int, int], ...]] = {
    64: ((192, 128, 2), (128, 128, 3), (128, 192, 2)),
    128: ((128, 128, 2), (192, 64, 3)),
    256: ((128, 64, 2),),
}
"""Queries, keys and stages by head size, the best first."""
BACKWARD: dict[int, tuple[tuple[int, int, int, int, int, int], ...]] = {
    64: ((128, 64, 3, 128, 128, 2), (192, 64, 3, 192, 64, 3)),
    128: ((128, 64, 2, 128, 128, 2), (128, 64, 3, 128, 64, 3)),
}
"""Owned keys, visited queries and stages; owned queries, visited keys and stages."""


def heuristic(record: TiledAttention, device: DeviceInfo, direction: Direction) -> FwdParams | BwdParams:
    """The configuration when nobody chose one."""
    return candidates(record, device, direction)[0]


def candidates(
    record: TiledAttention, device: DeviceInfo, direction: Direction
) -> tuple[FwdParams, ...] | tuple[BwdParams, ...]:
    """The configurations worth measuring."""
    size = record.query.shape[3]
    if direction == "forward":
        return tuple(FwdParams(q_blocksize=q, kv_blocksize=k, num_stages=n) for q, k, n in FORWARD[size])
    return tuple(
        BwdParams(kv_blocksize=k, q_blocksize=q, num_stages=n, blocksize_m=m, blocksize_n=v, blocksize_k=w)
        for k, q, n, m, v, w in BACKWARD[size]
    )


def forward_tile(params: FwdParams, spec: Spec) -> ForwardTile:
    """The tile of a forward configuration.

    Raises:
        ValueError: Something is missing, is nothing that a kernel can be compiled with, or does not fit.
    """
    warpgroups, keys, stages = _checked(params, "q_blocksize", "kv_blocksize", "num_stages")
    fitting = [ForwardTile(warpgroups, keys, stages, n) for n in (2, 1)]
    fitting = [tile for tile in fitting if forward_bytes(tile, spec.size) <= SHARED_MEMORY - RESERVE]
    if not fitting:
        raise ValueError(f"cfg: {given_values(params)} takes more than the {SHARED_MEMORY} bytes of shared memory")
    return fitting[0]


def backward_tiles(params: BwdParams, spec: Spec) -> tuple[BackwardTile, BackwardTile]:
    """The tiles of a backward configuration: of blocks that own keys, and of blocks that own queries.

    Raises:
        ValueError: As `forward_tile`.
    """
    keys = BackwardTile("keys", *_checked(params, "kv_blocksize", "q_blocksize", "num_stages"))
    queries = BackwardTile("queries", *_checked(params, "blocksize_m", "blocksize_n", "blocksize_k"))
    if max(backward_bytes(tile, spec) for tile in (keys, queries)) > SHARED_MEMORY - RESERVE:
        raise ValueError(f"cfg: {given_values(params)} takes more than the {SHARED_MEMORY} bytes of shared memory")
    return keys, queries


def _checked(params: FwdParams | BwdParams, own: str, visit: str, stages: str) -> tuple[int, int, int]:
    """Warpgroups, visited rows and stages."""
    values = {name: getattr(params, name) for name in (own, visit, stages)}
    wants = {own: "64, 128 or 192", visit: "64, 128 or 192", stages: "2 or more"}
    for name, value in values.items():
        fine = value is not None and (value >= 2 if name == stages else value in (64, 128, 192))
        if not fine:
            raise ValueError(f"cfg: got {name}={value}, the Mosaic GPU kernels want {wants[name]}")
    return values[own] // ROWS, values[visit], values[stages]
