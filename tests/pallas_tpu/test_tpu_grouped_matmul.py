"""The grouped-matmul kernels' numbers, interpreted, against the family's meaning; and their tables of visits."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from tpu_records import close, interpreted

from ejkernel.families.grouped_matmul import GroupedMatmul, reference
from ejkernel.ops.device import DeviceInfo, target_device
from ejkernel.ops.pullback import Pullback
from ejkernel_pallas.tpu.grouped_matmul import spec
from ejkernel_pallas.tpu.grouped_matmul.backward import backward
from ejkernel_pallas.tpu.grouped_matmul.forward import forward
from ejkernel_pallas.tpu.grouped_matmul.tiles import TpuMatmul
from ejkernel_pallas.tpu.grouped_matmul.work_list import (
    FIRST,
    LAST,
    LEADING,
    WHOLE,
    WORK,
    WorkItem,
    by_matrices,
    by_rows,
)

FIELDS = ("lhs", "rhs", "existing_out", "rhs_scale", "rhs_bias")
TILES = TpuMatmul(block_m=128, block_k=128, block_n=128)
ONE_STEP = TpuMatmul(block_m=256, block_k=1024, block_n=1024)


def record(groups, shape=(300, 200, 140), matrices=None, dtype="float32", **fields):
    """A record of (M, K, N) with normal inputs; fields that are functions get a generator."""
    (m, k, n), random = shape, np.random.default_rng(5)
    e = matrices or len(groups)

    def normal(*size):
        return jnp.asarray(random.normal(size=size), dtype)

    made = {name: x(random) if callable(x) else x for name, x in fields.items()}
    rhs = made.pop("rhs", None)
    if rhs is None:
        rhs = normal(e, n, k) if made.get("transpose_rhs") else normal(e, k, n)
    sizes = jnp.asarray(groups, jnp.int32)
    made.setdefault("out_dtype", jnp.dtype("float32"))
    return GroupedMatmul(lhs=normal(m, k), rhs=rhs, group_sizes=sizes, **made)


def normal(*size, dtype="float32"):
    return lambda random: jnp.asarray(random.normal(size=size), dtype)


def small(*size, dtype="int8"):
    return lambda random: jnp.asarray(random.integers(-8, 8, size=size)).astype(dtype)


SCALE = normal(3, 4, 1, 140)
CASES = {
    "several steps": (record((100, 0, 150)), TILES),
    "whole tiles": (record((128, 128), (256, 256, 128)), TILES),
    "rows before the first matrix": (record((140, 30, 130), matrices=1, group_offset=jnp.int32(2)), TILES),
    "groups that have no matrix": (record((140, 30, 130), matrices=2, group_offset=jnp.int32(-1)), TILES),
    "nobody has rows": (record((0, 0), existing_out=normal(300, 140)), TILES),
    "beyond all groups": (record((100, 90), matrices=2, group_offset=jnp.int32(7)), TILES),
    "more rows than there are": (record((200, 400)), TILES),
    "transposed": (record((100, 50, 90), transpose_rhs=True, rhs_bias=normal(3, 1, 140)), TILES),
    "scales that cut tiles": (record((100, 50, 90), rhs_scale=SCALE), TILES),
    "scales of whole lanes": (
        record((100, 50, 90), (300, 256, 140), rhs=small(3, 256, 140), rhs_scale=normal(3, 2, 1, 140)),
        TpuMatmul(block_m=128, block_k=256, block_n=128),
    ),
    "a scale of columns": (record((100, 50, 90), rhs=small(3, 200, 140), rhs_scale=normal(3, 1, 1, 140)), TILES),
    "float8": (record((100, 50, 90), rhs=small(3, 200, 140, dtype="float8_e4m3fn"), rhs_scale=SCALE), TILES),
    "in one step": (
        record((100, 50, 90), transpose_rhs=True, rhs_scale=SCALE, existing_out=normal(300, 140)),
        ONE_STEP,
    ),
    "bfloat16": (record((100, 50, 150), dtype="bfloat16", out_dtype=jnp.dtype("bfloat16")), ONE_STEP),
    "bfloat16, exact": (
        record((100, 50, 150), dtype="bfloat16", rhs_bias=normal(3, 1, 140), precision=jax.lax.Precision.HIGHEST),
        TILES,
    ),
    "loops over columns": (record((190, 60), (256, 128, 600)), ONE_STEP),
}


def answers(made):
    """Output, a cotangent, and its gradients by the family's reference."""
    fields = {name: getattr(made, name) for name in FIELDS}
    fields = {name: x for name, x in fields.items() if x is not None and jnp.issubdtype(x.dtype, jnp.floating)}
    fields = {name: x for name, x in fields.items() if x.dtype.itemsize > 1}
    output, pull = jax.vjp(lambda fields: reference(dataclasses.replace(made, **fields))[0], fields)
    cotangent = jnp.asarray(np.random.default_rng(3).normal(size=output.shape), made.out_dtype)
    return output, cotangent, pull(cotangent)[0]


@pytest.mark.parametrize("name", CASES)
def test_values_and_gradients(name, monkeypatch):
    if name.startswith("loops"):
        monkeypatch.setattr(spec, "UNROLLED", 0)
    compare(*CASES[name])


@pytest.mark.parametrize("kind", ["TPU v5 lite", "TPU v6 lite", "TPU7x"])
@pytest.mark.parametrize("tiles", [TILES, ONE_STEP])
def test_values_and_gradients_with_every_kind_of_matrix_units(kind, tiles):
    with target_device(DeviceInfo(platform="tpu", vendor="google", kind=kind)):
        compare(record((190, 110, 256), (556, 600, 600), dtype="bfloat16"), tiles)


def compare(made, config):
    output, cotangent, gradients = answers(made)

    @jax.jit
    def multiply(made, cotangent):
        wanted = frozenset(gradients)
        pullback = Pullback(record=made, residuals=(), output=None, cotangent=cotangent, wanted=wanted)
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


def test_rows_of_others_may_be_anything():
    made = record((100, 50), matrices=1, group_offset=jnp.int32(1), rhs_bias=normal(1, 1, 140))
    broken = dataclasses.replace(made, lhs=made.lhs.at[:100].set(jnp.nan).at[150:].set(jnp.inf))

    def multiply(made):
        wanted, cotangent = frozenset({"lhs", "rhs", "rhs_bias"}), jnp.ones((300, 140)).at[:100].set(jnp.nan)
        pullback = Pullback(record=made, residuals=(), output=None, cotangent=cotangent, wanted=wanted)
        return forward(made, TILES)[0], backward(pullback, TILES)

    with interpreted():
        want, got = jax.jit(multiply)(made), jax.jit(multiply)(broken)
    jax.tree.map(np.testing.assert_array_equal, got, want)
    assert np.isfinite(np.asarray(got[1]["rhs"])).all()


@pytest.mark.parametrize(
    ("tiles", "message"), [({"block_m": 100}, "block_m=100, wants a multiple of 128"), ({"block_n": 64}, "block_n=64")]
)
def test_tiles_that_no_kernel_can_have_are_refused(tiles, message):
    with pytest.raises(ValueError, match=message):
        forward(CASES["several steps"][0], TpuMatmul(**tiles))


def listed(work):
    table = np.asarray(work.table).reshape(len(WorkItem._fields), -1)[:, : int(work.total)]
    return [WorkItem(*entry) for entry in table.T]


@functools.partial(jax.jit, static_argnums=(2, 3))
def tables(groups, offset, rows, matrices):
    made = record(groups, (rows, 8, 8), matrices=matrices, group_offset=offset)
    return by_rows(made, 128), by_matrices(made, 128)


@pytest.mark.parametrize("seed", range(24))
def test_every_row_is_visited_once_by_its_matrix_and_every_tile_in_a_row(seed):
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
    for visits, own in zip(map(listed, made), ("tile", "matrix"), strict=True):
        found = np.full(rows, -1)
        for v in visits:
            assert 0 <= v.tile < tiles
            assert 0 <= v.source < tiles
            assert 0 <= v.matrix < matrices
            assert bool(v.flags & WHOLE) == (v.high - v.low == 128)
            if v.flags & WORK:
                part = slice(v.tile * 128 + v.low, v.tile * 128 + v.high)
                assert v.high > v.low
                assert (found[part] == -1).all()
                found[part] = v.matrix
        np.testing.assert_array_equal(found, owner)
        order = [getattr(v, own) for v in visits]
        assert sorted(set(order)) == list(range(tiles if own == "tile" else matrices))
        assert order == sorted(order)
        changes = [i == 0 or order[i] != order[i - 1] for i in range(len(order))]
        assert changes == [bool(v.flags & FIRST) for v in visits]
        if own == "matrix":
            ends = [i + 1 == len(order) or order[i + 1] != order[i] for i in range(len(order))]
            assert ends == [bool(v.flags & LAST) for v in visits]


def test_tiles_without_work_name_the_blocks_of_their_neighbours():
    visits = listed(tables(np.array([300, 200, 500]), np.int32(1), 1100, 1)[0])
    work = [v for v in visits if v.flags & WORK]
    leading = [v for v in visits if v.flags & LEADING]
    trailing = [v for v in visits if not v.flags & (WORK | LEADING)]
    assert ([v.tile for v in leading], [v.tile for v in work]) == ([0, 1], [2, 3])
    assert [v.tile for v in trailing] == [4, 5, 6, 7, 8]
    assert {v.source for v in leading} == {work[0].source}
    assert {v.source for v in trailing} == {work[-1].source}
