"""The gated product on TPUs: its numbers, interpreted, and its programs, by the compiler of real chips."""

import dataclasses
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from tpu_chips import compiled, on_chips
from tpu_races import found
from tpu_records import close, interpreted, simulated

from ejkernel.families.gated_grouped_matmul import GatedGroupedMatmul, reference
from ejkernel.ops.device import DeviceInfo, target_device
from ejkernel.types.pullback import Pullback
from ejkernel_pallas.tpu.grouped_matmul import config, implementations
from ejkernel_pallas.tpu.grouped_matmul.backward import gated_backward
from ejkernel_pallas.tpu.grouped_matmul.config import TpuMatmul
from ejkernel_pallas.tpu.grouped_matmul.forward import gated_forward
from ejkernel_pallas.tpu.profile import CHIPS as PROFILED

TILES = TpuMatmul(block_m=128, block_k=128, block_n=128)
ONE_STEP = TpuMatmul(block_m=256, block_k=1024, block_n=1024)
GPT_OSS = {"interleaved": True, "alpha": 1.702, "beta": 1.0, "limit": 0.8}


def record(groups=(100, 0, 60), shape=(70, 200, 200, 256), dtype="float32", bias=False, indices=True, **fields):
    """A record of (T, M, K, F) with normal inputs, some of whose rows name no token."""
    (tokens, rows, contracted, columns), random = shape, np.random.default_rng(5)
    width = columns * (2 if fields.get("gated", True) else 1)
    rhs = random.normal(size=(len(groups), contracted, width)) * contracted**-0.5
    lhs = random.normal(size=(tokens if indices else rows, contracted))
    return GatedGroupedMatmul(
        lhs=jnp.asarray(lhs, dtype),
        rhs=jnp.asarray(rhs.swapaxes(1, 2) if fields.get("transpose_rhs") else rhs, dtype),
        group_sizes=jnp.asarray(groups, jnp.int32),
        indices=jnp.asarray(random.integers(-1, tokens + 1, rows), jnp.int32) if indices else None,
        rhs_bias=jnp.asarray(random.normal(size=(len(groups), 1, width)), dtype) if bias else None,
        left_over="zero",
        **fields,
    )


CASES = {
    "halves": (partial(record, bias=True), TILES),
    "halves in one step, transposed": (partial(record, transpose_rhs=True, indices=False), ONE_STEP),
    "halves, columns no tile of the configuration divides": (
        partial(record, shape=(70, 200, 100, 384), activation="gelu"),
        TpuMatmul(block_m=128, block_k=128, block_n=256),
    ),
    "halves within a lane group": (partial(record, shape=(70, 200, 200, 150), bias=True, limit=0.5), TILES),
    "interleaved": (partial(record, shape=(70, 200, 200, 300), bias=True, **GPT_OSS), TILES),
    "interleaved, transposed, few columns": (
        partial(record, shape=(70, 200, 200, 20), bias=True, transpose_rhs=True, **GPT_OSS),
        TILES,
    ),
    "no gate": (partial(record, gated=False, activation="relu2", transpose_rhs=True), TILES),
}


def passes(made, cotangent, config=TILES):
    """The output, and the gradients of all fields."""
    fields = frozenset(name for name in ("lhs", "rhs", "rhs_bias") if getattr(made, name) is not None)
    pullback = Pullback(record=made, residuals=(), output=None, cotangent=cotangent, grad_fields=fields)
    return gated_forward(made, config)[0], gated_backward(pullback, config)


def compare(made, config):
    fields = {name: x for name in ("lhs", "rhs", "rhs_bias") if (x := getattr(made, name)) is not None}
    output, pull = jax.vjp(lambda fields: reference(dataclasses.replace(made, **fields))[0], fields)
    cotangent = jnp.asarray(np.random.default_rng(3).normal(size=output.shape), output.dtype)
    got, gradients = jax.jit(partial(passes, config=config))(made, cotangent)
    expected = {"output": output, **pull(cotangent)[0]}
    for name, wanted in expected.items():
        mine = got if name == "output" else gradients[name]
        assert (mine.dtype, mine.shape) == (wanted.dtype, wanted.shape), name
        size = float(jnp.abs(wanted.astype(jnp.float32)).max())
        close(mine / size, wanted / size, made.lhs.dtype)


@pytest.mark.parametrize("name", CASES)
def test_values_and_gradients(name):
    make, config = CASES[name]
    with interpreted():
        compare(make(), config)


@pytest.mark.parametrize("kind", ["TPU v5 lite", "TPU7x"])
def test_values_of_bfloat16(kind):
    with interpreted(), target_device(DeviceInfo(platform="tpu", vendor="google", kind=kind)):
        compare(record(shape=(70, 200, 256, 150), dtype="bfloat16", bias=True, **GPT_OSS), ONE_STEP)


def test_no_races():
    with simulated():
        compare(record((70, 30), (40, 130, 130, 128), bias=True), TILES)
    assert not found()


def test_a_work_list_that_scalar_memory_has_no_room_for_is_refused():
    (gated,) = (x for x in implementations() if x.family == "gated_grouped_matmul")
    shapes = jax.eval_shape(lambda: record(shape=(70, 200, 256, 256)))
    many = dataclasses.replace(shapes, indices=jax.ShapeDtypeStruct((2**26,), jnp.int32))
    (reason,) = gated.requires.extra(many)
    assert "SMEM" in reason


def test_a_work_list_of_fixed_tiles_that_scalar_memory_has_no_room_for_is_refused():
    """Tiles outside of a `batch_invariant` block have more rows, and their list is shorter."""
    (gated,) = (x for x in implementations() if x.family == "gated_grouped_matmul")
    shapes = jax.eval_shape(lambda: record(shape=(70, 200, 256, 256)))
    many = dataclasses.replace(shapes, indices=jax.ShapeDtypeStruct((6_000_000,), jnp.int32))
    (reason,) = gated.invariance_limits(many)
    assert "SMEM" in reason
    assert not list(gated.requires.extra(many))
    assert not list(gated.invariance_limits(shapes))


def test_a_tile_that_needs_all_columns_is_refused_where_memory_is_too_small():
    (gated,) = (x for x in implementations() if x.family == "gated_grouped_matmul")
    shapes = jax.eval_shape(lambda: record(shape=(70, 200, 256, 200 * 128 + 64), dtype="bfloat16"))
    (reason,) = gated.requires.extra(shapes)
    assert "rhs" in reason
    assert "25664" in reason
    assert not list(gated.requires.extra(dataclasses.replace(shapes, interleaved=True)))
    tiles = config.gated_heuristic(jax.eval_shape(lambda: record(shape=(70, 200, 256, 1000))), DEVICE, "forward")
    assert tiles.block_n == 1024


DEVICE = DeviceInfo(platform="tpu", vendor="google", kind="TPU v5 lite")


@pytest.mark.needs("libtpu")
@pytest.mark.parametrize(("name", "chip"), on_chips(["halves", "halves within a lane group", "interleaved", "no gate"]))
def test_compiles_for_every_chip(name, chip):
    made = jax.eval_shape(lambda: CASES[name][0](dtype="bfloat16"))
    with target_device(DeviceInfo(platform="tpu", vendor="google", kind=PROFILED[chip].kind)):
        text = compiled(lambda made: gated_forward(made, TILES)[0], (made,), chip).as_text()
    assert "ejkernel_gated_grouped_matmul" in text
