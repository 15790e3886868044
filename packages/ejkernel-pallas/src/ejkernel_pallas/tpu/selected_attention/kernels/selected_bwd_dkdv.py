"""The backward kernel of keys and values: their gradients stay in VMEM over all tiles of queries.

for every item:   dv += p^T do,  dk += ds^T q
"""

import jax.numpy as jnp
from jax.experimental import pallas as pl

from ejkernel_pallas.tpu.mosaic.vectors import matrix_product
from ejkernel_pallas.tpu.selected_attention.kernels.selected_bwd_dq import score_stages
from ejkernel_pallas.tpu.selected_attention.kernels.tile import (
    ProductItem,
    SelectedRefs,
    copy_statistics_to_all_lanes,
    for_each_item,
    gather_token_rows,
)
from ejkernel_pallas.tpu.selected_attention.spec import SelectedSpec


def selected_bwd_dkdv(refs: SelectedRefs, *, spec: SelectedSpec) -> None:
    """Processes one tile of keys and one tile of queries."""
    key_tile, query_tile = pl.program_id(2), pl.program_id(3)

    @pl.when(query_tile == 0)
    def _() -> None:
        refs.dkey[...] = jnp.zeros_like(refs.dkey)
        refs.dvalue[...] = jnp.zeros_like(refs.dvalue)
        # The last stage of the first empty items adds what is in these. Those of later tiles read zeros, which the
        # empty items after a tile of keys leave.
        refs.weights[...] = jnp.zeros_like(refs.weights)
        refs.dscores[...] = jnp.zeros_like(refs.dscores)

    copy_statistics_to_all_lanes(refs, spec)

    def accumulate(item: ProductItem) -> None:
        # The rows of the filler token are another query's, with weights of 0.
        query, cotangent = (
            gather_token_rows(x, item.queries(spec)).astype(spec.operand_dtype) for x in (refs.query, refs.cotangent)
        )
        refs.dvalue[item.part] += matrix_product(refs.weights[...], cotangent, (0, 0), spec.precision)
        refs.dkey[item.part] += matrix_product(refs.dscores[...], query, (0, 0), spec.precision) * spec.score_scale

    for_each_item(refs, spec, key_tile, (*score_stages(refs, spec), accumulate))
