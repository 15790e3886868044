"""The forward kernel: online softmax over key tiles (Milakov & Gimelshein 2018, Dao et al. 2022)."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl

from ejkernel_pallas.tpu.tiled_attention.spec import LANES, LOG2E, LOWEST, Spec
from ejkernel_pallas.tpu.tiled_attention.tile import (
    Apart,
    Chunk,
    Refs,
    dropped,
    hidden,
    load_keys,
    noted,
    product,
    scores,
    visit,
    visited,
    wide,
)
from ejkernel_pallas.tpu.tiled_attention.visits import FIRST, LAST


def forward_kernel(table: Any, *refs: Any, names: tuple[str, ...], spec: Spec, apart: Apart) -> None:
    """One visit of a tile pair.

    Args:
        table: Visits, int32 [(B|1) * (H|1) * steps].
        refs: Blocks and scratch memory.
        names: What each of them is.
        spec: The kernel's constants.
        apart: Whether batch rows, and heads, have visits of their own.
    """
    named = dict(zip(names, refs, strict=True))
    entry = visited(table, apart)

    @pl.when((entry & FIRST) != 0)
    def _() -> None:
        named["peak"][...] = jnp.full_like(named["peak"], -jnp.inf)
        named["total"][...] = jnp.zeros_like(named["total"])
        named["sum"][...] = jnp.zeros_like(named["sum"])

    visit(entry, spec, lambda at: fold(named, at))

    @pl.when((entry & LAST) != 0)
    def _() -> None:
        _finish(named, spec)


def fold(refs: Refs, at: Chunk) -> None:
    """Takes a chunk into the running softmax: its peak, in every lane, and by lane its total; and its sum.

    Scores, weights and what fades are written down in between, where the compiler would else run out of registers.
    """
    spec = at.spec
    s, _ = scores(refs, load_keys(refs["key"], at), refs["query"][at.q, :], at)
    if at.masked:
        s = hidden(s, -jnp.inf, refs, at)
    refs["scores"][noted(at)] = s
    before = refs["peak"][at.q, :]
    highest = functools.reduce(jnp.maximum, _by_lane(s))
    peak = jnp.maximum(before, jnp.max(highest, axis=1, keepdims=True))
    # Rows that have seen nothing yet: exp2(-inf - 0) = 0, not NaN.
    shift = jnp.where(peak == -jnp.inf, 0.0, peak) if spec.masks or spec.biased else peak
    refs["peak"][at.q, :] = peak
    refs["fade"][at.q, :] = jnp.exp2(before - shift)
    weights = jnp.exp2(refs["scores"][noted(at)] - wide(shift, at.keys))
    total = functools.reduce(jnp.add, _by_lane(weights))
    refs["total"][at.q, :] = refs["fade"][at.q, :] * refs["total"][at.q, :] + total
    refs["weights"][noted(at)] = dropped(weights, refs, at).astype(refs["weights"].dtype)
    value = load_keys(refs["value"], at)
    found = product(refs["weights"][noted(at)], value, (1, 0), spec)
    refs["sum"][at.q, :] = wide(refs["fade"][at.q, :], value.shape[1]) * refs["sum"][at.q, :] + found


def _by_lane(x: jax.Array) -> list[jax.Array]:
    return [x[:, lane : lane + LANES] for lane in range(0, x.shape[1], LANES)]


def _finish(refs: Refs, spec: Spec) -> None:
    """Writes the output and lse of a query tile. The sink joins here, once."""
    total, fade = refs["total"], refs["fade"]
    total[...] = jnp.broadcast_to(jnp.sum(total[...], axis=1, keepdims=True), total.shape)
    if "sinks" in refs:
        sink, peak = refs["sinks"][...] * LOG2E, refs["peak"][...]
        top = jnp.maximum(peak, sink)
        shift = jnp.where(top == -jnp.inf, 0.0, top)
        fade[...] = jnp.exp2(peak - shift)
        refs["peak"][...], total[...] = top, total[...] * fade[...] + jnp.exp2(sink - shift)
    some = total[...] > 0.0
    lse = (refs["peak"][...] + jnp.log2(jnp.where(some, total[...], 1.0))) * (1.0 / LOG2E)
    if spec.biased:
        lse = jnp.where(refs["peak"][...] == LOWEST, jnp.finfo(jnp.float32).min, lse)
    refs["lse"][...] = jnp.where(some, lse, -jnp.inf).T[:1]
    factor = spec.kept / jnp.where(total[...] > 0.0, total[...], 1.0)
    fade[...] = factor * fade[...] if "sinks" in refs else factor
    output = refs["sum"][...] * wide(fade[...], refs["sum"].shape[1])
    refs["output"][...] = output.astype(refs["output"].dtype)
