"""The forward kernel: online softmax over key tiles (Milakov & Gimelshein 2018, Dao et al. 2022)."""

import functools
import math
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from ejkernel_pallas.tpu.tiled_attention.spec import LANES, LOG2E, LOWEST, Spec, padded
from ejkernel_pallas.tpu.tiled_attention.tile import (
    SUBLANES,
    Apart,
    Chunk,
    Refs,
    dropped,
    hidden,
    load_keys,
    note,
    notes,
    numbers,
    product,
    scores,
    turn_numbers,
    visit,
    visited,
    wide,
)
from ejkernel_pallas.tpu.tiled_attention.visits import FIRST, LAST

FINISHED = 512
"""Queries whose results are laid out one after another; a loop goes through more."""


def scratch(spec: Spec, dtype: Any) -> dict[str, Any]:
    """What a kernel keeps of the query tile that it works on, and of a product; `dtype` is that of values."""
    chunk = (spec.q_chunk, spec.kv_chunk)
    return {
        **{name: pltpu.VMEM((spec.q_block, LANES), jnp.float32) for name in ("peak", "total", "fade")},
        "sum": pltpu.VMEM((spec.q_block, padded(spec.value_size)), jnp.float32),
        **notes("scores", chunk, jnp.float32),
        **notes("weights", chunk, dtype),
        **numbers(spec),
    }


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
        turn_numbers(named, spec)

    visit(entry, spec, lambda at: fold(named, at))

    @pl.when((entry & LAST) != 0)
    def _() -> None:
        _finish(named, spec)


def fold(refs: Refs, at: Chunk) -> None:
    """Takes a chunk into the running softmax: its peak, in every lane; its total, by lane unless `counted`; its sum.

    Scores, weights and what fades are written down in between, where the compiler would else run out of registers.
    """
    spec = at.spec
    s, _ = scores(refs, load_keys(refs["key"], at), refs["query"][at.q, :], at)
    if at.masked:
        s = hidden(s, -jnp.inf, refs, at)
    note(refs, "scores", at)[...] = s
    before = refs["peak"][at.q, :]
    highest = functools.reduce(jnp.maximum, _by_lane(s))
    shift = peak = jnp.maximum(before, jnp.max(highest, axis=1, keepdims=True))
    if spec.biased or (at.masked and not spec.trapezoid):
        # Rows that have seen nothing yet: exp2(-inf - 0) = 0, not NaN. On a trapezoid every row sees the first key.
        shift = jnp.where(peak == -jnp.inf, 0.0, peak)
    refs["peak"][at.q, :] = peak
    refs["fade"][at.q, :] = jnp.exp2(before - shift)
    weights = jnp.exp2(note(refs, "scores", at)[...] - wide(shift, at.keys))
    if not spec.counted:
        _add(refs, "total", functools.reduce(jnp.add, _by_lane(weights)), at)
    note(refs, "weights", at)[...] = dropped(weights, refs, at).astype(refs["weights_0"].dtype)
    value = load_keys(refs["value"], at)
    if spec.counted:
        value = jnp.concatenate([value, jnp.ones_like(value)], axis=1)
    found = product(note(refs, "weights", at)[...], value, (1, 0), spec)
    if spec.counted:
        found, total = jnp.split(found, 2, axis=1)
        _add(refs, "total", total, at)
    _add(refs, "sum", found, at)


def _add(refs: Refs, name: str, found: jax.Array, at: Chunk) -> None:
    """Adds to what has faded of a sum."""
    refs[name][at.q, :] = wide(refs["fade"][at.q, :], found.shape[1]) * refs[name][at.q, :] + found


def _by_lane(x: jax.Array) -> list[jax.Array]:
    return [x[:, lane : lane + LANES] for lane in range(0, x.shape[1], LANES)]


def _finish(refs: Refs, spec: Spec) -> None:
    """Writes the output and lse of a query tile."""
    step = math.gcd(spec.q_block, FINISHED)

    def some(n: Any, carry: None) -> None:
        for first in range(0, step, LANES):
            _write(refs, spec, pl.ds(pl.multiple_of(n * step + first, LANES), LANES))

    lax.fori_loop(0, spec.q_block // step, some, None)


def _write(refs: Refs, spec: Spec, q: Any) -> None:
    """Writes the results of 128 queries. The sink joins here, once."""
    peak, total, factor = refs["peak"][q, :], whole_total(refs, spec, q), spec.kept
    if "sinks" in refs:
        sink, before = refs["sinks"][...] * LOG2E, peak
        peak = jnp.maximum(before, sink)
        shift = jnp.where(peak == -jnp.inf, 0.0, peak)
        fade = jnp.exp2(before - shift)
        total, factor = total * fade + jnp.exp2(sink - shift), factor * fade
    output = refs["sum"][q, :] * wide(factor / jnp.where(total > 0.0, total, 1.0), refs["sum"].shape[1])
    refs["output"][q, :] = output.astype(refs["output"].dtype)
    peak, total = as_row(peak), as_row(total)
    lse = (peak + jnp.log2(jnp.where(total > 0.0, total, 1.0))) * (1.0 / LOG2E)
    if spec.biased:
        lse = jnp.where(peak == LOWEST, jnp.finfo(jnp.float32).min, lse)
    refs["lse"][:, q] = jnp.where(total > 0.0, lse, -jnp.inf)


def whole_total(refs: Refs, spec: Spec, q: Any) -> jax.Array:
    """The total of some queries in every lane."""
    total = refs["total"][q, :]
    return total if spec.counted else jnp.broadcast_to(jnp.sum(total, axis=1, keepdims=True), total.shape)


def as_row(x: jax.Array) -> jax.Array:
    """[128, 128], the same in every lane, as [1, 128], without the unit that transposes and is slow at it."""
    sublane, lane = (lax.broadcasted_iota(jnp.int32, (SUBLANES, LANES), axis) for axis in (0, 1))
    folded = x[:SUBLANES]
    for row in range(SUBLANES, LANES, SUBLANES):
        folded = jnp.where(lane >= row, x[row : row + SUBLANES], folded)
    return jnp.sum(jnp.where(lane % SUBLANES == sublane, folded, 0.0), axis=0, keepdims=True)
