"""Inverting lists: from the blocks that a query reads to the queries that read a block.

    listed [T, N]  --sort by (block, query)-->  rows: | queries of block 0 | queries of block 1 | ...
                                                block c: keys and values sliced once; its queries gathered

Gathering the keys of every query's blocks would copy each block once for every query that lists it. Inverted, a block
is sliced in place, and the gathered rows of queries are `block_size` times fewer.
"""

import dataclasses
from collections.abc import Callable
from typing import Any, NamedTuple, TypeVar

import jax
import jax.numpy as jnp
from jax import lax

from ejkernel.arithmetic import cdiv
from ejkernel.families.selected_attention import SelectedAttention, num_listable_blocks, query_positions, starts
from ejkernel_xla.selected_attention.config import SelectedTiles, sizes

Carry = TypeVar("Carry")


@dataclasses.dataclass(frozen=True)
class SelectedPlan:
    """How a record is cut: batch rows times KV heads times tiles of `queries` queries; a product has `rows` of them.

    `group` query heads share a KV head, and so their blocks.
    """

    batch: int
    heads: int
    group: int
    queries: int
    tiles: int
    rows: int
    num_blocks: int

    @property
    def steps(self) -> int:
        """Returns steps of the outer loop."""
        return self.batch * self.heads * self.tiles

    def step_at(self, step: Any) -> tuple[Any, Any, Any]:
        """Returns batch row, KV head and first query of a step."""
        row, tile = step // self.tiles, step % self.tiles
        return row // self.heads, row % self.heads, tile * self.queries


def make_plan(record: SelectedAttention, config: SelectedTiles) -> SelectedPlan:
    """Cuts a record."""
    (batch, length, heads, _), kv_heads = record.query.shape, record.key.shape[2]
    queries, rows = sizes(record, config)
    return SelectedPlan(
        batch, kv_heads, heads // kv_heads, queries, cdiv(length, queries), rows, num_listable_blocks(record)
    )


class Operands(NamedTuple):
    """The arrays of a record, heads first, filled up with zeros: T is the plan's, S has room for one block more.

    Attributes:
        query: [B, Hk, T, g, D].
        key: [B, Hk, S, D].
        value: [B, Hk, S, Dv].
        listed: [B, Hk, T, N] int32, -1 for no block.
        q_positions: [B|1, T] int32, index of the key at the query's position.
        starts: [M] int32, first key of a block.
        ids: Segment ids of queries [B, T] and of keys [B, S]; None where they restrict nothing.
    """

    query: jax.Array
    key: jax.Array
    value: jax.Array
    listed: jax.Array
    q_positions: jax.Array
    starts: jax.Array
    ids: tuple[jax.Array, jax.Array] | None


def arrange_operands(record: SelectedAttention, plan: SelectedPlan) -> Operands:
    """Returns the operands of a record whose padding is clean, and whose blocks are listed."""
    assert record.block_indices is not None  # selected by now
    listed = jnp.where(record.block_indices >= 0, record.block_indices, plan.num_blocks)
    ids = None
    if record.q_segment_ids is not None and record.kv_segment_ids is not None:
        listed = jnp.where((record.q_segment_ids >= 0)[..., None, None], listed, plan.num_blocks)
        ids = (
            fill(record.q_segment_ids, 1, plan.tiles * plan.queries, -1),
            fill(record.kv_segment_ids, 1, record.key.shape[1] + record.block_size, -2),
        )
    return Operands(
        query=group_query_heads(record.query, plan),
        key=_heads_first_with_padding_rows(record.key, record.block_size),
        value=_heads_first_with_padding_rows(record.value, record.block_size),
        listed=fill(listed.transpose(0, 2, 1, 3), 2, plan.tiles * plan.queries, plan.num_blocks),
        q_positions=fill(query_positions(record), 1, plan.tiles * plan.queries, 0),
        starts=starts(record),
        ids=ids,
    )


def group_query_heads(x: jax.Array, plan: SelectedPlan) -> jax.Array:
    """Returns [B, t, H, n] -> [B, Hk, T, g, n]."""
    x = x.reshape(*x.shape[:2], plan.heads, plan.group, x.shape[3]).transpose(0, 2, 1, 3, 4)
    return fill(x, 2, plan.tiles * plan.queries, 0)


def ungroup_query_heads(x: jax.Array, length: int) -> jax.Array:
    """Returns [B, Hk, T, g, n] -> [B, t, H, n], the inverse of `group_query_heads`."""
    x = x[:, :, :length].transpose(0, 2, 1, 3, 4)
    return x.reshape(*x.shape[:2], x.shape[2] * x.shape[3], x.shape[4])


def fill(x: jax.Array, axis: int, length: int, value: Any) -> jax.Array:
    """Returns x with an axis extended to a length."""
    missing = length - x.shape[axis]
    padding = [(0, missing if n == axis else 0) for n in range(x.ndim)]
    return jnp.pad(x, padding, constant_values=value) if missing else x


def _heads_first_with_padding_rows(x: jax.Array, num_padding_rows: int) -> jax.Array:
    return fill(x.transpose(0, 2, 1, 3), 2, x.shape[1] + num_padding_rows, 0)


class BlockReaders(NamedTuple):
    """The queries of a tile by the block they read.

    Attributes:
        rows: [n] int32, queries of the tile, block by block.
        bounds: [M + 1] int32, where the queries of each block begin.
    """

    rows: jax.Array
    bounds: jax.Array


def sort_queries_by_block(listed: jax.Array, plan: SelectedPlan) -> BlockReaders:
    """Sorts the lists [T, N] of a tile of queries by block; `plan.num_blocks` stands for none."""
    count, slots = listed.size, listed.shape[1]
    pair = jnp.arange(count, dtype=jnp.uint32)
    # One number per pair: sorting numbers is several times faster than sorting indices by them.
    ordered = jnp.sort(listed.reshape(-1).astype(jnp.uint32) * jnp.uint32(count) + pair)
    first_pairs = jnp.arange(plan.num_blocks + 1, dtype=jnp.uint32) * jnp.uint32(count)
    bounds = jnp.searchsorted(ordered, first_pairs).astype(jnp.int32)
    rows = (ordered % jnp.uint32(count)).astype(jnp.int32) // slots
    # The list has room for one more product, so that the slice of a block's last tile stays inside and is not moved
    # back.
    return BlockReaders(fill(rows, 0, count + plan.rows, 0), bounds)


def fold_block_readers(
    readers: BlockReaders, plan: SelectedPlan, step: Callable[[jax.Array, jax.Array, Carry], Carry], carry: Carry
) -> Carry:
    """Applies `step(block, rows, carry)` to every block and every `plan.rows` of the queries that read it.

    Rows that fill up the last tile of a block lie after all queries: they read any, and write nothing.
    """
    product_row = jnp.arange(plan.rows, dtype=jnp.int32)

    def block(c: jax.Array, carry: Carry) -> Carry:
        first, end = readers.bounds[c], readers.bounds[c + 1]

        # The number of tiles is traced: a block that no query lists costs one step of the outer loop.
        def tile(n: jax.Array, carry: Carry) -> Carry:
            at = first + n * plan.rows
            rows = lax.dynamic_slice(readers.rows, (at,), (plan.rows,))
            return step(c, jnp.where(at + product_row < end, rows, plan.queries + product_row), carry)

        return lax.fori_loop(jnp.int32(0), cdiv(end - first, plan.rows), tile, carry)

    return lax.fori_loop(jnp.int32(0), jnp.int32(plan.num_blocks), block, carry)


def take(x: jax.Array, rows: jax.Array) -> jax.Array:
    """Returns rows of x along its first axis; those after its end are the last one's."""
    return x.at[rows].get(mode="clip")


def put(x: jax.Array, rows: jax.Array, values: jax.Array) -> jax.Array:
    """Returns x with rows replaced; those after its end go nowhere."""
    return x.at[rows].set(values, mode="drop", unique_indices=True)


def add(x: jax.Array, rows: jax.Array, values: jax.Array) -> jax.Array:
    """Returns x with values added to rows; those after its end go nowhere."""
    return x.at[rows].add(values, mode="drop", unique_indices=True)
