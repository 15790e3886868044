"""The forward kernel: online softmax over key tiles (Milakov & Gimelshein 2018, Dao et al. 2022)."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl

from ejkernel_pallas.tpu.tiled_attention.spec import LANES, LOG2E, Spec
from ejkernel_pallas.tpu.tiled_attention.tile import (
    Chunk,
    Refs,
    allowed,
    dropped,
    load_keys,
    product,
    scores,
    visit,
    wide,
)
from ejkernel_pallas.tpu.tiled_attention.visits import FIRST, LAST


def forward_kernel(table: Any, *refs: Any, names: tuple[str, ...], spec: Spec, batched: bool) -> None:
    """One visit of a tile pair.

    Args:
        table: Visits, int32 [(B|1) * steps].
        refs: Blocks and scratch memory.
        names: What each of them is.
        spec: The kernel's constants.
        batched: Whether every batch row has its own visits.
    """
    named = dict(zip(names, refs, strict=True))
    step = pl.program_id(2)
    entry = table[step + pl.program_id(0) * pl.num_programs(2) if batched else step]

    @pl.when((entry & FIRST) != 0)
    def _() -> None:
        named["peak"][...] = jnp.full_like(named["peak"], -jnp.inf)
        named["total"][...] = jnp.zeros_like(named["total"])
        named["sum"][...] = jnp.zeros_like(named["sum"])

    visit(entry, spec, lambda at: _fold(named, at))

    @pl.when((entry & LAST) != 0)
    def _() -> None:
        _finish(named, spec)


def _fold(refs: Refs, at: Chunk) -> None:
    """Takes a chunk into the running softmax: its peak, in every lane, and by lane its total; and its sum."""
    spec = at.spec
    value = load_keys(refs["value"], at)
    s, _ = scores(refs, load_keys(refs["key"], at), refs["query"][at.q, :], at)
    if at.masked:
        s = jnp.where(allowed(refs, at), s, -jnp.inf)
    before = refs["peak"][at.q, :]
    highest = functools.reduce(jnp.maximum, _by_lane(s))
    peak = jnp.maximum(before, jnp.max(highest, axis=1, keepdims=True))
    refs["peak"][at.q, :] = peak
    # Rows that have seen nothing yet: exp2(-inf - 0) = 0, not NaN.
    shift = jnp.where(peak == -jnp.inf, 0.0, peak) if spec.masks else peak
    weights, fade = jnp.exp2(s - wide(shift, at.keys)), jnp.exp2(before - shift)
    refs["total"][at.q, :] = fade * refs["total"][at.q, :] + functools.reduce(jnp.add, _by_lane(weights))
    weights = dropped(weights, refs, at).astype(value.dtype)
    faded = wide(fade, value.shape[1]) * refs["sum"][at.q, :]
    refs["sum"][at.q, :] = faded + product(weights, value, (1, 0), spec)


def _by_lane(x: jax.Array) -> list[jax.Array]:
    return [x[:, lane : lane + LANES] for lane in range(0, x.shape[1], LANES)]


def _finish(refs: Refs, spec: Spec) -> None:
    """Writes the output and lse of a query tile. The sink joins here, once."""
    peak, total = refs["peak"][...], jnp.sum(refs["total"][...], axis=1, keepdims=True)
    total = jnp.broadcast_to(total, peak.shape)
    fade = None
    if "sinks" in refs:
        sink = refs["sinks"][...] * LOG2E
        top = jnp.maximum(peak, sink)
        shift = jnp.where(top == -jnp.inf, 0.0, top)
        fade = jnp.exp2(peak - shift)
        peak, total = top, total * fade + jnp.exp2(sink - shift)
    some = total > 0.0
    total = jnp.where(some, total, 1.0)
    refs["lse"][...] = jnp.where(some, (peak + jnp.log2(total)) * (1.0 / LOG2E), -jnp.inf).T[:1]
    factor = spec.kept / total if fade is None else spec.kept * fade / total
    output = refs["sum"][...] * wide(factor, refs["sum"].shape[1])
    refs["output"][...] = output.astype(refs["output"].dtype)
