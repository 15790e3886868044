"""Grouped matmul of 8 bits with scales in Mosaic GPU, lowered for CUDA without a GPU; and what it refuses."""

import dataclasses

import jax
import jax.numpy as jnp
import pytest

from ejkernel.families.grouped_matmul import GroupedMatmul
from ejkernel_pallas.gpu.grouped_matmul import config, fp8_refusal_reasons, spec
from ejkernel_pallas.gpu.grouped_matmul.forward import forward_fp8
from ejkernel_pallas.gpu.hopper.sizes import SHARED_MEMORY_BYTES

SHAPE = jax.ShapeDtypeStruct
EIGHT = jnp.float8_e4m3fn
DEFAULT = jax.lax.Precision.DEFAULT


def make(rows=520, depth=256, width=320, blocks=(2, 2), out=jnp.bfloat16, dtype=EIGHT, precision=None):
    return GroupedMatmul(
        lhs=SHAPE((rows, depth), EIGHT),
        rhs=SHAPE((5, width, depth), dtype),
        group_sizes=SHAPE((5,), jnp.int32),
        out_dtype=jnp.dtype(out),
        lhs_scale=SHAPE((rows, blocks[0]), jnp.float32),
        rhs_scale=SHAPE((5, blocks[1], 1, width), jnp.bfloat16),
        transpose_rhs=True,
        precision=precision,
        left_over="zero",
    )


CANDIDATES = config.fp8_candidates(make(width=256), None, "forward")
FP8_COLUMN_SPLIT_TILE, FP8_ROW_SPLIT_TILE = config.FP8_COLUMN_SPLIT_TILE, config.FP8_ROW_SPLIT_TILE


@pytest.mark.parametrize(
    ("params", "fields"),
    [
        (FP8_ROW_SPLIT_TILE, {"blocks": (1, 2)}),
        (dataclasses.replace(FP8_ROW_SPLIT_TILE, block_n=128, product_n=32), {"blocks": (1, 1), "out": jnp.float32}),
        (FP8_ROW_SPLIT_TILE, {"blocks": (1, 1), "precision": DEFAULT}),
        (FP8_COLUMN_SPLIT_TILE, {}),
        (FP8_COLUMN_SPLIT_TILE, {"blocks": (4, 4), "depth": 512}),
        (dataclasses.replace(FP8_COLUMN_SPLIT_TILE, dynamic_schedule=False), {"blocks": (1, 1)}),
        (dataclasses.replace(FP8_ROW_SPLIT_TILE, dynamic_schedule=True), {"blocks": (1, 1), "precision": DEFAULT}),
        (FP8_COLUMN_SPLIT_TILE, {"blocks": (1, 1), "precision": DEFAULT}),
        (dataclasses.replace(FP8_COLUMN_SPLIT_TILE, block_n=128, product_n=64), {}),
    ],
    ids=str,
)
def test_a_call_lowers(params, fields):
    record = make(**fields)
    traced = jax.jit(lambda record: forward_fp8(record, params)[0]).trace(record)
    assert traced.lower(lowering_platforms=("cuda",)).as_text().count("@mosaic_gpu") == 1
    assert (traced.out_info.shape, traced.out_info.dtype) == ((520, 320), record.out_dtype)


def test_columns_share_scales_if_all_columns_of_a_product_have_the_same():
    blocks = jnp.repeat(jax.random.uniform(jax.random.key(0), (3, 2, 3), jnp.float32), 128, axis=2)[..., :320]
    assert spec.columns_share_scales(blocks, 128) == 1
    assert spec.columns_share_scales(blocks, 64) == 1
    assert spec.columns_share_scales(blocks.at[1, 1, 300].add(1), 128) == 0
    assert spec.columns_share_scales(blocks[..., 64:], 128) == 0


@pytest.mark.parametrize(
    ("params", "split_by_columns", "sums_on_tensor_cores"),
    [
        (FP8_COLUMN_SPLIT_TILE, True, False),
        (FP8_ROW_SPLIT_TILE, False, True),
        # The public field alone sets the columns of a tile.
        (dataclasses.replace(FP8_COLUMN_SPLIT_TILE, block_n=128), False, True),
        (dataclasses.replace(FP8_COLUMN_SPLIT_TILE, block_n=128, product_n=64), True, False),
    ],
    ids=str,
)
def test_warpgroups_split_columns_if_a_tile_has_two_products(params, split_by_columns, sums_on_tensor_cores):
    scale_constants = spec.make_fp8_spec(make(blocks=(1, 1), precision=DEFAULT), params).scale_constants
    assert (scale_constants.split_by_columns, scale_constants.sums_on_tensor_cores) == (
        split_by_columns,
        sums_on_tensor_cores,
    )


@pytest.mark.parametrize("params", [*CANDIDATES, *config.FP8_TENSOR_CORE_SUM_TILES], ids=str)
def test_candidates_fit_shared_memory_and_are_valid(params):
    assert spec.fp8_shared_memory_bytes(params) <= SHARED_MEMORY_BYTES - spec.RESERVED_SMEM_BYTES
    spec.make_fp8_spec(make(), params)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("block_n", 100),
        ("product_n", 96),
        ("product_n", 32),
        ("stages", 1),
        ("stages", 9),
        ("group_m", 0),
        ("output_buffers", 0),
    ],
)
def test_invalid_tile_fields_are_errors(name, value):
    with pytest.raises(ValueError, match=f"{name}={value}"):
        spec.make_fp8_spec(make(), dataclasses.replace(FP8_ROW_SPLIT_TILE, **{name: value}))


@pytest.mark.parametrize(
    ("record", "words"),
    [
        (make(), []),
        (make(rows=65), []),
        (make(rows=63), ["63 rows"]),
        (make(width=100), ["100 columns"]),
        (make(blocks=(2, 4)), ["rhs_scale has a scale per 64"]),
        (make(depth=192, blocks=(1, 1)), ["lhs_scale has a scale per 192", "rhs_scale has a scale per 192"]),
        (make(dtype=jnp.float8_e5m2), ["float8_e5m2"]),
        (dataclasses.replace(make(), lhs_scale=None), ["lhs_scale"]),
        (dataclasses.replace(make(width=256), transpose_rhs=False), ["transpose_rhs"]),
    ],
)
def test_unsupported_records_are_refused_with_a_reason(record, words):
    found = fp8_refusal_reasons(record)
    assert len(found) == len(words)
    assert all(word in sentence for word, sentence in zip(words, found, strict=True))
