"""Calls of `ring_attention` on rings of forced host devices, and of `flash_attention` on one device."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType, Mesh
from jax.sharding import PartitionSpec as P

from ejkernel.modules import BwdParams, FwdParams, RingAttentionConfig, flash_attention, ring_attention
from ejkernel.types import MaskInfo

# For `jax.jit` where compiling takes most of the time. Eager calls, and the conformance suite, compile as users do.
QUICK = {"xla_backend_optimization_level": "0"}
SPREAD = P(None, "sp")

B, T, H, G, D, V = 2, 32, 4, 2, 8, 12


def tiles(queries: int, keys: int) -> RingAttentionConfig:
    """A configuration with these tiles in both passes."""
    fwd, bwd = (kind(q_blocksize=queries, kv_blocksize=keys) for kind in (FwdParams, BwdParams))
    return RingAttentionConfig(fwd_params=fwd, bwd_params=bwd)


def ring(size: int, axis: str = "sp") -> Mesh:
    """A mesh of one axis."""
    return jax.make_mesh((size,), (axis,), (AxisType.Auto,), devices=jax.devices()[:size])


def on(mesh: Mesh) -> dict[str, Any]:
    """The arguments that spread a call over a mesh of one axis."""
    return {"mesh": mesh, "in_specs": (SPREAD,) * 3, "out_specs": SPREAD, "axis_name": "sp"}


def floats(
    b: int = B,
    t: int = T,
    s: int = T,
    h: int = H,
    g: int = G,
    d: int = D,
    v: int = V,
    bias: Any = None,
    sinks: Any = None,
) -> tuple[Any, ...]:
    """query, key, value, and sinks and bias of the given shapes, float64."""
    rng = np.random.default_rng(0)
    shapes = ((b, t, h, d), (b, s, g, d), (b, s, g, v), sinks, bias)
    return tuple(None if shape is None else rng.normal(size=shape) for shape in shapes)


FULL = {"bias": (B, H, T, T), "sinks": (H, 2)}
IDS = jnp.array([[0] * 11 + [1] * 15 + [-1] * 6, [0] * 3 + [4] * 29], jnp.int32)
MASK = jax.random.bernoulli(jax.random.key(4), 0.7, (B, 1, T, T)).at[:, :, 5].set(False)
PLACES = jax.random.permutation(jax.random.key(5), T)[None].astype(jnp.int32)

# Every option of the operation, alone and with others.
OPTIONS: dict[str, dict[str, Any]] = {
    "full": {},
    "causal": {"causal": True},
    "window": {"sliding_window": (5, 2)},
    "causal window": {"causal": True, "sliding_window": (6, 0)},
    "open window": {"sliding_window": (None, 3)},
    "packed, causal, capped": {
        "causal": True,
        "logits_soft_cap": 2.0,
        "mask_info": MaskInfo(_q_segment_ids=IDS, _kv_segment_ids=IDS),
    },
    "mask and segments": {"mask_info": MaskInfo(_attention_mask=MASK, _q_segment_ids=IDS, _kv_segment_ids=IDS)},
    "positions": {
        "causal": True,
        "sliding_window": (20, 0),
        "mask_info": MaskInfo(q_positions=PLACES, kv_positions=jnp.arange(T)[None]),
    },
}


def graded(call: Any, arrays: tuple[Any, ...], **placed: Any) -> Any:
    """((weighted sum, output), gradients of all arrays that are there)."""
    return compiled(call, arrays, **placed)([jnp.asarray(x) for x in arrays if x is not None])


def compiled(call: Any, arrays: tuple[Any, ...], **placed: Any) -> Any:
    """arrays that are there -> as `graded`, compiled quickly."""
    there = [n for n, x in enumerate(arrays) if x is not None]

    def loss(given: list[jax.Array]) -> tuple[jax.Array, jax.Array]:
        full: list[Any] = [None] * len(arrays)
        for n, x in zip(there, given, strict=True):
            full[n] = x
        output = call(*full, **placed)
        weights = np.random.default_rng(1).normal(size=output.shape).astype(output.dtype)
        return jnp.vdot(weights, output), output

    return jax.jit(jax.value_and_grad(loss, has_aux=True), compiler_options=QUICK)


def quickly(call: Any, *arrays: Any, **options: Any) -> Any:
    """A call with little effort spent on compiling."""
    return jax.jit(functools.partial(call, **options), compiler_options=QUICK)(*arrays)


def flash(query: Any, key: Any, value: Any, sinks: Any = None, bias: Any = None, **options: Any) -> jax.Array:
    """`flash_attention` in the order of `ring_attention`'s arguments."""
    return flash_attention(query, key, value, bias, None, None, sinks, **options)


def spread(query: Any, key: Any, value: Any, sinks: Any = None, bias: Any = None, **options: Any) -> jax.Array:
    """`ring_attention` with small tiles."""
    return ring_attention(query, key, value, sinks, bias, **{"cfg": tiles(8, 8), **options})


def check(got: Any, want: Any, rtol: float = 2e-5, atol: float = 1e-5) -> None:
    """Raises AssertionError unless two results of `graded` agree."""
    (_, output), gradients = got
    (_, wanted), wanted_gradients = want
    np.testing.assert_allclose(output, wanted, rtol=rtol, atol=atol / 5)
    for n, (one, other) in enumerate(zip(gradients, wanted_gradients, strict=True)):
        np.testing.assert_allclose(one, other, rtol=rtol, atol=atol, err_msg=f"gradient {n}")
