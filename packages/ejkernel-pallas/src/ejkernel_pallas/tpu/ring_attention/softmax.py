"""Online softmax that goes on where the keys before left it (Milakov & Gimelshein 2018, Liu, Zaharia & Abbeel 2023).

Between loads of keys a row is its output and lse: a peak of lse, a total of 1 and the output as sum say the same.
"""

from typing import Any

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from ejkernel_pallas.tpu.tiled_attention.forward_kernel import fold
from ejkernel_pallas.tpu.tiled_attention.spec import LANES, LOG2E, Spec, padded
from ejkernel_pallas.tpu.tiled_attention.tile import Refs, column, visit, wide
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

    visit(entry, spec, lambda at: fold(refs, at))

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


def _finish(refs: Refs) -> None:
    total = refs["total"]
    total[...] = jnp.broadcast_to(jnp.sum(total[...], axis=1, keepdims=True), total.shape)
    some = total[...] > 0.0
    lse = (refs["peak"][...] + jnp.log2(jnp.where(some, total[...], 1.0))) * (1.0 / LOG2E)
    refs["lse"][...] = jnp.where(some, lse, -jnp.inf).T[:1]
    factor = 1.0 / jnp.where(total[...] > 0.0, total[...], 1.0)
    refs["output"][...] = refs["sum"][...] * wide(factor, refs["sum"].shape[1])
