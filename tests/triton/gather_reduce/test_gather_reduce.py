"""Gather-reduce in Triton: its numbers in the interpreter, and what its kernels take of a chip."""

import jax
import jax.numpy as jnp
import pytest
from triton_chips import CHIPS, H200, assert_conforms, assert_fits_and_spills_nothing

from ejkernel.families.gather_reduce import GatherReduce
from ejkernel.ops import dispatch
from ejkernel.ops.device import target_device
from ejkernel.ops.plugins import registry
from ejkernel.types.pullback import Pullback
from ejkernel_triton import ahead, launch
from ejkernel_triton.gather_reduce import config
from ejkernel_triton.gather_reduce.backward import backward
from ejkernel_triton.gather_reduce.forward import forward

TESTS = "(test_value and not eager) or test_gradients or test_gives_gradient or test_candidates or test_vmap"


def test_conformance():
    assert_conforms(["gather_reduce"], TESTS)


def record_of(kind, dtype=jnp.bfloat16):
    """Dispatch or combine of 8192 tokens of 2048 channels, with 8 experts each."""
    shape = jax.ShapeDtypeStruct
    pairs, tokens = shape((65536, 1), jnp.int32), shape((8192, 8), jnp.int32)
    if kind == "dispatch":
        return GatherReduce(rows=shape((8192, 2048), dtype), indices=pairs, inverse=tokens)
    weights = shape((8192, 8), jnp.float32)
    return GatherReduce(rows=shape((65536, 2048), dtype), indices=tokens, inverse=pairs, weights=weights)


def passes(device):
    """Both passes with the tiles of a device."""

    def run(record):
        output, residuals = forward(record, config.heuristic(record, device, "forward"))
        wanted = frozenset({"rows"} if record.weights is None else {"rows", "weights"})
        saved = Pullback(record=record, residuals=residuals, output=output, cotangent=output, grad_fields=wanted)
        return backward(saved, config.heuristic(record, device, "backward"))

    return run


@pytest.mark.parametrize(
    ("chip", "kind", "dtype"),
    [
        *((chip, "combine", jnp.bfloat16) for chip in CHIPS),
        ("sm_90", "dispatch", jnp.bfloat16),
        ("sm_90", "combine", jnp.float32),
    ],
)
def test_kernels_fit_the_chip_and_spill_nothing(chip, kind, dtype):
    device = CHIPS[chip]
    with target_device(device), launch.collect_launches() as calls:
        jax.eval_shape(passes(device), record_of(kind, dtype))
    first = "scatter_copies_kernel" if kind == "dispatch" else "gather_sum_kernel"
    assert [call.kernel.__name__ for call in calls] == [first, "gather_bwd_kernel"]
    assert_fits_and_spills_nothing(calls, chip)
    if chip.startswith("sm_"):
        assert all("global.v4" in ahead.compile_for_chip(call, chip).assembly for call in calls)


@pytest.mark.parametrize("chip", ["sm_90", "gfx942"])
def test_copies_fit_the_chip_and_spill_nothing(chip):
    device, record = CHIPS[chip], record_of("dispatch")
    copies = [tiles for tiles in config.candidates(record, device, "forward") if tiles.scatter]
    for tiles in copies:
        with target_device(device), launch.collect_launches() as calls:
            jax.eval_shape(lambda record, tiles=tiles: forward(record, tiles)[0], record)
        assert_fits_and_spills_nothing(calls, chip)
    assert copies


def test_scatter_is_an_error_unless_tokens_are_copies_of_rows():
    tiles = config.GatherTiles(block_t=1, block_d=64, num_warps=1, scatter=True)
    with pytest.raises(ValueError, match="scatter=True"):
        jax.eval_shape(lambda record: forward(record, tiles)[0], record_of("combine"))
    assert not any(tiles.scatter for tiles in config.candidates(record_of("combine"), H200, "forward"))


def test_priority_is_above_xla():
    op = registry().ops["gather_reduce"]
    for direction in ("forward", "backward"):
        found = dispatch.choose(op, record_of("combine"), H200, "auto", direction)
        names = [verdict.implementation.name for verdict in found.verdicts]
        assert names.index("triton") < names.index("xla")
