"""Conformance cases of these kernels, which need contracted axes of whole swizzled rows: tiles of every kind of
group.
"""

from typing import Any

import jax
import jax.numpy as jnp

from ejkernel.modules.operations.cases.grouped_matmul import GroupedSizes, make_base_inputs
from ejkernel.modules.operations.cases.tables import Row, make_cases_of_rows, tagged_case
from ejkernel.modules.operations.gated_grouped_matmul import GatedGroupedMatmulArguments
from ejkernel.modules.operations.grouped_matmul import GroupedMatmulArguments
from ejkernel.ops.model import Case

# Empty groups, groups smaller than a warpgroup's rows, smaller than a tile and of several tiles, and unassigned rows.
UNEVEN_GROUPS_PROBLEM = GroupedSizes(520, 128, 320, (40, 0, 63, 1, 130, 200), dtype=jnp.bfloat16)
# Whole tiles of 256 columns, in pairs, for clusters.
CLUSTER_TILES_PROBLEM = GroupedSizes(520, 256, 512, (130, 0, 63, 100, 1, 150), dtype=jnp.bfloat16)
MATRIX_SUBSET_PROBLEM = GroupedSizes(520, 192, 192, (90, 33, 0, 211, 150), num_matrices=3, dtype=jnp.float16)


def _matrix_subset_options() -> dict[str, object]:
    return {"group_offset": 1, "transpose_rhs": True, "preferred_element_type": jnp.float16}


def cases() -> dict[str, tuple[Case, ...]]:
    """Returns the conformance cases of each operation, by its name."""
    rows: tuple[Row[GroupedSizes], ...] = (
        ("tiles", UNEVEN_GROUPS_PROBLEM, lambda key: {}, (), ()),
        ("tiles in pairs", CLUSTER_TILES_PROBLEM, lambda key: {"preferred_element_type": jnp.bfloat16}, (), ()),
        (
            "tiles of some groups, transposed",
            MATRIX_SUBSET_PROBLEM,
            lambda key: _matrix_subset_options(),
            ("group_offset", "transpose_rhs"),
            (),
        ),
    )
    return {"grouped_matmul": make_cases_of_rows(GroupedMatmulArguments, make_base_inputs, rows)}


# The groups are as above: empty, smaller than a warpgroup's rows, smaller than a tile, and of several tiles; some rows
# are unassigned.
FP8_UNEVEN_GROUPS_PROBLEM = GroupedSizes(520, 256, 320, (40, 0, 63, 1, 130, 200))
FP8_CLUSTER_TILES_PROBLEM = GroupedSizes(333, 512, 512, (130, 0, 63, 100, 1))
FP8_MATRIX_SUBSET_PROBLEM = GroupedSizes(300, 128, 128, (90, 33, 0, 100), num_matrices=2)


def _fp8_inputs(
    key: jax.Array, sizes: GroupedSizes, num_scales_per_row_and_column: tuple[int, int], **static_arguments: Any
) -> dict[str, Any]:
    """Returns 8-bit rows and matrices with the given numbers of scales per row and per column."""
    keys, matrices = jax.random.split(key, 4), sizes.num_matrices or len(sizes.group_sizes)
    shapes = (sizes.m, sizes.k), (matrices, sizes.n, sizes.k)
    lhs, rhs = ((2 * jax.random.normal(k, s)).astype(jnp.float8_e4m3fn) for k, s in zip(keys[:2], shapes, strict=True))
    # Outputs of about 0.05. Tensor cores sum 128 products with about 14 bits: an error of 1.3e-4 of the norm on an
    # H200.
    scales = {
        "lhs_scale": jax.random.uniform(keys[2], (sizes.m, num_scales_per_row_and_column[0]), jnp.float32, 0.25, 1.0),
        "rhs_scale": jax.random.uniform(
            keys[3], (matrices, num_scales_per_row_and_column[1], 1, sizes.n), jnp.float32, 2e-4, 2e-3
        ),
    }
    return {"lhs": lhs, "rhs": rhs, **scales, "transpose_rhs": True, **static_arguments}


def _tensor_core_accumulation_inputs(key: jax.Array) -> dict[str, Any]:
    """Returns operands with the smallest rounding errors, for `precision`, which also applies to the gradients.

    The gradients' products have float32 operands, which tensor cores truncate to 11 bits: scales that are powers of two
    and a 16-bit cotangent are exact.
    """
    static_arguments = {"precision": jax.lax.Precision.DEFAULT, "preferred_element_type": jnp.bfloat16}
    arrays, keys = _fp8_inputs(key, FP8_UNEVEN_GROUPS_PROBLEM, (1, 1), **static_arguments), jax.random.split(key)
    # Outputs below 0.03, where bfloat16's rounding is below the tolerance of the comparison.
    for name, scale_key, max_exponent in (("lhs_scale", keys[0], 0), ("rhs_scale", keys[1], -14)):
        arrays[name] = jnp.ldexp(
            jnp.float32(1), jax.random.randint(scale_key, arrays[name].shape, max_exponent - 2, max_exponent + 1)
        )
    return arrays


def _block_scale_inputs(key: jax.Array) -> dict[str, Any]:
    """Returns operands with scales of 128 x 128, for which the kernel loads a single scale instead of one per
    column.
    """
    arrays = _fp8_inputs(key, FP8_CLUSTER_TILES_PROBLEM, (4, 4))
    return {**arrays, "rhs_scale": jnp.repeat(arrays["rhs_scale"][..., ::128], 128, axis=-1)}


def fp8_cases() -> dict[str, tuple[Case, ...]]:
    """Returns the conformance cases of each operation for operands of 8 bits, by its name."""
    scale_names, some_matrices = ("lhs_scale", "rhs_scale"), {"group_offset": 1, "preferred_element_type": jnp.float32}
    rows: tuple[Row[GroupedSizes], ...] = (
        ("8 bits in blocks of columns", FP8_CLUSTER_TILES_PROBLEM, _block_scale_inputs, scale_names, ()),
        ("8 bits, quick sums", FP8_UNEVEN_GROUPS_PROBLEM, _tensor_core_accumulation_inputs, ("precision",), ()),
        (
            "8 bits in tiles",
            FP8_UNEVEN_GROUPS_PROBLEM,
            lambda key: _fp8_inputs(key, FP8_UNEVEN_GROUPS_PROBLEM, (2, 2)),
            scale_names,
            (),
        ),
        (
            "8 bits in pairs of tiles",
            FP8_CLUSTER_TILES_PROBLEM,
            lambda key: _fp8_inputs(key, FP8_CLUSTER_TILES_PROBLEM, (4, 2)),
            scale_names,
            (),
        ),
        (
            "8 bits, a scale a row",
            FP8_CLUSTER_TILES_PROBLEM,
            lambda key: _fp8_inputs(key, FP8_CLUSTER_TILES_PROBLEM, (1, 4)),
            scale_names,
            (),
        ),
        (
            "8 bits of some groups",
            FP8_MATRIX_SUBSET_PROBLEM,
            lambda key: _fp8_inputs(key, FP8_MATRIX_SUBSET_PROBLEM, (1, 1), **some_matrices),
            ("group_offset", "transpose_rhs"),
            (),
        ),
    )
    return {"grouped_matmul": make_cases_of_rows(GroupedMatmulArguments, make_base_inputs, rows)}


# Empty groups, groups smaller than a warpgroup's rows, smaller than a tile and of several tiles, and unassigned rows.
GROUP_SIZES = (40, 0, 63, 1, 130, 200)
# The groups are as above, with a mean so small that one warpgroup alone multiplies the last tile of a group.
SMALL_GROUP_SIZES = (40, 0, 63, 1, 130, 64, 65, 0, 5, 120)
_SWIGLU_OPTIONS: dict[str, Any] = {"alpha": 1.702, "beta": 1.0, "limit": 0.8}
# name, tokens, rows (None without indices), contracted, output columns, rows of each group, dtype, options
_GATED_CASE_TABLE: tuple[tuple[str, int, int | None, int, int, tuple[int, ...], Any, dict[str, Any]], ...] = (
    ("tiles", 520, None, 128, 192, GROUP_SIZES, jnp.bfloat16, {"activation": "gelu"}),
    ("tiles of gathered rows", 96, 520, 320, 256, GROUP_SIZES, jnp.bfloat16, {}),
    ("tiles of float16", 96, 520, 64, 64, GROUP_SIZES, jnp.float16, {"activation": "gelu"}),
    ("tiles of few rows", 96, 520, 128, 192, SMALL_GROUP_SIZES, jnp.bfloat16, {}),
    ("tiles with biases", 96, 520, 128, 192, GROUP_SIZES, jnp.bfloat16, {"rhs_bias": 0.5}),
    ("tiles of pairs", 96, 520, 128, 256, GROUP_SIZES, jnp.bfloat16, {"interleaved": True, **_SWIGLU_OPTIONS}),
    (
        "tiles of pairs with biases",
        520,
        None,
        192,
        320,
        GROUP_SIZES,
        jnp.float16,
        {"rhs_bias": 0.5, "interleaved": True},
    ),
    (
        "tiles of GPT-OSS",
        96,
        520,
        128,
        192,
        GROUP_SIZES,
        jnp.bfloat16,
        {"rhs_bias": 0.5, "interleaved": True, **_SWIGLU_OPTIONS},
    ),
    ("tiles of columns first", 96, 520, 128, 192, GROUP_SIZES, jnp.bfloat16, {"transpose_rhs": True}),
    (
        "tiles of pairs of columns first",
        520,
        None,
        128,
        256,
        SMALL_GROUP_SIZES,
        jnp.bfloat16,
        {"rhs_bias": 0.5, "interleaved": True, "transpose_rhs": True, **_SWIGLU_OPTIONS},
    ),
    ("tiles without a gate", 96, 520, 128, 320, GROUP_SIZES, jnp.bfloat16, {"gated": False, "activation": "relu2"}),
    (
        "tiles without a gate, columns first",
        96,
        520,
        64,
        256,
        SMALL_GROUP_SIZES,
        jnp.float16,
        {"gated": False, "activation": "silu", "alpha": 1.702, "rhs_bias": 0.5, "transpose_rhs": True},
    ),
)


def gated_cases() -> dict[str, tuple[Case, ...]]:
    """Returns the conformance cases of each operation, by its name."""
    return {"gated_grouped_matmul": tuple(_gated_case(*row) for row in _GATED_CASE_TABLE)}


def _gated_case(
    name: str,
    num_tokens: int,
    num_rows: int | None,
    contracted_size: int,
    num_columns: int,
    group_sizes: tuple[int, ...],
    dtype: Any,
    options: dict[str, Any],
) -> Case:
    def make_inputs(key: jax.Array) -> GatedGroupedMatmulArguments:
        keys, kwargs = jax.random.split(key, 4), dict(options)
        matrix_columns = 2 * num_columns if options.get("gated", True) else num_columns
        lhs = jax.random.normal(keys[0], (num_tokens, contracted_size))
        rhs = jax.random.normal(keys[1], (len(group_sizes), contracted_size, matrix_columns)) * contracted_size**-0.5
        if "transpose_rhs" in options:
            rhs = rhs.swapaxes(1, 2)
        if "rhs_bias" in options:
            kwargs["rhs_bias"] = options["rhs_bias"] * jax.random.normal(keys[3], (len(group_sizes), 1, matrix_columns))
        # Some indices refer to no token.
        indices = None if num_rows is None else jax.random.randint(keys[2], (num_rows,), -1, num_tokens + 1, jnp.int32)
        return GatedGroupedMatmulArguments(
            lhs=lhs.astype(dtype),
            rhs=rhs.astype(dtype),
            group_sizes=jnp.array(group_sizes, jnp.int32),
            indices=indices,
            **kwargs,
        )

    return tagged_case(name, make_inputs, (*(() if num_rows is None else ("indices",)), *options), ())
