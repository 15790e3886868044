"""Online softmax that goes on where the keys before left it (Milakov & Gimelshein 2018, Liu, Zaharia & Abbeel 2023).

Between loads of keys a row is its output and lse: a peak of lse, a total of 1 and the output as sum say the same.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from ejkernel_pallas.tpu.tiled_attention.spec import LANES, LOG2E, Spec, padded
from ejkernel_pallas.tpu.tiled_attention.tile import (
    Chunk,
    Refs,
    column,
    hidden,
    load_keys,
    noted,
    product,
    scores,
    visit,
    wide,
)
from ejkernel_pallas.tpu.tiled_attention.visits import FIRST, LAST


def scratch(spec: Spec, dtype: Any) -> dict[str, Any]:
    """What a kernel keeps of the query tile that it works on, and of a product."""
    chunk = (2, spec.q_chunk, spec.kv_chunk)
    return {
        **{name: pltpu.VMEM((spec.q_block, LANES), jnp.float32) for name in ("peak", "total", "fade")},
        "sum": pltpu.VMEM((spec.q_block, padded(spec.value_size)), jnp.float32),
        "scores": pltpu.VMEM(chunk, jnp.float32),
        "weights": pltpu.VMEM(chunk, dtype),
    }


def go_on(entry: Any, refs: Refs, spec: Spec) -> None:
    """One visit of a tile pair.

    Args:
        entry: The pair's place in the table of visits.
        refs: By name blocks, with `output_before` and `lse_before` of the keys before, and scratch memory.
        spec: The kernel's constants.
    """

    @pl.when((entry & FIRST) != 0)
    def _() -> None:
        _begin(refs)

    visit(entry, spec, lambda at: _fold(refs, at))

    @pl.when((entry & LAST) != 0)
    def _() -> None:
        _finish(refs)


def _begin(refs: Refs) -> None:
    lse = column(refs["lse_before"][...])
    # The total is kept by lane, and one lane has it.
    lane = lax.broadcasted_iota(jnp.int32, lse.shape, 1)
    refs["peak"][...] = lse * LOG2E
    refs["total"][...] = jnp.where((lane == 0) & (lse > -jnp.inf), 1.0, 0.0)
    refs["sum"][...] = refs["output_before"][...]


def _fold(refs: Refs, at: Chunk) -> None:
    """Takes a chunk into the running softmax; what registers would not hold is written down in between."""
    spec = at.spec
    s, _ = scores(refs, load_keys(refs["key"], at), refs["query"][at.q, :], at)
    refs["scores"][noted(at)] = s = hidden(s, -jnp.inf, refs, at) if at.masked else s
    before = refs["peak"][at.q, :]
    highest = functools.reduce(jnp.maximum, _by_lane(s))
    peak = jnp.maximum(before, jnp.max(highest, axis=1, keepdims=True))
    # Rows that have seen nothing yet: exp2(-inf - 0) = 0, not NaN.
    shift = jnp.where(peak == -jnp.inf, 0.0, peak) if spec.masks else peak
    refs["peak"][at.q, :] = peak
    refs["fade"][at.q, :] = jnp.exp2(before - shift)
    weights = jnp.exp2(refs["scores"][noted(at)] - wide(shift, at.keys))
    total = functools.reduce(jnp.add, _by_lane(weights))
    refs["total"][at.q, :] = refs["fade"][at.q, :] * refs["total"][at.q, :] + total
    refs["weights"][noted(at)] = weights.astype(refs["weights"].dtype)
    value = load_keys(refs["value"], at)
    found = product(refs["weights"][noted(at)], value, (1, 0), spec)
    refs["sum"][at.q, :] = wide(refs["fade"][at.q, :], value.shape[1]) * refs["sum"][at.q, :] + found


def _by_lane(x: jax.Array) -> list[jax.Array]:
    return [x[:, lane : lane + LANES] for lane in range(0, x.shape[1], LANES)]


def _finish(refs: Refs) -> None:
    total = refs["total"]
    total[...] = jnp.broadcast_to(jnp.sum(total[...], axis=1, keepdims=True), total.shape)
    some = total[...] > 0.0
    lse = (refs["peak"][...] + jnp.log2(jnp.where(some, total[...], 1.0))) * (1.0 / LOG2E)
    refs["lse"][...] = jnp.where(some, lse, -jnp.inf).T[:1]
    factor = 1.0 / jnp.where(total[...] > 0.0, total[...], 1.0)
    refs["output"][...] = refs["sum"][...] * wide(factor, refs["sum"].shape[1])
