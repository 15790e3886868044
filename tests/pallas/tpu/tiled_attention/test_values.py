"""The attention kernels' numbers, interpreted, against the family's meaning."""

import functools
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P
from tpu_records import BACKWARD, CASES, FORWARD, answers, close, interpreted, record

from ejkernel.families.tiled_attention import causal_window_bounds
from ejkernel.ops.device import DeviceInfo, target_device
from ejkernel.types.pair_functions import mask_function, score_function
from ejkernel.types.pullback import Pullback
from ejkernel_pallas.tpu.mosaic.split_functions import row_values, split_function
from ejkernel_pallas.tpu.tiled_attention import config
from ejkernel_pallas.tpu.tiled_attention.backward import backward
from ejkernel_pallas.tpu.tiled_attention.config import (
    GradientTile,
    TpuBackward,
    TpuForward,
    backward_blocks,
    forward_blocks,
)
from ejkernel_pallas.tpu.tiled_attention.forward import forward
from ejkernel_pallas.tpu.tiled_attention.kernels import chunks, score_chunk
from ejkernel_pallas.tpu.tiled_attention.kernels.operands import with_segments_of_function
from ejkernel_pallas.tpu.tiled_attention.spec import make_spec

FIELDS = ("query", "key", "value")
WIDE = DeviceInfo(platform="tpu", vendor="google", kind="TPU v6 lite")


@jax.jit
def attend(made, cotangent):
    """Output, residuals and the gradients of all that has one."""
    wanted = frozenset(
        name
        for name in ("query", "key", "value", "bias", "softmax_aux", "score_mod")
        if getattr(made, name) is not None
    )
    output, residuals = forward(made, FORWARD)
    pullback = Pullback(record=made, residuals=residuals, output=output, cotangent=cotangent, grad_fields=wanted)
    return output, residuals, backward(pullback, BACKWARD)


def check(made):
    output, lse, cotangent, gradients = answers(made)
    with interpreted():
        got, residuals, found = attend(made, cotangent)
    assert got.dtype == made.query.dtype
    close(got, output, made.query.dtype)
    close(residuals.lse, lse, made.query.dtype)
    assert found.keys() == gradients.keys()
    for field, wanted in gradients.items():
        arrays, primals = jax.tree.leaves(found[field]), jax.tree.leaves(getattr(made, field))
        for x, primal, gradient in zip(arrays, primals, jax.tree.leaves(wanted), strict=True):
            assert x.dtype == primal.dtype
            close(x, gradient, made.query.dtype)
            assert jnp.all(jnp.isfinite(x)), field


@pytest.mark.parametrize("name", CASES)
def test_values_and_gradients(name):
    check(CASES[name])


def test_a_mask_function_that_is_a_window_has_the_program_of_that_window():
    shape, mask = (1, 300, 300, 1, 1, 32, 32), mask_function("mask_mod", lambda b, h, q, k: (q - k < 40) & (k <= q))
    programs = [
        str(jax.make_jaxpr(functools.partial(forward, config=FORWARD))(record(shape, **fields)))
        for fields in ({"mask_mod": lambda _: mask}, {"sliding_window": (39, 0)})
    ]
    assert programs[0] == programs[1]


def test_differences_of_indices_in_float32_have_the_bits_of_converted_integers(monkeypatch):
    """Indices of more than half the limit are subtracted as integers."""
    call, results, programs = CASES["functions of distances"], [], []
    _, _, cotangent, _ = answers(call)
    for limit in (score_chunk.MAX_EXACT_INDEX, 600, 599):
        monkeypatch.setattr(score_chunk, "MAX_EXACT_INDEX", limit)
        jax.clear_caches()
        with interpreted():
            results.append(attend(call, cotangent))
            programs.append(str(jax.make_jaxpr(attend)(call, cotangent)))
    assert programs[0] == programs[1] != programs[2]
    for x, expected in zip(jax.tree.leaves(results[0]), jax.tree.leaves(results[2]), strict=True):
        np.testing.assert_array_equal(x, expected)


def test_forward_kernels_of_wide_matrix_units_get_documents_of_a_function_as_segment_ids():
    """Some queries and keys are padding; one list of tile pairs for two batch rows stays one."""
    documents = jnp.asarray(np.sort(np.random.default_rng(2).integers(-1, 4, (2, 300))), jnp.int32)

    def by_row(b, h, q, k):
        return (documents[b, q] == documents[b, k]) & (documents[b, k] >= 0) & (k <= q)

    def shared(b, h, q, k):
        return (documents[0, q] == documents[0, k]) & (k <= q)

    first, second = (
        record((2, 300, 300, 2, 1, 32, 32), mask_mod=lambda _, x=x: mask_function("mask_mod", x))
        for x in (by_row, shared)
    )
    assert with_segments_of_function(first).mask_mod is not None
    with target_device(WIDE):
        rewritten = with_segments_of_function(first)
        assert (rewritten.mask_mod, causal_window_bounds(rewritten)) == (None, (None, 0))
        assert with_segments_of_function(second).mask_mod is not None
        check(first)


def test_equal_functions_under_different_meshes_share_their_parts():
    """Scalars of a function belong to the mesh under which it is traced first; its parts serve calls under others."""
    slopes = jnp.ones(4)

    def rows(*indices):
        traced = score_function("score_mod", lambda s, b, h, q, k: jnp.where(k > q, s, s * slopes[h]), jnp.float32)
        split = split_function(traced.program)
        assert not split.refusals
        return row_values(traced, split.rows, [x.reshape(1, 1, 1, 1) for x in indices])

    for devices in (2, 4):
        mesh = jax.make_mesh((devices,), ("x",), (AxisType.Auto,), devices=jax.devices()[:devices])
        run = jax.shard_map(rows, mesh=mesh, in_specs=(P(),) * 4, out_specs=P())
        (row,) = jax.eval_shape(run, *(jnp.zeros(1, jnp.int32),) * 4)
        assert row.shape == (1, 1, 1, 1)


@pytest.mark.parametrize("name", ["bfloat16", "bfloat16, padding and sinks"])
def test_wide_matrix_units_sum_the_weights(name):
    with target_device(WIDE):
        assert make_spec(CASES[name], forward_blocks(FORWARD)).sums_weights_on_mxu
        check(CASES[name])


def test_values_of_large_tiles_on_and_off_the_diagonal():
    """Whole square tiles, which are cut along the diagonal, and beside it loops go through their products."""
    made = record((1, 512, 512, 2, 1, 128, 128), causal=True)
    params = TpuForward(block_q=256, block_kv=256, chunk_q=128, chunk_kv=128)
    back = TpuBackward(
        dkv=GradientTile(block_q=256, block_kv=256), dq=GradientTile(block_q=256, block_kv=256), chunk=128
    )
    output, lse, cotangent, gradients = answers(made)

    @jax.jit
    def both(made, cotangent):
        got, residuals = forward(made, params)
        pullback = Pullback(
            record=made, residuals=residuals, output=got, cotangent=cotangent, grad_fields=frozenset(FIELDS)
        )
        return got, residuals.lse, backward(pullback, back)

    with (
        interpreted(),
        mock.patch.object(chunks, "MAX_UNROLLED_PAIRS", 128 * 128),
        mock.patch.object(config, "LARGE_TILE_SIZE", 256),
    ):
        got, found_lse, found = both(made, cotangent)
    close(got, output, made.query.dtype)
    close(found_lse, lse, made.query.dtype)
    for field in FIELDS:
        close(found[field], gradients[field], made.query.dtype)


def test_diagonal_products_divide_their_tile():
    """384 tokens are one tile, of which a product of 256 queries would be more than there are."""
    made = record((1, 384, 384, 1, 1, 64, 64), causal=True)
    output, lse, _, _ = answers(made)
    with interpreted():
        got, residuals = forward(made, TpuForward(block_q=384, block_kv=384, chunk_q=384, chunk_kv=384))
    close(got, output, made.query.dtype)
    close(residuals.lse, lse, made.query.dtype)


def test_product_sizes_of_large_backward_tiles():
    """Their sides are the other way around: of what a kernel owns there is a loop's step, of what it visits little."""
    large = TpuBackward(dkv=GradientTile(block_q=2048, block_kv=2048), dq=GradientTile(block_q=2048, block_kv=2048))
    products = [
        (blocks.chunk_q, blocks.chunk_kv) for blocks in (*backward_blocks(TpuBackward()), *backward_blocks(large))
    ]
    assert products == [(1024, 256), (256, 1024), (256, 1024), (1024, 256)]
