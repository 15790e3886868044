"""Inputs for `gated_grouped_matmul`: the named cases every backend is tested on, and inputs of any given shapes."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp

from ejkernel.families import gated_grouped_matmul as family
from ejkernel.modules.operations.cases.grouped_matmul import packed_matrices_like
from ejkernel.modules.operations.cases.tables import normal_like, tagged_case
from ejkernel.ops.model import Case
from ejkernel.quantization import quantize
from ejkernel.types.arguments import optional_fields

# name, tokens, rows (None without indices), contracted, columns, rows of each group, dtype, other options, tags
_Row = tuple[str, int, int | None, int, int, tuple[int, ...], Any, dict[str, Any], tuple[str, ...]]
_GROUP_SIZES = (40, 0, 33, 1)
_CASE_TABLE: tuple[_Row, ...] = (
    ("gathered", 24, 81, 60, 36, _GROUP_SIZES, jnp.float32, {}, ()),
    ("bfloat16", 24, 81, 64, 64, _GROUP_SIZES, jnp.bfloat16, {}, ()),
    ("rows as they are", 70, None, 33, 20, (20, 0, 45), jnp.float32, {"activation": "gelu"}, ("awkward",)),
    # No row is left over, so that the output is defined.
    ("precision", 16, 40, 32, 16, (25, 15), jnp.float32, {"precision": "highest", "left_over": "undefined"}, ()),
    (
        "biased, interleaved, limited",
        24,
        81,
        60,
        36,
        _GROUP_SIZES,
        jnp.float32,
        {"rhs_bias": 0.5, "interleaved": True, "alpha": 1.702, "beta": 1.0, "limit": 0.8},
        (),
    ),
    ("columns first", 24, 81, 20, 36, _GROUP_SIZES, jnp.float32, {"transpose_rhs": True}, ()),
    ("no gate", 24, 81, 20, 36, _GROUP_SIZES, jnp.float32, {"gated": False, "activation": "relu2"}, ("awkward",)),
    ("layer", 8192, 65536, 2048, 768, (512,) * 128, jnp.bfloat16, {}, ("bench",)),
    ("small layer", 256, 1024, 256, 128, (64,) * 16, jnp.float32, {}, ("bench_cpu",)),
)


def cases(record_type: type) -> tuple[Case, ...]:
    """Returns the named cases as argument records of the given type."""
    return (
        *(_make_case(record_type, row) for row in _CASE_TABLE),
        *(_quantised_case(record_type, packed) for packed in (False, True)),
    )


def _quantised_case(record_type: type, is_packed: bool) -> Case:
    """Returns a case with matrices of float8 and scales of blocks, or of codes as GPT-OSS stores them."""

    def make(key: jax.Array) -> Any:
        keys = jax.random.split(key, 4)
        rhs = jax.random.normal(keys[0], (3, 24, 64)) * 0.2
        if is_packed:
            codes, scales = quantize(rhs, mode="mxfp4", axis="col")[:2]
            weights = {"rhs": codes, "rhs_scale": scales, "rhs_mode": "mxfp4"}
        else:
            scales = 1.5 + jax.random.uniform(keys[1], (3, 2, 1, 24))
            weights = {"rhs": rhs.astype(jnp.float8_e4m3fn), "rhs_scale": scales}
        lhs, sizes = jax.random.normal(keys[2], (20, 64)), jnp.array([13, 0, 9], jnp.int32)
        indices = jax.random.randint(keys[3], (25,), 0, 20, jnp.int32)
        options = {"transpose_rhs": True, "interleaved": True, "limit": 0.8}
        return record_type(lhs=lhs, group_sizes=sizes, indices=indices, **weights, **options)

    name, exercises = ("mxfp4, columns first", ()) if is_packed else ("float8, scales of blocks", ("rhs_scale",))
    return tagged_case(name, make, exercises, ())


def _make_case(record_type: type, row: _Row) -> Case:
    name, tokens, rows, contracted, columns, groups, dtype, options, tags = row

    def make(key: jax.Array) -> Any:
        keys = jax.random.split(key, 3)
        lhs = jax.random.normal(keys[0], (tokens, contracted))
        rhs = jax.random.normal(keys[1], (len(groups), contracted, 2 * columns)) * contracted**-0.5
        # Some name no token.
        indices = None if rows is None else jax.random.randint(keys[2], (rows,), -1, tokens + 1, jnp.int32)
        sizes = jnp.array(groups, jnp.int32)
        kwargs = dict(options)
        if "rhs_bias" in kwargs:
            kwargs["rhs_bias"] = kwargs["rhs_bias"] * jax.random.normal(keys[2], (len(groups), 1, 2 * columns))
        if "transpose_rhs" in kwargs:
            rhs = rhs.swapaxes(1, 2)
        return record_type(lhs=lhs.astype(dtype), rhs=rhs.astype(dtype), group_sizes=sizes, indices=indices, **kwargs)

    exercises = {*options, *(() if rows is None else ("indices",))} & optional_fields(family.FAMILY.record).keys()
    return tagged_case(name, make, tuple(sorted(exercises)), tags)


def make_inputs(args: Any, key: jax.Array) -> Any:
    """Returns concrete arguments of the given shapes: normal floats, tokens at random, rows spread evenly over the
    groups.
    """
    keys = jax.random.split(key, 3)
    tokens, groups = args.lhs.shape[0], args.group_sizes.shape[0]
    rows = tokens if args.indices is None else args.indices.shape[0]
    sizes = jnp.full(groups, rows // groups).at[0].add(rows % groups)
    fields = {
        "lhs": normal_like(keys[0], args.lhs),
        **_matrices_and_scales(args, keys[1]),
        "group_sizes": sizes.astype(args.group_sizes.dtype),
    }
    if args.indices is not None:
        fields["indices"] = jax.random.randint(keys[2], (rows,), 0, max(1, tokens)).astype(args.indices.dtype)
    if args.rhs_bias is not None:
        fields["rhs_bias"] = normal_like(keys[2], args.rhs_bias)
    return dataclasses.replace(args, **fields)


def _matrices_and_scales(args: Any, key: jax.Array) -> dict[str, Any]:
    """Returns matrices and their scales."""
    if args.rhs_mode is not None:
        return packed_matrices_like(args, key)
    if args.rhs_scale is None:
        return {"rhs": normal_like(key, args.rhs, args.lhs.shape[1] ** -0.5)}
    if jnp.issubdtype(args.rhs.dtype, jnp.integer):
        rhs = jax.random.randint(key, args.rhs.shape, -8, 8).astype(args.rhs.dtype)
    else:
        rhs = normal_like(key, args.rhs)
    return {"rhs": rhs, "rhs_scale": jnp.full(args.rhs_scale.shape, args.lhs.shape[1] ** -0.5, args.rhs_scale.dtype)}
