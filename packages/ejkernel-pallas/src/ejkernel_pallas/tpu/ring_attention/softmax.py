"""Online softmax that goes on where the keys before left it (Milakov & Gimelshein 2018, Liu, Zaharia & Abbeel 2023).

Between loads of keys a row is its output and lse: a peak of lse, a total of 1 and the output as sum say the same.
"""

from typing import Any

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from ejkernel_pallas.tpu.tiled_attention.forward_kernel import fold, whole_total
from ejkernel_pallas.tpu.tiled_attention.spec import LOG2E, Spec
from ejkernel_pallas.tpu.tiled_attention.tile import Refs, column, visit, wide
from ejkernel_pallas.tpu.tiled_attention.visits import FIRST, LAST


def go_on(entry: Any, refs: Refs, spec: Spec) -> None:
    """One visit of a tile pair.

    Args:
        entry: The pair's place in the table of visits.
        refs: By name blocks, with `output_before` and `lse_before` of the keys before, and scratch memory.
        spec: The kernel's constants.
    """

    @pl.when((entry & FIRST) != 0)
    def _() -> None:
        _begin(refs, spec)

    visit(entry, spec, lambda at: fold(refs, at))

    @pl.when((entry & LAST) != 0)
    def _() -> None:
        _finish(refs, spec)


def _begin(refs: Refs, spec: Spec) -> None:
    lse = column(refs["lse_before"][...])
    some = lse > -jnp.inf
    if not spec.counted:  # the total is kept by lane, and one lane has it
        some = some & (lax.broadcasted_iota(jnp.int32, lse.shape, 1) == 0)
    refs["peak"][...] = lse * LOG2E
    refs["total"][...] = jnp.where(some, 1.0, 0.0)
    refs["sum"][...] = refs["output_before"][...]


def _finish(refs: Refs, spec: Spec) -> None:
    refs["total"][...] = total = whole_total(refs, spec, slice(None))
    some = total > 0.0
    lse = (refs["peak"][...] + jnp.log2(jnp.where(some, total, 1.0))) * (1.0 / LOG2E)
    refs["lse"][...] = jnp.where(some, lse, -jnp.inf).T[:1]
    factor = 1.0 / jnp.where(refs["total"][...] > 0.0, refs["total"][...], 1.0)
    refs["output"][...] = refs["sum"][...] * wide(factor, refs["sum"].shape[1])
