"""Inputs for `flash_mla`: the named cases every backend is tested on, and inputs of any given shapes."""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp

from ejkernel.modules.operations.cases.tables import (
    ROW_FUNCTIONS_TAG,
    Row,
    even_cu_seqlens,
    fill_arguments,
    make_cases_of_rows,
    normal_like,
)
from ejkernel.ops.model import Case


@dataclasses.dataclass(frozen=True)
class LatentSizes:
    """Shape of a call: batch, tokens, query heads, KV heads, latent size, sizes of key parts and of values.

    `position_form` is the way in which keys get a position: "a", "b" or "c" of `flash_mla`.
    """

    b: int = 1
    t: int = 31
    h: int = 4
    g: int = 2
    r: int = 24
    n: int = 16
    rope: int = 8
    v: int = 12
    position_form: str = "b"
    dtype: Any = jnp.float32


def make_arrays(key: jax.Array, sizes: LatentSizes) -> dict[str, jax.Array]:
    """Returns normal arrays, with weights that keep what they project at size 1."""
    z = sizes
    shapes = {
        "query": (z.b, z.t, z.h, z.n + (z.rope if z.position_form == "b" else 0)),
        "key_value": (z.b, z.t, z.r),
        "w_kc": (z.r, z.g, z.n),
        "w_vc": (z.r, z.g, z.v),
    }
    shapes |= {"b_k": (z.b, z.t, z.rope)} if z.position_form != "a" else {}
    shapes |= {"b_q": (z.b, z.t, z.rope)} if z.position_form == "c" else {}
    keys = jax.random.split(key, len(shapes))
    fields = {name: jax.random.normal(k, shape) for k, (name, shape) in zip(keys, shapes.items(), strict=True)}
    return {name: (x * z.r**-0.5 if name[0] == "w" else x).astype(z.dtype) for name, x in fields.items()}


def _mask_and_bias_arguments(key: jax.Array, z: LatentSizes) -> dict[str, Any]:
    """Returns a mask with an empty row, and a bias: both count (T-19)."""
    mask, bias = jax.random.split(key)
    return {
        "attention_mask": jax.random.bernoulli(mask, 0.6, (1, 1, z.t, z.t)).at[:, :, 3].set(False),
        "bias": jax.random.normal(bias, (z.b, z.h, z.t, z.t)),
    }


def _sink_argument(key: jax.Array, shape: tuple[int, ...]) -> dict[str, Any]:
    return {"softmax_aux": jax.random.normal(key, shape)}


UNROTATED_SIZES = LatentSizes(position_form="a", b=2)
ROTARY_SIZES = LatentSizes()
SHARED_POSITION_SIZES = LatentSizes(position_form="c", t=30)

_CASE_TABLE: tuple[Row[LatentSizes], ...] = (
    ("one token", LatentSizes(t=1, h=2, g=1), lambda k: {"causal": True}, (), ("awkward",)),
    (
        "a, window, cap, coarse",
        UNROTATED_SIZES,
        lambda k: {"sliding_window": 9, "logits_soft_cap": 1.5, "softmax_dtype": jnp.bfloat16},
        ("sliding_window", "logits_soft_cap", "logits_dtype"),
        (),
    ),
    (
        "b, causal, sinks by head",
        ROTARY_SIZES,
        lambda k: {"causal": True, **_sink_argument(k, (4, 2))},
        ("causal", "softmax_aux"),
        (),
    ),
    (
        "c, mask and bias",
        SHARED_POSITION_SIZES,
        lambda k: _mask_and_bias_arguments(k, SHARED_POSITION_SIZES),
        ("mask", "bias"),
        ("awkward",),
    ),
    (
        "b, packed, dropout, lse",
        LatentSizes(t=60),
        lambda k: {
            "cu_seqlens": jnp.array([0, 20, 20, 51], jnp.int32),
            "causal": True,
            "deterministic": False,
            "dropout_prob": 0.3,
            "dropout_rng": jnp.uint32(7),
            "return_lse": True,
        },
        ("q_segment_ids", "kv_segment_ids", "causal", "dropout_prob", "dropout_seed"),
        (),
    ),
    ("bfloat16", LatentSizes(dtype=jnp.bfloat16), lambda k: {"causal": True}, ("causal",), ()),
    (
        "bfloat16, keys of 192 and values of 128",
        LatentSizes(t=67, h=2, g=2, n=128, rope=64, v=128, dtype=jnp.bfloat16),
        lambda k: {"causal": True},
        ("causal",),
        (),
    ),
    (
        "model",
        LatentSizes(t=4096, h=16, g=16, r=512, n=128, rope=64, v=128, dtype=jnp.bfloat16),
        lambda k: {"causal": True},
        (),
        ("bench",),
    ),
    (
        "small model",
        LatentSizes(t=512, h=4, g=4, r=128, n=64, rope=32, v=64),
        lambda k: {"causal": True},
        (),
        ("bench_cpu",),
    ),
    (
        "long heads",
        LatentSizes(b=3, t=9, h=4, g=2, r=64, n=64, rope=16, v=32),
        lambda k: {"causal": True},
        (),
        (ROW_FUNCTIONS_TAG,),
    ),
)


def cases(record_type: type) -> tuple[Case, ...]:
    """Returns the named cases as argument records of the given type."""
    return make_cases_of_rows(record_type, make_arrays, _CASE_TABLE)


def make_inputs(args: Any, key: jax.Array) -> Any:
    """Returns concrete arguments of the given shapes, valid as a call: normal floats, even lengths, everything
    attending.
    """
    return fill_arguments(args, key, functools.partial(_make_argument, args))


def _make_argument(args: Any, name: str, shape: Any, key: jax.Array) -> Any:
    if name == "cu_seqlens":
        return even_cu_seqlens(args.query.shape[0] * args.query.shape[1], shape)
    if name == "attention_mask":
        return jnp.ones(shape.shape, shape.dtype)
    if name == "dropout_rng":
        return key if jnp.issubdtype(shape.dtype, jax.dtypes.prng_key) else jnp.zeros(shape.shape, shape.dtype)
    return normal_like(key, shape, shape.shape[0] ** -0.5 if name in ("w_kc", "w_vc") else 1.0)
