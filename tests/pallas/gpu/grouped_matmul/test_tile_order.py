"""The order in which blocks of the grouped-matmul kernels take tiles."""

import dataclasses
import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from ejkernel_pallas.gpu.grouped_matmul import config, plan, spec
from ejkernel_pallas.gpu.grouped_matmul.kernels import matrix_gradients, row_tiles

BLOCKS = 12


def make_call(columns, *, matrices=5, contracted=640):
    tile = config.HopperGrouped(**config.ROW_KERNEL_TILES[0].config_fields)
    sizes = {"num_rows": 4096, "contracted_size": contracted, "num_columns": columns, "num_matrices": matrices}
    kinds = {
        "matrices_are_transposed": False,
        "operand_dtype": jnp.dtype(jnp.bfloat16),
        "out_dtype": jnp.dtype(jnp.bfloat16),
    }
    made = spec.GroupedSpec(**sizes, **kinds, tile=dataclasses.replace(tile, group_m=3))
    return types.SimpleNamespace(spec=made, num_blocks=BLOCKS, cluster_column=0, cluster_row=0)


def test_matrices_are_ordered_by_decreasing_rows():
    sizes = np.array([3, 0, 7, 7, 1, 0, 9])
    end = np.cumsum(sizes)
    table = plan.order_groups_by_size(*(jnp.asarray(x, jnp.int32) for x in (end - sizes, end)))
    assert table[:, 2].tolist() == [6, 2, 3, 0, 4, 1, 5]
    np.testing.assert_array_equal(table[:, 1] - table[:, 0], sizes[table[:, 2]])
    np.testing.assert_array_equal(table[:, 1], end[table[:, 2]])


@pytest.mark.parametrize("columns", [256, 1280])
def test_every_second_round_of_tiles_is_in_reverse_order(columns):
    call = make_call(columns)
    count = call.spec.num_matrices * call.spec.tile_rows_per_matrix * call.spec.num_column_tiles
    numbers = jax.vmap(lambda n: matrix_gradients._reverse_every_second_round(call, n))(jnp.arange(count))
    assert sorted(numbers.tolist()) == list(range(count))
    whole = count // BLOCKS
    rounds = np.asarray(numbers)[: whole * BLOCKS].reshape(whole, BLOCKS)
    assert (np.diff(rounds[::2]) == 1).all()
    assert (np.diff(rounds[1::2]) == -1).all()


@pytest.mark.parametrize(("tiles", "columns", "split"), [(8, 1280, 4), (6, 768, 6), (7, 1280, 0), (12, 1280, 0)])
def test_tiles_of_a_half_empty_last_round_are_split_by_columns(tiles, columns, split):
    call = make_call(columns)
    column_tiles = call.spec.num_column_tiles
    assert row_tiles.num_split_tiles(call, jnp.int32(tiles)) == split
    items = tiles * column_tiles + split
    place = jax.vmap(lambda n: row_tiles.find_tile_position(call, jnp.int32(tiles), n))(jnp.arange(items))
    found = [tuple(x) for x in np.stack(place, axis=1).tolist()]
    # Every tile once: all of its columns, or one half and the other.
    half_columns = [(row, column) for row, column, half in found if half >= 0]
    assert len(set(found)) == len(found)
    assert all(half_columns.count(x) == 2 for x in half_columns)
    whole = {(row, column) for row, column, half in found if half < 0}
    assert len(whole) + len(half_columns) // 2 == tiles * column_tiles
    assert whole.isdisjoint(half_columns)
