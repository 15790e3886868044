"""Calls of the dense attention operations as the naive loop takes them, and what the loop makes of them."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import naive
import numpy as np

from ejkernel.types import MaskInfo

DIFFERENTIABLE = ("query", "key", "value", "bias", "softmax_aux")


def make(
    sizes: tuple[int, int, int, int] = (13, 21, 6, 5), heads: tuple[int, int] = (4, 2), seed: int = 0, **options: Any
) -> naive.Call:
    """A call of two rows with normal arrays, float64; sizes are (T, S, D, V), heads (H, Hk)."""
    (t, s, d, v), (h, g), rng = sizes, heads, np.random.default_rng(seed)
    shapes = {"query": (2, t, h, d), "key": (2, s, g, d), "value": (2, s, g, v)}
    return naive.Call(**{name: rng.normal(size=shape) for name, shape in shapes.items()}, **options)


def normal(*shape: int, seed: int = 5) -> np.ndarray:
    """Normal numbers, float64."""
    return np.random.default_rng(seed).normal(size=shape)


def some(*shape: int, seed: int = 6) -> np.ndarray:
    """A mask in which the fourth query attends to nothing."""
    attends = np.random.default_rng(seed).random(shape) < 0.6
    attends[:, :, 3:4] = False
    return attends


def output(call: naive.Call) -> np.ndarray:
    """[B, T, H, V] by the loop."""
    return naive.attention(call)


def weights(call: naive.Call) -> np.ndarray:
    """[B, H, T, S] by the loop: what a query gets of values of which each key has its own."""
    batch, keys, heads, _ = call.key.shape
    unit = np.broadcast_to(np.eye(keys)[:, None], (batch, keys, heads, keys))
    return naive.attention(dataclasses.replace(call, value=unit)).swapaxes(1, 2)


def arrays(call: naive.Call, dtype: Any = np.float64) -> dict[str, jax.Array]:
    """The differentiable arguments that are there."""
    found = {name: getattr(call, name) for name in DIFFERENTIABLE}
    return {name: jnp.asarray(array, dtype) for name, array in found.items() if array is not None}


def mask_info(call: naive.Call) -> MaskInfo | None:
    """Mask, segments and positions of a call."""
    parts = {
        "_attention_mask": call.mask,
        "_q_segment_ids": call.q_segment_ids,
        "_kv_segment_ids": call.kv_segment_ids,
        "q_positions": call.q_positions,
        "kv_positions": call.kv_positions,
    }
    present = {name: jnp.asarray(array) for name, array in parts.items() if array is not None}
    return MaskInfo(**present) if present else None


def options(call: naive.Call) -> dict[str, Any]:
    """The keyword arguments that all dense operations have."""
    return {
        "mask_info": mask_info(call),
        "softmax_scale": call.softmax_scale,
        "causal": call.causal,
        "sliding_window": call.sliding_window,
    }
