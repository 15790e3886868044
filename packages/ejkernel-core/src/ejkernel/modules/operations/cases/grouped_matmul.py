"""Inputs for `grouped_matmul`: the named cases every backend is tested on, and inputs of any given shapes."""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp

from ejkernel.modules.operations.cases.quantized_matmul import quantized_weights_like
from ejkernel.modules.operations.cases.tables import Row, fill_arguments, make_cases_of_rows, normal_like
from ejkernel.ops.model import Case
from ejkernel.planning.quantized_formats import Mode, make_format
from ejkernel.quantization import quantize


@dataclasses.dataclass(frozen=True)
class GroupedSizes:
    """Shape of a call: rows, contracted elements, columns, and the rows of each group."""

    m: int = 129
    k: int = 60
    n: int = 48
    group_sizes: tuple[int, ...] = (40, 0, 63, 1, 17)
    num_matrices: int | None = None
    dtype: Any = jnp.float32


PLAIN_SIZES = GroupedSizes()
SHARED_MATRICES_SIZES = GroupedSizes(num_matrices=2)


def _normal_array(key: jax.Array, name: str, *shape: int) -> dict[str, jax.Array]:
    return {name: jax.random.normal(key, shape, jnp.float32)}


def _group_offset_arguments(key: jax.Array) -> dict[str, jax.Array]:
    return {"group_offset": jnp.array([2], jnp.int32), **_normal_array(key, "existing_out", 129, 48)}


def _int8_matrices(key: jax.Array) -> dict[str, jax.Array]:
    weights, scales = jax.random.split(key)
    rhs = jax.random.randint(weights, (5, 60, 48), -127, 128).astype(jnp.int8)
    return {"rhs": rhs, "rhs_scale": jax.random.uniform(scales, (5, 4, 1, 48), jnp.float32, 0.002, 0.02)}


def _transposed_matrices(key: jax.Array) -> dict[str, Any]:
    scales, bias = jax.random.split(key)
    extra = {**_normal_array(scales, "rhs_scale", 5, 2, 1, 48), **_normal_array(bias, "rhs_bias", 5, 1, 48)}
    return {**_normal_array(key, "rhs", 5, 48, 60), **extra, "transpose_rhs": True}


def _eight_bit_operands(key: jax.Array, num_scale_blocks: tuple[int, int], **static_arguments: Any) -> dict[str, Any]:
    """Returns rows and matrices of 8 bits, with scales of as many blocks each."""
    dtype, keys = jnp.float8_e4m3fn, jax.random.split(key, 4)
    rows, matrices = (jax.random.normal(k, s) * 2 for k, s in zip(keys, ((129, 96), (5, 48, 96)), strict=False))
    if not static_arguments.get("transpose_rhs"):
        matrices = jnp.swapaxes(matrices, 1, 2)
    scales = (jax.random.uniform(keys[2], (129, num_scale_blocks[0]), jnp.float32, 0.25, 1.0),)
    scales += (jax.random.uniform(keys[3], (5, num_scale_blocks[1], 1, 48), jnp.float32, 0.02, 0.2),)
    fields = {"lhs": rows.astype(dtype), "rhs": matrices.astype(dtype)}
    return {**fields, "lhs_scale": scales[0], "rhs_scale": scales[1], **static_arguments}


def _packed_matrices(key: jax.Array, axis: str, mode: Mode = "affine") -> dict[str, Any]:
    """Returns matrices [60, 32] of 4 bits, or [64, 48] with `axis="col"`."""
    rows, columns = (32, 60) if axis == "row" else (48, 64)
    packed, scale, *zeros = quantize(jax.random.normal(key, (5, rows, columns)), 32, mode=mode, axis=axis)
    fields = {"rhs": packed, "rhs_scale": scale, "rhs_zeros": zeros[0] if zeros else None}
    return {**fields, "rhs_mode": mode, "rhs_group_size": 32, "transpose_rhs": axis == "col"}


EIGHT_BIT_SIZES = GroupedSizes(k=96)
SCALE_FIELDS = ("lhs_scale", "rhs_scale")


_CASE_TABLE: tuple[Row[GroupedSizes], ...] = (
    ("plain", PLAIN_SIZES, lambda k: {}, (), ()),
    ("one row", GroupedSizes(m=1, group_sizes=(0, 1, 0)), lambda k: {}, (), ("awkward",)),
    (
        "rows left over",
        GroupedSizes(group_sizes=(3, 0, 70)),
        lambda k: _normal_array(k, "existing_out", 129, 48),
        ("existing_out",),
        (),
    ),
    (
        "some of the groups",
        SHARED_MATRICES_SIZES,
        _group_offset_arguments,
        ("group_offset", "existing_out"),
        ("awkward",),
    ),
    ("bias", PLAIN_SIZES, lambda k: _normal_array(k, "rhs_bias", 5, 1, 48), ("rhs_bias",), ()),
    ("quantised", PLAIN_SIZES, _int8_matrices, ("rhs_scale",), ()),
    ("transposed, everything", PLAIN_SIZES, _transposed_matrices, ("rhs_scale", "rhs_bias"), ("awkward",)),
    (
        "bfloat16",
        GroupedSizes(dtype=jnp.bfloat16),
        lambda k: {"precision": jax.lax.Precision.HIGHEST},
        ("precision",),
        (),
    ),
    (
        "square",
        # No row is left over, so that the output is defined.
        GroupedSizes(k=48, group_sizes=(30, 99)),
        lambda k: {"transpose_rhs": True, "left_over": "undefined"},
        ("transpose_rhs",),
        ("awkward",),
    ),
    ("8 bits", EIGHT_BIT_SIZES, lambda k: _eight_bit_operands(k, (1, 1), transpose_rhs=True), SCALE_FIELDS, ()),
    ("8 bits in blocks", EIGHT_BIT_SIZES, lambda k: _eight_bit_operands(k, (3, 3)), SCALE_FIELDS, ("awkward",)),
    ("int4", PLAIN_SIZES, lambda k: _packed_matrices(k, "row"), (), ()),
    (
        "mxfp4, transposed",
        GroupedSizes(k=64, dtype=jnp.bfloat16),
        lambda k: _packed_matrices(k, "col", "mxfp4"),
        (),
        ("awkward",),
    ),
    ("rows with scales", PLAIN_SIZES, lambda k: {"lhs_scale": 1 + jax.random.uniform(k, (129, 2))}, ("lhs_scale",), ()),
    ("experts", GroupedSizes(8192, 2048, 1408, (128,) * 64, dtype=jnp.bfloat16), lambda k: {}, (), ("bench",)),
    ("small experts", GroupedSizes(1024, 256, 512, (64,) * 16), lambda k: {}, (), ("bench_cpu",)),
)


def cases(record_type: type) -> tuple[Case, ...]:
    """Returns the named cases as argument records of the given type."""
    return make_cases_of_rows(record_type, make_base_inputs, _CASE_TABLE)


def make_base_inputs(key: jax.Array, sizes: GroupedSizes) -> dict[str, jax.Array]:
    """Returns what every case gives."""
    z, (one, other) = sizes, jax.random.split(key)
    return {
        "lhs": jax.random.normal(one, (z.m, z.k), jnp.float32).astype(z.dtype),
        "rhs": jax.random.normal(other, (z.num_matrices or len(z.group_sizes), z.k, z.n), jnp.float32).astype(z.dtype),
        "group_sizes": jnp.array(z.group_sizes, jnp.int32),
    }


def make_inputs(args: Any, key: jax.Array) -> Any:
    """Returns concrete arguments of the given shapes, valid as a call: normal floats, groups of about the same size."""
    array_key, packed = jax.random.split(key)
    return dataclasses.replace(
        fill_arguments(args, array_key, functools.partial(_make_argument, args)), **packed_matrices_like(args, packed)
    )


def packed_matrices_like(args: Any, key: jax.Array) -> dict[str, Any]:
    """Returns packed matrices of normal weights, where matrices are packed."""
    if args.rhs_mode is None:
        return {}
    form = make_format(args.rhs_mode, args.rhs_bits, args.rhs_group_size)
    packed = quantized_weights_like({"w": args.rhs, "scales": args.rhs_scale}, form, key)
    names = {"rhs": "w", "rhs_scale": "scales", "rhs_zeros": "zeros", "rhs_tensor_scale": "tensor_scale"}
    return {name: packed.get(of) for name, of in names.items() if getattr(args, name) is not None}


def _make_argument(args: Any, name: str, shape: Any, key: jax.Array) -> jax.Array:
    if name == "group_sizes":
        ends = jnp.linspace(0, args.lhs.shape[0], shape.shape[0] + 1).astype(shape.dtype)
        return jnp.diff(ends)
    if name == "group_offset":
        return jnp.zeros(shape.shape, shape.dtype)
    if jnp.issubdtype(shape.dtype, jnp.integer):
        return jax.random.randint(key, shape.shape, -8, 8).astype(shape.dtype)
    return normal_like(key, shape)
