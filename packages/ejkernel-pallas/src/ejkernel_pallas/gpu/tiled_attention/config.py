"""Tile sizes of the tiled-attention kernels, and the shared memory that they take."""

import dataclasses
from typing import Any

import jax.numpy as jnp

from ejkernel.arithmetic import cdiv
from ejkernel.families.tiled_attention import TiledAttention
from ejkernel.ops.device import DeviceInfo
from ejkernel.ops.params import Direction, set_fields_as_text
from ejkernel_pallas.gpu.hopper.sizes import SHARED_MEMORY_BYTES, SWIZZLE_COLUMNS, WGMMA_M
from ejkernel_pallas.gpu.tiled_attention.spec import SPLIT_BARRIER_BYTES, HopperSpec

BACKWARD_CONSUMER_WARPGROUPS = 2
"""Consumer warpgroups of the backward kernel."""
FORWARD_RESERVED_SMEM_BYTES = 4 * 1024
"""Bytes of shared memory reserved for mbarriers and Mosaic in the forward kernel."""
BACKWARD_RESERVED_SMEM_BYTES = 512
"""Bytes of shared memory reserved for mbarriers and Mosaic in the backward kernel."""
SMEM_ALIGNMENT_BYTES = 1024
"""Alignment in bytes of the arrays that Mosaic allocates in shared memory."""
REGISTERS_BY_CONSUMER_WARPGROUPS = {1: (240, 24), 2: (240, 24), 3: (160, 32)}
"""Registers per thread of consumers and of the producer, by the number of consumer warpgroups. A multiprocessor has
65536.
"""
PAGED_REGISTERS_PER_THREAD = (232, 40)
"""The same for two consumer warpgroups and keys in pages: the producer needs more registers to look pages up."""


@dataclasses.dataclass(frozen=True)
class ForwardTile:
    """The tile sizes of the forward kernel.

    Attributes:
        consumer_warpgroups: Consumer warpgroups, with 64 queries each.
        block_kv: Keys per step.
        kv_stages: Tiles of keys, and of values, in shared memory.
        query_buffers: Tiles of queries in shared memory; with two the next one is copied early.
    """

    consumer_warpgroups: int
    block_kv: int
    kv_stages: int
    query_buffers: int

    @property
    def block_q(self) -> int:
        """Returns queries per block."""
        return self.consumer_warpgroups * WGMMA_M

    def needs_masks(self, spec: HopperSpec) -> bool:
        """Returns whether some tile of scores needs masking."""
        return spec.may_mask_pairs or spec.kv_len % self.block_kv != 0

    def first_warpgroup_may_end_early(self, spec: HopperSpec) -> bool:
        """Returns whether, in some block, the first warpgroup's keys end at least a tile before the last keys of the
        block.
        """
        if spec.right_window is None or spec.has_block_lists or spec.keys_in_pages or spec.has_positions:
            return False
        ends = (
            (row + spec.right_window, row + self.block_q - WGMMA_M + spec.right_window)
            for row in self._last_rows_of_first_warpgroups()
        )
        return any(first // self.block_kv != last // self.block_kv for first, last in ends)

    def idle_warpgroups_skip_keys(self, spec: HopperSpec) -> bool:
        """Returns whether warpgroups without queries, in a head's last block, skip its keys.

        On an H200 it makes 2048 tokens with head dimension 64 up to 2% faster with a mask; without, it costs 1%.
        """
        return (
            spec.may_mask_pairs and not spec.has_block_lists and 0 < spec.q_len % self.block_q <= self.block_q - WGMMA_M
        )

    def _last_rows_of_first_warpgroups(self) -> range:
        """Returns the last rows of first warpgroups, for as many blocks as there are offsets in a tile of keys."""
        return range(WGMMA_M - 1, self.block_q * self.block_kv, self.block_q)

    def registers_per_thread(self, spec: HopperSpec) -> tuple[int, int]:
        """Returns registers per thread of a consumer warpgroup, and of the producer warpgroup."""
        return (
            PAGED_REGISTERS_PER_THREAD
            if spec.keys_in_pages
            else REGISTERS_BY_CONSUMER_WARPGROUPS[self.consumer_warpgroups]
        )


def forward_smem_bytes(tile: ForwardTile, spec: HopperSpec) -> int:
    """Returns the shared memory of the forward kernel in bytes, mbarriers included."""
    itemsize = jnp.dtype(jnp.bfloat16).itemsize
    matrices = tile.query_buffers * tile.block_q * spec.head_dim + tile.kv_stages * tile.block_kv * (
        spec.head_dim + spec.value_dim
    )
    dropout_key_words = (tile.kv_stages + 1) * tile.block_kv  # dropout's keys of queries and keys
    row_bytes = (4 * tile.query_buffers * tile.block_q + dropout_key_words) * 4 + FORWARD_RESERVED_SMEM_BYTES
    if spec.blocks_per_split:
        # Float32 totals leave little memory, so the rest is counted exactly: lse, indices with words, and mbarriers.
        row_bytes = tile.block_q * spec.value_dim * 4 + 2 * SMEM_ALIGNMENT_BYTES + SPLIT_BARRIER_BYTES
    return matrices * itemsize + row_bytes


@dataclasses.dataclass(frozen=True)
class BackwardTile:
    """The tile sizes of the backward kernel.

    Attributes:
        head_dim: Head dimension of queries and keys.
        value_dim: Head dimension of values.
        block_kv: Keys whose dk and dv a block, or the two blocks of a cluster, accumulate.
        block_q: Queries per step.
        query_stages: Tiles of queries in shared memory.
    """

    head_dim: int
    value_dim: int
    block_kv: int
    block_q: int
    query_stages: int

    @property
    def has_wide_heads(self) -> bool:
        """Returns whether a warpgroup accumulates only one gradient of 64 keys, instead of both."""
        return self.head_dim + self.value_dim > 5 * SWIZZLE_COLUMNS

    @property
    def is_register_bound(self) -> bool:
        """Returns whether both gradients of 64 keys leave a warpgroup too few registers for dq next to gradients of
        weights.

        Then its part of dq is computed once those are converted to 16 bits, and shared memory has no room for a second
        tile of cotangents, nor for ids of keys and dropout's keys.
        """
        return not self.has_wide_heads and self.head_dim + self.value_dim > 4 * SWIZZLE_COLUMNS

    @property
    def key_chunk_columns(self) -> int:
        """Returns the contiguous columns of keys in shared memory: those of a warpgroup's part of dq."""
        return self.head_dim // 2 if self.is_register_bound else SWIZZLE_COLUMNS

    @property
    def swizzle_bytes(self) -> int:
        """Returns the swizzle in bytes of queries, keys and gradients of scores; a chunk is a multiple of it."""
        return 128 if self.key_chunk_columns % SWIZZLE_COLUMNS == 0 else 64

    def array_swizzle_bytes(self, name: str) -> int:
        """Returns the swizzle in bytes of an array."""
        return self.swizzle_bytes if name in ("q", "k", "ds") else 128

    @property
    def blocks_per_cluster(self) -> int:
        """Returns the number of blocks (a cluster) that share `keys`."""
        return 2 if self.has_wide_heads else 1

    @property
    def key_tiles_per_block(self) -> int:
        """Returns tiles of 64 keys per block."""
        return self.block_kv // (WGMMA_M * self.blocks_per_cluster)

    @property
    def key_chunks_per_row(self) -> int:
        """Returns the chunks of columns per row of keys."""
        return self.head_dim // self.key_chunk_columns

    @property
    def num_peer_key_chunks(self) -> int:
        """Returns the chunks per row of the other member's keys that a block needs for its share of dq."""
        return self.key_chunks_per_row // 2 if self.has_wide_heads else 0

    @property
    def stages_by_operand(self) -> dict[str, int]:
        """Returns tiles of queries, and of their cotangents, in shared memory."""
        return {"q": self.query_stages, "do": 1 if self.has_wide_heads or self.is_register_bound else 2}

    @property
    def num_dq_pieces(self) -> int:
        """Returns the pieces of a step's part of dq that are added separately: one per warpgroup, or one for both."""
        return BACKWARD_CONSUMER_WARPGROUPS if self.has_wide_heads else 1

    @property
    def num_dq_adder_warps(self) -> int:
        """Returns the warps that add to device memory, for alternate pieces: an addition may take longer than a
        step.
        """
        return 3 if self.has_wide_heads else 2

    @property
    def warpgroups_per_dq_piece(self) -> int:
        """Returns the warpgroups that compute a piece, 64 rows each."""
        return BACKWARD_CONSUMER_WARPGROUPS // self.num_dq_pieces

    @property
    def strips_per_dq_piece(self) -> int:
        """Returns the strips of a warpgroup's share that are handed to the adder warps one after the other.

        Device memory takes about 16 bytes of sums per cycle from a multiprocessor: a strip should have been added
        before the next one is ready.
        """
        return 2 if self.has_wide_heads else 1

    @property
    def dq_strip_columns(self) -> int:
        """Returns columns per strip."""
        return (
            self.head_dim
            * self.block_q
            // (WGMMA_M * BACKWARD_CONSUMER_WARPGROUPS * self.strips_per_dq_piece * self.blocks_per_cluster)
        )

    def dq_strip_start(self, cluster_member: Any, warpgroup: int, strip_index: int) -> tuple[int, Any]:
        """Returns the first row and column of a strip."""
        if self.has_wide_heads:
            return 0, (
                (cluster_member * BACKWARD_CONSUMER_WARPGROUPS + warpgroup) * self.strips_per_dq_piece + strip_index
            ) * self.dq_strip_columns
        row, part = self.dq_row_and_column_half(warpgroup)
        return row * WGMMA_M, part * self.dq_strip_columns

    def dq_row_and_column_half(self, warpgroup: Any) -> tuple[Any, Any]:
        """Returns which 64 queries, and which chunk of a row of keys, a warpgroup's share has, if two share them."""
        return (warpgroup, 0) if self.block_q == BACKWARD_CONSUMER_WARPGROUPS * WGMMA_M else (0, warpgroup)

    @property
    def uses_ping_pong_for_scores(self) -> bool:
        """Returns whether ping-pong scheduling covers the products of scores, too.

        On an H200 it makes a causal backward pass 3% faster with these tiles, and costs as much with larger ones.
        """
        return self.block_q == WGMMA_M

    @property
    def consumer_registers(self) -> int:
        """Returns registers per thread of a consumer warpgroup."""
        return REGISTERS_BY_CONSUMER_WARPGROUPS[BACKWARD_CONSUMER_WARPGROUPS][0]

    @property
    def producer_registers(self) -> int:
        """Returns registers per thread of the producer warpgroup."""
        return REGISTERS_BY_CONSUMER_WARPGROUPS[BACKWARD_CONSUMER_WARPGROUPS][1]

    def hbm_bytes_per_query(self, spec: HopperSpec) -> int:
        """Returns bytes per query in device memory, with its cotangent and its float32 gradient."""
        operand_bytes, float32_bytes = jnp.dtype(spec.dtype).itemsize, jnp.dtype(jnp.float32).itemsize
        return self.head_dim * (operand_bytes + float32_bytes) + self.value_dim * operand_bytes

    def row_array_names(self, spec: HopperSpec, name: str) -> tuple[str, ...]:
        """Returns arrays with one element per row that are copied to shared memory with an array.

        Wide and register-bound tiles have no shared memory for ids of keys, and for dropout's keys.
        """
        has_spare_memory = not self.has_wide_heads and not self.is_register_bound
        if name == "q":
            dropout_keys = ["q_dropout_keys"] * (spec.has_dropout and has_spare_memory)
            return "shift", "delta", *["q_ids"] * spec.has_segments, *dropout_keys
        if name == "k" and has_spare_memory:
            return *["k_ids"] * spec.has_segments, *["k_dropout_keys"] * spec.has_dropout
        return ()

    def needs_masks(self, spec: HopperSpec) -> bool:
        """Returns whether tiles of scores may need masks; a register-bound tile has masking loops in any case.

        With the loop of full tiles alone, ptxas (CUDA 13.0) serialises the products of register-bound tiles.
        """
        return spec.may_mask_pairs or spec.kv_len % self.block_kv != 0 or self.is_register_bound


def backward_smem_bytes(tile: BackwardTile, spec: HopperSpec) -> int:
    """Returns the shared memory of the backward kernel in bytes."""
    itemsize = jnp.dtype(spec.dtype).itemsize
    gradient_columns = tile.key_tiles_per_block * (spec.head_dim + spec.value_dim)
    accumulated_bytes = WGMMA_M * (gradient_columns + tile.num_peer_key_chunks * SWIZZLE_COLUMNS) * itemsize
    stages = tile.stages_by_operand
    streamed_bytes = (stages["q"] * spec.head_dim + stages["do"] * spec.value_dim) * tile.block_q * itemsize
    ds_bytes = 2 * tile.block_kv * tile.block_q * itemsize
    dq_bytes = BACKWARD_CONSUMER_WARPGROUPS * WGMMA_M * tile.dq_strip_columns * 4
    row_arrays = [tile.query_stages * tile.block_q] * len(tile.row_array_names(spec, "q"))
    row_array_words = [1, *row_arrays]
    if tile.has_wide_heads or tile.is_register_bound:  # row data are packed
        row_array_words = [2 * tile.query_stages * tile.block_q, (tile.query_stages + 1) * tile.block_q]
    row_array_words += [tile.block_kv] * len(tile.row_array_names(spec, "k"))
    row_bytes = sum(cdiv(words * 4, SMEM_ALIGNMENT_BYTES) * SMEM_ALIGNMENT_BYTES for words in row_array_words)
    return accumulated_bytes + streamed_bytes + ds_bytes + dq_bytes + row_bytes


VALUE_HEAD_DIMS = {64: (64,), 128: (128,), 192: (128,), 256: (256,)}
"""Head dimensions of values by those of queries and keys, for the combinations that were tested on a chip."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class HopperForward:
    """The configuration of the forward kernel.

    Attributes:
        block_q: Queries per block, 64 per consumer warpgroup.
        block_kv: Keys per step.
        stages: Tiles of keys, and of values, in shared memory.
        batch_invariant: Whether the bits of a row must not depend on the other rows of the call.
    """

    block_q: int
    block_kv: int
    stages: int
    batch_invariant: bool = False


@dataclasses.dataclass(frozen=True, kw_only=True)
class HopperBackward:
    """The configuration of the backward kernel.

    Attributes:
        block_kv: Keys per block, or per cluster of two blocks.
        block_q: Queries per step.
        stages: Tiles of queries in shared memory.
    """

    block_kv: int
    block_q: int
    stages: int


PUBLIC_FIELDS = {"q_blocksize": "block_q", "kv_blocksize": "block_kv", "num_stages": "stages"}
"""Maps fields of the public configuration to fields of these."""

FORWARD_TILES: dict[int, tuple[tuple[int, int, int], ...]] = {
    64: ((192, 128, 2), (128, 128, 3), (128, 192, 2)),
    128: ((128, 128, 2), (192, 64, 3)),
    192: ((128, 128, 2), (128, 64, 3)),
    256: ((128, 64, 2),),
}
"""Queries, keys and stages by head dimension of queries and keys, the best first."""
BACKWARD_TILES: dict[int, tuple[tuple[int, int, int], ...]] = {
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
        return tuple(HopperForward(block_q=q, block_kv=k, stages=n) for q, k, n in FORWARD_TILES[size])
    return tuple(HopperBackward(block_kv=k, block_q=q, stages=n) for k, q, n in BACKWARD_TILES[size])


def forward_tile(params: HopperForward, spec: HopperSpec) -> ForwardTile:
    """Returns the tile of a forward configuration.

    Raises:
        ValueError: A field is not valid for a kernel, or the tile does not fit shared memory.
    """
    warpgroups, keys, stages = _check_tile_sizes(params, "block_q", "block_kv", "stages")
    limit = SHARED_MEMORY_BYTES
    tiles = [ForwardTile(warpgroups, keys, stages, n) for n in (2, 1)]
    tile = next((x for x in tiles if forward_smem_bytes(x, spec) <= limit), None)
    if tile is None:
        raise ValueError(f"cfg: {set_fields_as_text(params)} takes more than the {limit} bytes of shared memory")
    return tile


def backward_tile(params: HopperBackward, spec: HopperSpec) -> BackwardTile:
    """Returns the tile of a backward configuration.

    Raises:
        ValueError: In the same cases as in `forward_tile`.
    """
    warpgroups, queries, stages = _check_tile_sizes(params, "block_kv", "block_q", "stages")
    tile = BackwardTile(spec.head_dim, spec.value_dim, warpgroups * WGMMA_M, queries, stages)
    expected_block_sizes = BACKWARD_TILES[spec.head_dim][0][:2]
    if (tile.block_kv, tile.block_q) != expected_block_sizes:
        raise ValueError(
            f"cfg: {set_fields_as_text(params)}: heads of {spec.head_dim} want block_kv={expected_block_sizes[0]} and "
            f"block_q={expected_block_sizes[1]}"
        )
    if backward_smem_bytes(tile, spec) > SHARED_MEMORY_BYTES - BACKWARD_RESERVED_SMEM_BYTES:
        limit = SHARED_MEMORY_BYTES
        raise ValueError(f"cfg: {set_fields_as_text(params)} takes more than the {limit} bytes of shared memory")
    return tile


def _check_tile_sizes(
    params: HopperForward | HopperBackward, accumulated_block_field: str, streamed_block_field: str, stages_field: str
) -> tuple[int, int, int]:
    """Returns warpgroups, rows of a streamed block, and stages."""
    values = {name: getattr(params, name) for name in (accumulated_block_field, streamed_block_field, stages_field)}
    allowed_values = dict.fromkeys(values, "64, 128 or 192") | {stages_field: "2 or more"}
    for name, value in values.items():
        if value is None or not (value >= 2 if name == stages_field else value in (64, 128, 192)):
            raise ValueError(f"cfg: got {name}={value}, the Mosaic GPU kernels want {allowed_values[name]}")
    return values[accumulated_block_field] // WGMMA_M, values[streamed_block_field], values[stages_field]
