"""Calls of `flash_attention` made from combinations of options, for the naive loop, the reference and the kernels."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from dense_calls import DIFFERENTIABLE, arrays, mask_info
from naive import Call
from pairwise import Combination, pairwise

from ejkernel.modules import BwdParams, FlashAttentionConfig, FwdParams, flash_attention
from ejkernel.modules.operations.flash_attention import FlashAttentionArguments

__all__ = ["DIFFERENTIABLE", "arrays"]

HEADS, SIZE = 4, 8


def tiles(queries: int, keys: int) -> FlashAttentionConfig:
    """A configuration with these tiles in both passes."""
    fwd, bwd = (kind(q_blocksize=queries, kv_blocksize=keys) for kind in (FwdParams, BwdParams))
    return FlashAttentionConfig(fwd_params=fwd, bwd_params=bwd)


SMALL_TILES = tiles(8, 8)
# For `jax.jit` where compiling takes most of the time. Eager calls, and the conformance suite, compile as users do.
QUICK = {"xla_backend_optimization_level": "0"}

FACTORS: dict[str, list[Any]] = {
    "lengths": ["equal", "more keys", "more queries"],
    "kv_heads": [4, 2, 1],
    "values": [8, 12],
    "bias": [None, "full", "keys", "rows by head"],
    "mask": [None, "shared", "by head"],
    "segments": [False, True],
    "positions": [False, True],
    "packing": [None, "one", "two", "padded rows"],
    "causal": [False, True],
    "window": [None, (5, 3), (None, 2), (7, 0)],
    "cap": [None, 1.5],
    "sinks": [None, "shared", "by head"],
    "dropout": [0.0, 0.3],
    "normalize": [True, False],
}


def allowed(part: Combination) -> bool:
    """One vector of cumulative lengths serves both sides only if they are of one length."""
    return part.get("packing") != "one" or part.get("lengths", "equal") == "equal"


COMBINATIONS = pairwise(FACTORS, allowed)
PLAIN: Combination = {key: values[0] for key, values in FACTORS.items()}


def name(combination: Combination) -> str:
    """What differs from the plainest call."""
    said = [f"{key}={value}" for key, value in combination.items() if value != PLAIN.get(key)]
    return ", ".join(said).replace("=True", "") or "plain"


def make(combination: Combination, seed: int = 0) -> Call:
    """Arrays for a combination, float64."""
    rng, c = np.random.default_rng(seed), combination
    b = 1 if c["packing"] in ("one", "two") else 2
    t, s = {"equal": (20, 20), "more keys": (13, 21), "more queries": (21, 13)}[c["lengths"]]
    h, g, v = HEADS, c["kv_heads"], c["values"]
    bias = {"full": (b, h, t, s), "keys": (1, 1, 1, s), "rows by head": (b, h, t, 1)}.get(c["bias"])
    mask = {"shared": (b, 1, t, s), "by head": (1, h, t, s)}.get(c["mask"])
    sinks = {"shared": (3,), "by head": (h, 2)}.get(c["sinks"])
    attends = None if mask is None else rng.random(mask) < 0.6
    if attends is not None:
        attends[:, :, 3] = False  # a row with nothing to attend
    return Call(
        query=rng.normal(size=(b, t, h, SIZE)),
        key=rng.normal(size=(b, s, g, SIZE)),
        value=rng.normal(size=(b, s, g, v)),
        bias=None if bias is None else rng.normal(size=bias),
        mask=attends,
        **_tokens(c, rng, (b, t, s)),
        softmax_aux=None if sinks is None else rng.normal(size=sinks),
        softmax_scale=0.6 if c["cap"] else None,
        causal=c["causal"],
        sliding_window=c["window"],
        logits_soft_cap=c["cap"],
        dropout_prob=c["dropout"],
        dropout_seed=11,
        normalize_output=c["normalize"],
        logits_dtype=c.get("logits", "float32"),
    )


def _tokens(c: Combination, rng: np.random.Generator, sizes: tuple[int, int, int]) -> dict[str, np.ndarray]:
    b, t, s = sizes
    given = {}
    if c["segments"]:  # runs of equal ids with padding at the end and, in the last row, in front
        given |= {"q_segment_ids": _runs(b, t), "kv_segment_ids": _runs(b, s)}
    if c["positions"]:
        given |= {"q_positions": rng.integers(0, s, (b, t)), "kv_positions": np.arange(s)[None]}
    if c["packing"] == "padded rows":
        given |= {"cum_seqlens_q": np.array([0, t - 4, t - 4 + t]), "cum_seqlens_k": np.array([0, s, s + s - 5])}
    elif c["packing"]:
        given |= {"cum_seqlens_q": np.array([0, 5, 5, t - 6, t - 1])}  # with an empty sequence, and padding behind
    if c["packing"] == "two":
        given |= {"cum_seqlens_k": np.array([0, 4, 6, s - 2, s - 2])}
    return {field: np.asarray(array, np.int32) for field, array in given.items()}


def _runs(rows: int, length: int) -> np.ndarray:
    ids = np.minimum(np.arange(length) // 6, 2) - np.where(np.arange(length) >= length - 2, 9, 0)
    return np.stack([ids if row == 0 else np.roll(ids, 2) for row in range(rows)])


def arguments(call: Call, given: dict[str, jax.Array]) -> dict[str, Any]:
    """All arguments of a call by name, with the differentiable ones replaced by `given`."""
    lengths = {field: getattr(call, field) for field in ("cum_seqlens_q", "cum_seqlens_k")}
    return {
        **given,
        **{field: jnp.asarray(array) for field, array in lengths.items() if array is not None},
        "mask_info": mask_info(call),
        "softmax_scale": call.softmax_scale,
        "causal": call.causal,
        "sliding_window": call.sliding_window,
        "logits_soft_cap": call.logits_soft_cap,
        "dropout_prob": call.dropout_prob,
        "dropout_seed": call.dropout_seed,
        "normalize_output": call.normalize_output,
        "logits_dtype": call.logits_dtype,
    }


def record(call: Call, given: dict[str, jax.Array]) -> FlashAttentionArguments:
    """The argument record of a call."""
    return FlashAttentionArguments(**arguments(call, given))


POSITIONAL = ("query", "key", "value", "bias", "cum_seqlens_q", "cum_seqlens_k", "softmax_aux")


def run(call: Call, given: dict[str, jax.Array], **options: Any) -> jax.Array:
    """The public call on XLA, with several small tiles."""
    rest = arguments(call, given)
    positional = [rest.pop(field, None) for field in POSITIONAL]
    return flash_attention(*positional, **rest, **{"platform": "xla", "cfg": SMALL_TILES, **options})
