"""Tile sizes, and the shared memory that they take."""

import dataclasses
from typing import Any

import jax.numpy as jnp

from ejkernel.arithmetic import cdiv
from ejkernel.families.tiled_attention import TiledAttention
from ejkernel.ops.device import DeviceInfo
from ejkernel.ops.params import Direction, given_values
from ejkernel_pallas.gpu.hopper.sizes import SHARED_MEMORY, SWIZZLE_COLUMNS, WGMMA_M
from ejkernel_pallas.gpu.tiled_attention.spec import HopperSpec

WARPGROUPS = 2
"""Consumer warpgroups of a backward pass."""
RESERVE = 4 * 1024
"""Bytes of shared memory that a forward pass leaves for barriers and for Mosaic."""
BARRIERS = 512
"""Bytes of shared memory that a backward pass leaves for barriers and for Mosaic."""
ALIGNMENT = 1024
"""Alignment in bytes of the arrays that Mosaic puts into shared memory."""
REGISTERS = {1: (240, 24), 2: (240, 24), 3: (160, 32)}
"""By number of consumer warpgroups: registers of their threads, and of the producer's. A multiprocessor has 65536."""
PAGED_REGISTERS = (232, 40)
"""The same for two consumer warpgroups and keys that lie in pages: the producer needs more to find them."""


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
        """Returns queries a block."""
        return self.warpgroups * WGMMA_M

    def needs_masks(self, spec: HopperSpec) -> bool:
        """Returns whether some tile of scores needs masking."""
        return spec.masked or spec.keys % self.keys != 0

    def has_uneven_ends(self, spec: HopperSpec) -> bool:
        """Returns whether the first warpgroup of some block has keys before the last of the block's, by whole tiles."""
        if spec.right is None or spec.pattern or spec.pages:
            return False
        ends = ((row + spec.right, row + self.queries - WGMMA_M + spec.right) for row in self._last_rows())
        return any(first // self.keys != last // self.keys for first, last in ends)

    def has_idle_warpgroups(self, spec: HopperSpec) -> bool:
        """Returns whether warpgroups of a head's last block that have no queries leave its keys to the others.

        On an H200 it makes 2048 tokens with head size 64 up to 2% faster where there is a mask; without, it costs 1%.
        """
        return spec.masked and not spec.pattern and 0 < spec.queries % self.queries <= self.queries - WGMMA_M

    def _last_rows(self) -> range:
        """Returns the last rows of first warpgroups, of as many blocks as there are places in a tile of keys."""
        return range(WGMMA_M - 1, self.queries * self.keys, self.queries)

    def registers(self, spec: HopperSpec) -> tuple[int, int]:
        """Registers of a thread of a consumer warpgroup, and of the producer warpgroup."""
        return PAGED_REGISTERS if spec.pages else REGISTERS[self.warpgroups]


def forward_bytes(tile: ForwardTile, spec: HopperSpec) -> int:
    """Returns shared memory of the forward kernel."""
    itemsize = jnp.dtype(jnp.bfloat16).itemsize
    matrices = tile.buffers * tile.queries * spec.head_dim + tile.stages * tile.keys * (spec.head_dim + spec.value_dim)
    numbers = (tile.stages + 1) * tile.keys  # of queries and keys, for dropout
    return matrices * itemsize + (4 * tile.buffers * tile.queries + numbers) * 4


@dataclasses.dataclass(frozen=True)
class BackwardTile:
    """How the backward kernel cuts its work.

    Attributes:
        size: Head dimension of queries and keys.
        value_size: Head dimension of values.
        keys: Keys whose dk and dv a block accumulates, or the two blocks of a cluster.
        queries: Queries of a step.
        depth: Tiles of queries in shared memory.
    """

    size: int
    value_size: int
    keys: int
    queries: int
    depth: int

    @property
    def wide(self) -> bool:
        """Returns whether a warpgroup sums up one gradient of 64 keys, and not both."""
        return self.size + self.value_size > 5 * SWIZZLE_COLUMNS

    @property
    def register_bound(self) -> bool:
        """Returns whether both gradients of 64 keys leave a warpgroup no registers for dq beside gradients of weights.

        Then its part of dq is made once those are narrow, and there is no room in shared memory for a second tile of
        cotangents, nor for ids of keys and dropout's numbers.
        """
        return not self.wide and self.size + self.value_size > 4 * SWIZZLE_COLUMNS

    @property
    def part(self) -> int:
        """Returns columns of keys that lie together in shared memory: those of a warpgroup's part of dq."""
        return self.size // 2 if self.register_bound else SWIZZLE_COLUMNS

    @property
    def swizzle(self) -> int:
        """Bytes of a row of queries, keys and gradients of scores that lie together: a part is whole ones of them."""
        return 128 if self.part % SWIZZLE_COLUMNS == 0 else 64

    def line(self, name: str) -> int:
        """Returns bytes of a row of an array that lie together in shared memory."""
        return self.swizzle if name in ("q", "k", "ds") else 128

    @property
    def members(self) -> int:
        """Returns blocks that own `keys` together, as a cluster."""
        return 2 if self.wide else 1

    @property
    def owners(self) -> int:
        """Returns tiles of 64 keys a block."""
        return self.keys // (WGMMA_M * self.members)

    @property
    def parts(self) -> int:
        """Returns parts of a row of keys."""
        return self.size // self.part

    @property
    def shared_parts(self) -> int:
        """Returns parts of a row of the other member's keys: those that a block's share of dq is made of."""
        return self.parts // 2 if self.wide else 0

    @property
    def stages(self) -> dict[str, int]:
        """Returns tiles of queries, and of their cotangents, in shared memory."""
        return {"q": self.depth, "do": 1 if self.wide or self.register_bound else 2}

    @property
    def pieces(self) -> int:
        """Pieces of a step's part of dq that are added in order by themselves: one per warpgroup, or one of both."""
        return WARPGROUPS if self.wide else 1

    @property
    def adders(self) -> int:
        """Warps that add to device memory, one piece after the other: an addition takes longer than a step may."""
        return 3 if self.wide else 2

    @property
    def makers(self) -> int:
        """Returns warpgroups that make a piece, 64 rows each."""
        return WARPGROUPS // self.pieces

    @property
    def strips(self) -> int:
        """Returns strips that a warpgroup hands its share over in, one after the other.

        Device memory takes about 16 bytes of sums a cycle from a multiprocessor: what is handed over at a time should
        be gone before there is more.
        """
        return 2 if self.wide else 1

    @property
    def dq_columns(self) -> int:
        """Returns columns of a strip."""
        return self.size * self.queries // (WGMMA_M * WARPGROUPS * self.strips * self.members)

    def dq_start(self, member: Any, maker: int, strip: int) -> tuple[int, Any]:
        """Returns first row and column of a strip."""
        if self.wide:
            return 0, ((member * WARPGROUPS + maker) * self.strips + strip) * self.dq_columns
        row, part = self.dq_half(maker)
        return row * WGMMA_M, part * self.dq_columns

    def dq_half(self, warpgroup: Any) -> tuple[Any, Any]:
        """Returns which 64 queries, and which part of a row of keys, a warpgroup's share is of where two have one."""
        return (warpgroup, 0) if self.queries == WARPGROUPS * WGMMA_M else (0, warpgroup)

    @property
    def ping_pongs_scores(self) -> bool:
        """Returns whether ping-pong scheduling covers the products of scores, too.

        On an H200 it makes a causal backward pass 3% faster with these tiles, and costs as much with larger ones.
        """
        return self.queries == WGMMA_M

    @property
    def consumer_registers(self) -> int:
        """Registers of a thread of a consumer warpgroup."""
        return REGISTERS[WARPGROUPS][0]

    @property
    def producer_registers(self) -> int:
        """Registers of a thread of the producer warpgroup."""
        return REGISTERS[WARPGROUPS][1]

    def row_bytes(self, spec: HopperSpec) -> int:
        """Returns bytes of a query in device memory, with its cotangent and, in float32, its gradient."""
        narrow, single = jnp.dtype(spec.dtype).itemsize, jnp.dtype(jnp.float32).itemsize
        return self.size * (narrow + single) + self.value_size * narrow

    def extras(self, spec: HopperSpec, name: str) -> tuple[str, ...]:
        """Returns arrays with one number for every row that come along with an array, to shared memory.

        Pairs of blocks and register-bound ones have no room for ids of keys, and for dropout's numbers.
        """
        roomy = not self.wide and not self.register_bound
        if name == "q":
            return "shift", "delta", *["q_ids"] * spec.segments, *["q_numbers"] * (spec.has_dropout and roomy)
        if name == "k" and roomy:
            return *["k_ids"] * spec.segments, *["k_numbers"] * spec.has_dropout
        return ()

    def needs_masks(self, spec: HopperSpec) -> bool:
        """Whether some tile of scores needs masking, or may: a register-bound tile has loops that mask in any case.

        With the loop of full tiles alone, ptxas (CUDA 13.0) serialises the products of register-bound tiles.
        """
        return spec.masked or spec.keys % self.keys != 0 or self.register_bound


def backward_bytes(tile: BackwardTile, spec: HopperSpec) -> int:
    """Returns shared memory of the backward kernel."""
    itemsize = jnp.dtype(spec.dtype).itemsize
    accumulated = (
        WGMMA_M * (tile.owners * (spec.head_dim + spec.value_dim) + tile.shared_parts * SWIZZLE_COLUMNS) * itemsize
    )
    stages = tile.stages
    streamed = (stages["q"] * spec.head_dim + stages["do"] * spec.value_dim) * tile.queries * itemsize
    ds, dq = 2 * tile.keys * tile.queries * itemsize, WARPGROUPS * WGMMA_M * tile.dq_columns * 4
    extras = [tile.depth * tile.queries] * len(tile.extras(spec, "q"))
    packed = tile.wide or tile.register_bound
    small = [2 * tile.depth * tile.queries, (tile.depth + 1) * tile.queries] if packed else [1, *extras]
    small += [tile.keys] * len(tile.extras(spec, "k"))
    return accumulated + streamed + ds + dq + sum(cdiv(words * 4, ALIGNMENT) * ALIGNMENT for words in small)


VALUES = {64: (64,), 128: (128,), 192: (128,), 256: (256,)}
"""Head dimensions of values by those of queries and keys, as far as the kernels were checked on a chip."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class HopperForward:
    """The configuration of the forward kernel.

    Attributes:
        block_q: Queries a block, 64 for each warpgroup that multiplies.
        block_kv: Keys a step.
        stages: Tiles of keys, and of values, in shared memory.
    """

    block_q: int
    block_kv: int
    stages: int


@dataclasses.dataclass(frozen=True, kw_only=True)
class HopperBackward:
    """The configuration of the backward kernel.

    Attributes:
        block_kv: Keys that a block owns, or a pair of blocks.
        block_q: Queries a step.
        stages: Tiles of queries in shared memory.
    """

    block_kv: int
    block_q: int
    stages: int


PUBLIC_FIELDS = {"q_blocksize": "block_q", "kv_blocksize": "block_kv", "num_stages": "stages"}
"""Public configuration field -> field of these."""

FORWARD: dict[int, tuple[tuple[int, int, int], ...]] = {
    64: ((192, 128, 2), (128, 128, 3), (128, 192, 2)),
    128: ((128, 128, 2), (192, 64, 3)),
    192: ((128, 128, 2), (128, 64, 3)),
    256: ((128, 64, 2),),
}
"""Queries, keys and stages by head dimension of queries and keys, the best first."""
BACKWARD: dict[int, tuple[tuple[int, int, int], ...]] = {
    64: ((128, 128, 3), (128, 128, 2)),
    128: ((128, 64, 3), (128, 64, 2)),
    192: ((128, 64, 2),),
    256: ((128, 64, 2),),
}
"""Keys, queries and stages by head dimension of queries and keys, the best first."""


def heuristic(record: TiledAttention, device: DeviceInfo, direction: Direction) -> HopperForward | HopperBackward:
    """Returns the configuration of a call without a chosen or tuned one."""
    return candidates(record, device, direction)[0]


def candidates(
    record: TiledAttention, device: DeviceInfo, direction: Direction
) -> tuple[HopperForward, ...] | tuple[HopperBackward, ...]:
    """Returns the configurations worth measuring."""
    size = record.query.shape[3]
    if direction == "forward":
        return tuple(HopperForward(block_q=q, block_kv=k, stages=n) for q, k, n in FORWARD[size])
    return tuple(HopperBackward(block_kv=k, block_q=q, stages=n) for k, q, n in BACKWARD[size])


def forward_tile(params: HopperForward, spec: HopperSpec) -> ForwardTile:
    """Returns the tile of a forward configuration.

    Raises:
        ValueError: Something is missing, is nothing that a kernel can be compiled with, or does not fit.
    """
    warpgroups, keys, stages = _checked(params, "block_q", "block_kv", "stages")
    fitting = [ForwardTile(warpgroups, keys, stages, n) for n in (2, 1)]
    fitting = [tile for tile in fitting if forward_bytes(tile, spec) <= SHARED_MEMORY - RESERVE]
    if not fitting:
        raise ValueError(f"cfg: {given_values(params)} takes more than the {SHARED_MEMORY} bytes of shared memory")
    return fitting[0]


def backward_tile(params: HopperBackward, spec: HopperSpec) -> BackwardTile:
    """Returns the tile of a backward configuration.

    Raises:
        ValueError: As `forward_tile`.
    """
    warpgroups, queries, stages = _checked(params, "block_kv", "block_q", "stages")
    tile = BackwardTile(spec.head_dim, spec.value_dim, warpgroups * WGMMA_M, queries, stages)
    wanted = BACKWARD[spec.head_dim][0][:2]
    if (tile.keys, tile.queries) != wanted:
        raise ValueError(
            f"cfg: {given_values(params)}: heads of {spec.head_dim} want {wanted[0]} keys and {wanted[1]} queries"
        )
    if backward_bytes(tile, spec) > SHARED_MEMORY - BARRIERS:
        raise ValueError(f"cfg: {given_values(params)} takes more than the {SHARED_MEMORY} bytes of shared memory")
    return tile


def _checked(
    params: HopperForward | HopperBackward, accumulated: str, streamed: str, stages: str
) -> tuple[int, int, int]:
    """Returns warpgroups, rows of a streamed block, and stages."""
    values = {name: getattr(params, name) for name in (accumulated, streamed, stages)}
    wants = {accumulated: "64, 128 or 192", streamed: "64, 128 or 192", stages: "2 or more"}
    for name, value in values.items():
        fine = value is not None and (value >= 2 if name == stages else value in (64, 128, 192))
        if not fine:
            raise ValueError(f"cfg: got {name}={value}, the Mosaic GPU kernels want {wants[name]}")
    return values[accumulated] // WGMMA_M, values[streamed], values[stages]
