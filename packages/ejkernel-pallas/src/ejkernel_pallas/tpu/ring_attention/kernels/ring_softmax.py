"""Online softmax that continues from earlier ring steps (Milakov & Gimelshein 2018, Liu, Zaharia & Abbeel 2023).

Between ring steps a row is stored as its output and lse: the same softmax has row_max = lse, row_sum = 1, acc = output.
"""

import dataclasses
from typing import Any

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from ejkernel.arithmetic import LOG2E
from ejkernel_pallas.tpu.mosaic.launch import Ref
from ejkernel_pallas.tpu.mosaic.vectors import repeat_lanes, row_to_column
from ejkernel_pallas.tpu.tiled_attention.kernels.chunks import for_each_chunk
from ejkernel_pallas.tpu.tiled_attention.kernels.flash_forward import update_softmax, whole_row_sum
from ejkernel_pallas.tpu.tiled_attention.kernels.refs import ForwardRefs
from ejkernel_pallas.tpu.tiled_attention.plan import FIRST_PAIR_FLAG, LAST_PAIR_FLAG
from ejkernel_pallas.tpu.tiled_attention.spec import TiledSpec


@dataclasses.dataclass(frozen=True, kw_only=True)
class RingForwardRefs(ForwardRefs):
    """Refs of the forward kernel, in float32, with the results of the earlier ring steps.

    Attributes:
        output_before: [block_q, Dv].
        lse_before: [1, block_q].
    """

    output_before: Ref
    lse_before: Ref


def continue_softmax(entry: Any, refs: RingForwardRefs, spec: TiledSpec) -> None:
    """Updates the softmax with one tile pair.

    Args:
        entry: The pair's entry in the table.
        refs: Blocks and scratch memory.
        spec: The kernel's constants.
    """

    @pl.when((entry & FIRST_PAIR_FLAG) != 0)
    def _() -> None:
        _load_earlier_state(refs, spec)

    for_each_chunk(entry, spec, lambda at: update_softmax(refs, at))

    @pl.when((entry & LAST_PAIR_FLAG) != 0)
    def _() -> None:
        _store_normalised_state(refs, spec)


def _load_earlier_state(refs: RingForwardRefs, spec: TiledSpec) -> None:
    lse = row_to_column(refs.lse_before[...])
    has_keys = lse > -jnp.inf
    if not spec.sums_weights_on_mxu:  # row_sum has a partial sum per lane, so only one lane gets the 1
        has_keys = has_keys & (lax.broadcasted_iota(jnp.int32, lse.shape, 1) == 0)
    refs.row_max[...] = lse * LOG2E
    refs.row_sum[...] = jnp.where(has_keys, 1.0, 0.0)
    # lse = log(sum exp): with row_max = lse the earlier keys have total weight 1, and acc is their output.
    refs.acc[...] = refs.output_before[...]


def _store_normalised_state(refs: RingForwardRefs, spec: TiledSpec) -> None:
    refs.row_sum[...] = row_sum = whole_row_sum(refs, spec, slice(None))
    has_keys = row_sum > 0.0
    lse = (refs.row_max[...] + jnp.log2(jnp.where(has_keys, row_sum, 1.0))) * (1.0 / LOG2E)
    refs.lse[...] = jnp.where(has_keys, lse, -jnp.inf).T[:1]
    factor = 1.0 / jnp.where(refs.row_sum[...] > 0.0, refs.row_sum[...], 1.0)
    refs.output[...] = refs.acc[...] * repeat_lanes(factor, refs.acc.shape[1])
