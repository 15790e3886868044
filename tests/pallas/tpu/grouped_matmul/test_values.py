"""The grouped-matmul kernels' numbers, interpreted, against the family's meaning; and their tables of visits."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from tpu_grouped_records import CASES, ONE_STEP, TILES, answers, normal, record
from tpu_records import close, interpreted

from ejkernel.ops.device import DeviceInfo, target_device
from ejkernel.types.pullback import Pullback
from ejkernel_pallas.tpu.grouped_matmul import spec
from ejkernel_pallas.tpu.grouped_matmul.backward import backward
from ejkernel_pallas.tpu.grouped_matmul.config import TpuMatmul
from ejkernel_pallas.tpu.grouped_matmul.forward import forward
from ejkernel_pallas.tpu.grouped_matmul.plan import (
    BEFORE_ALL_GROUPS_FLAG,
    FIRST_ITEM_FLAG,
    HAS_WORK_FLAG,
    LAST_ITEM_FLAG,
    WHOLE_TILE_FLAG,
    WorkItem,
    work_list_by_matrices,
    work_list_by_row_tiles,
)


@pytest.mark.parametrize("name", CASES)
def test_values_and_gradients(name, monkeypatch):
    if name.startswith("loops"):
        monkeypatch.setattr(spec, "MAX_UNROLLED_MULTIPLICATIONS", 0)
    compare(*CASES[name])


@pytest.mark.parametrize("kind", ["TPU v5 lite", "TPU v6 lite", "TPU7x"])
@pytest.mark.parametrize("tiles", [TILES, ONE_STEP])
def test_values_and_gradients_with_every_width_of_matrix_units(kind, tiles):
    with target_device(DeviceInfo(platform="tpu", vendor="google", kind=kind)):
        compare(record((190, 110, 256), (556, 600, 600), dtype="bfloat16"), tiles)


def compare(made, config):
    output, cotangent, gradients = answers(made)

    @jax.jit
    def multiply(made, cotangent):
        wanted = frozenset(gradients)
        pullback = Pullback(record=made, residuals=(), output=None, cotangent=cotangent, grad_fields=wanted)
        return forward(made, config)[0], backward(pullback, config)

    with interpreted():
        got, found = multiply(made, cotangent)
    size = float(jnp.abs(output.astype(jnp.float32)).max()) or 1.0
    close(got / size, output / size, made.lhs.dtype)
    assert found.keys() == gradients.keys()
    for field, wanted in gradients.items():
        assert (found[field].dtype, found[field].shape) == (wanted.dtype, wanted.shape)
        size = float(jnp.abs(wanted.astype(jnp.float32)).max()) or 1.0
        close(found[field] / size, wanted / size, made.lhs.dtype)


def test_nan_in_rows_of_other_groups_changes_nothing():
    made = record((100, 50), matrices=1, group_offset=jnp.int32(1), rhs_bias=normal(1, 1, 140))
    broken = dataclasses.replace(made, lhs=made.lhs.at[:100].set(jnp.nan).at[150:].set(jnp.inf))

    def multiply(made):
        wanted, cotangent = frozenset({"lhs", "rhs", "rhs_bias"}), jnp.ones((300, 140)).at[:100].set(jnp.nan)
        pullback = Pullback(record=made, residuals=(), output=None, cotangent=cotangent, grad_fields=wanted)
        return forward(made, TILES)[0], backward(pullback, TILES)

    with interpreted():
        want, got = jax.jit(multiply)(made), jax.jit(multiply)(broken)
    jax.tree.map(np.testing.assert_array_equal, got, want)
    assert np.isfinite(np.asarray(got[1]["rhs"])).all()


@pytest.mark.parametrize(
    ("tiles", "message"), [({"block_m": 100}, "block_m=100, wants a multiple of 128"), ({"block_n": 64}, "block_n=64")]
)
def test_tiles_that_are_not_multiples_of_lanes_are_refused(tiles, message):
    with pytest.raises(ValueError, match=message):
        forward(CASES["several steps"][0], TpuMatmul(**tiles))


def listed(work):
    table = np.asarray(work.table).reshape(len(WorkItem._fields), -1)[:, : int(work.num_items)]
    return [WorkItem(*entry) for entry in table.T]


@functools.partial(jax.jit, static_argnums=(2, 3))
def tables(groups, offset, rows, matrices):
    made = record(groups, (rows, 8, 8), matrices=matrices, group_offset=offset)
    return work_list_by_row_tiles(made, 128), work_list_by_matrices(made, 128)


@pytest.mark.parametrize("seed", range(24))
def test_work_lists_cover_each_row_once_with_its_matrix(seed):
    random = np.random.default_rng(seed)
    groups = random.integers(0, 90, size=6) * random.integers(0, 2, size=6)
    rows, matrices, offset = (300, 256)[seed % 2], (6, 2)[seed // 2 % 2], int(random.integers(-2, 8))
    made = tables(groups, np.int32(offset), rows, matrices)
    bounds = np.minimum(np.concatenate([[0], np.cumsum(groups)]), rows)
    owner = np.full(rows, -1)
    for matrix in range(matrices):
        if 0 <= matrix + offset < len(groups):
            owner[bounds[matrix + offset] : bounds[matrix + offset + 1]] = matrix
    tiles = -(-rows // 128)
    for visits, own in zip(map(listed, made), ("row_tile", "matrix_index"), strict=True):
        found = np.full(rows, -1)
        for v in visits:
            assert 0 <= v.row_tile < tiles
            assert 0 <= v.loaded_row_tile < tiles
            assert 0 <= v.matrix_index < matrices
            assert bool(v.flags & WHOLE_TILE_FLAG) == (v.end_row - v.first_row == 128)
            if v.flags & HAS_WORK_FLAG:
                part = slice(v.row_tile * 128 + v.first_row, v.row_tile * 128 + v.end_row)
                assert v.end_row > v.first_row
                assert (found[part] == -1).all()
                found[part] = v.matrix_index
        np.testing.assert_array_equal(found, owner)
        order = [getattr(v, own) for v in visits]
        assert sorted(set(order)) == list(range(tiles if own == "row_tile" else matrices))
        assert order == sorted(order)
        changes = [i == 0 or order[i] != order[i - 1] for i in range(len(order))]
        assert changes == [bool(v.flags & FIRST_ITEM_FLAG) for v in visits]
        if own == "matrix":
            ends = [i + 1 == len(order) or order[i + 1] != order[i] for i in range(len(order))]
            assert ends == [bool(v.flags & LAST_ITEM_FLAG) for v in visits]


def test_empty_work_items_reuse_the_blocks_of_the_nearest_item():
    visits = listed(tables(np.array([300, 200, 500]), np.int32(1), 1100, 1)[0])
    work = [v for v in visits if v.flags & HAS_WORK_FLAG]
    leading = [v for v in visits if v.flags & BEFORE_ALL_GROUPS_FLAG]
    trailing = [v for v in visits if not v.flags & (HAS_WORK_FLAG | BEFORE_ALL_GROUPS_FLAG)]
    assert ([v.row_tile for v in leading], [v.row_tile for v in work]) == ([0, 1], [2, 3])
    assert [v.row_tile for v in trailing] == [4, 5, 6, 7, 8]
    assert {v.loaded_row_tile for v in leading} == {work[0].loaded_row_tile}
    assert {v.loaded_row_tile for v in trailing} == {work[-1].loaded_row_tile}
