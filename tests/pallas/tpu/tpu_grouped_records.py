"""Records of the grouped matmul, small and awkward, and the family's own answers for them."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np

from ejkernel.families.grouped_matmul import GroupedMatmul, reference
from ejkernel_pallas.tpu.grouped_matmul.config import TpuMatmul

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
    return GroupedMatmul(lhs=normal(m, k), rhs=rhs, group_sizes=sizes, **made, left_over="zero")


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
