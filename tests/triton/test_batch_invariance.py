"""Rules of `batch_invariant` blocks do not read the sizes of one batch; those of kernels in CUDA C++ are here, too."""

import dataclasses

import jax
import jax.numpy as jnp
import pytest
from triton_chips import H200, assert_conforms

from ejkernel.ops.plugins import registry
from ejkernel.planning.fixed_sizes import with_fixed_sizes
from ejkernel_conformance.subjects import abstract_record

SIZES_OF_A_BATCH = ({"b": 1, "t": 1, "m": 1}, {"b": 40, "t": 3, "m": 3}, {"b": 2, "t": 9000, "m": 9000})
CLAIMS = {
    f"{implementation.family}-{implementation.name}": (op_name, implementation)
    for op_name, listed in registry().implementations.items()
    for implementation in listed
    if implementation.platform in ("triton", "cuda") and implementation.invariant_to
}
# What a sum depends on, of kernels whose other fields follow the batch.
FIELDS = {
    "selective_scan-cuda": ("lanes",),
    "paged_attention-triton": ("block_kv", "batch_invariant"),
    "cross_entropy-triton_ordered": ("block_v", "num_warps", "float32_logits"),
}


@pytest.mark.parametrize("claim", CLAIMS)
def test_one_configuration_serves_all_batches(claim):
    op_name, implementation = CLAIMS[claim]
    op = registry().op(op_name)
    records = [abstract_record(op, case) for case in op.cases]
    record = next(x for x in records if not any(implementation.invariance_limits(x)))
    rule = implementation.config.batch_invariant
    batches = [with_fixed_sizes(record, op.family.axes_of(record), sizes) for sizes in SIZES_OF_A_BATCH]
    parts = [rule(x, H200, "forward") for x in batches]
    names = FIELDS.get(claim, [field.name for field in dataclasses.fields(parts[0])])
    assert len({tuple(getattr(part, name) for name in names) for part in parts}) == 1


def test_hopper_multiplies_16_bits_in_tiles_that_fit_the_batch():
    """All its tiles sum in the same steps; those of float32 do not."""
    op = registry().op("grouped_matmul")
    rule = CLAIMS["grouped_matmul-triton"][1].config.batch_invariant

    def tile_rows(dtype, rows):
        arrays = (jax.ShapeDtypeStruct(shape, dtype) for shape in ((rows, 256), (4, 256, 256)))
        args, _ = op.bind((*arrays, jax.ShapeDtypeStruct((4,), jnp.int32)), {})
        return rule(jax.eval_shape(op.lower, args), H200, "forward").block_m

    assert tile_rows(jnp.bfloat16, 4) < tile_rows(jnp.bfloat16, 4096)
    assert tile_rows(jnp.float32, 4) == tile_rows(jnp.float32, 4096)


@pytest.mark.parametrize(("dtype", "is_first"), [(jnp.bfloat16, True), (jnp.float32, False)])
def test_packed_matrices_are_dequantised_first_for_many_rows_of_16_bits(dtype, is_first):
    op = registry().op("quantized_matmul")
    rule = CLAIMS["quantized_matmul-triton_ordered"][1].config.batch_invariant

    def tiles(rows):
        words, scales = jax.ShapeDtypeStruct((256, 32), jnp.uint32), jax.ShapeDtypeStruct((256, 4), jnp.float16)
        args, _ = op.bind((jax.ShapeDtypeStruct((rows, 256), dtype), words, scales, scales), {"group_size": 64})
        return rule(jax.eval_shape(op.lower, args), H200, "forward")

    assert (tiles(64).dequantize_first, tiles(65).dequantize_first) == (False, is_first)
    assert tiles(4) == tiles(64), "rows of MMA have other bits than those of WGMMA"


def test_claims_of_interpreted_kernels_hold():
    """The suite proves every claim on a GPU; these are the cheapest on a CPU."""
    operations = ("gather_reduce", "mean_pooling", "expert_routing")
    assert_conforms(operations, "test_batch_invariance")
