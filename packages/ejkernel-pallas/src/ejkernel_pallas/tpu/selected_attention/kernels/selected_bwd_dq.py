"""The backward kernel of queries: the same items as the forward kernel, with weights recomputed from lse.

for every item:   p = exp2(q k^T - lse),  ds = p (do v^T - delta),  dq += ds k
"""

import functools

import jax.numpy as jnp
from jax.experimental import pallas as pl

from ejkernel_pallas.tpu.mosaic.vectors import matrix_product, repeat_lanes
from ejkernel_pallas.tpu.selected_attention.kernels.tile import (
    ItemStage,
    ProductItem,
    SelectedRefs,
    attended_keys,
    copy_statistics_to_all_lanes,
    for_each_item,
    gather_token_rows,
    scatter_token_rows,
)
from ejkernel_pallas.tpu.selected_attention.spec import SelectedSpec


def selected_bwd_dq(refs: SelectedRefs, *, spec: SelectedSpec) -> None:
    """Processes one tile of queries and one tile of keys."""
    key_tile = pl.program_id(3)

    @pl.when(key_tile == 0)
    def _() -> None:
        refs.acc[...] = jnp.zeros_like(refs.acc)
        copy_statistics_to_all_lanes(refs, spec)

    def accumulate(item: ProductItem) -> None:
        dquery = matrix_product(refs.dscores[...], refs.key[item.part], (1, 0), spec.precision)
        scatter_token_rows(refs.acc, item.tokens, gather_token_rows(refs.acc, item.tokens) + dquery)

    for_each_item(refs, spec, key_tile, (*score_stages(refs, spec), accumulate))

    @pl.when(key_tile == spec.num_key_tiles - 1)
    def _() -> None:
        refs.dquery[...] = (refs.acc[: spec.block_q] * spec.score_scale).astype(refs.dquery.dtype)


def score_stages(refs: SelectedRefs, spec: SelectedSpec) -> tuple[ItemStage, ItemStage]:
    """Returns the first two stages of an item: its scores and the gradients of its weights, and then its weights and
    the gradients of its scores, without the scale.
    """
    return functools.partial(_score_and_weight_gradient_products, refs, spec), functools.partial(
        _score_gradients, refs, spec
    )


def _score_and_weight_gradient_products(refs: SelectedRefs, spec: SelectedSpec, item: ProductItem) -> None:
    queries = item.queries(spec)
    query, cotangent = (gather_token_rows(x, queries).astype(spec.operand_dtype) for x in (refs.query, refs.cotangent))
    refs.scores[...] = matrix_product(query, refs.key[item.part], (1, 1), spec.precision) * spec.log2_scale
    refs.dweights[...] = matrix_product(cotangent, refs.value[item.part], (1, 1), spec.precision)


def _score_gradients(refs: SelectedRefs, spec: SelectedSpec, item: ProductItem) -> None:
    queries, mask = item.queries(spec), attended_keys(item, spec)
    # Selected, not multiplied: weights of masked keys, and of the query in place of the filler token, may be infinite.
    weights = jnp.exp2(
        refs.scores[...] - repeat_lanes(gather_token_rows(refs.lse_in_all_lanes, queries), spec.padded_keys_per_part)
    )
    weights = jnp.where(mask, weights, 0.0)
    dscores = weights * (
        refs.dweights[...]
        - repeat_lanes(gather_token_rows(refs.delta_in_all_lanes, queries), spec.padded_keys_per_part)
    )
    refs.dscores[...] = jnp.where(mask, dscores, 0.0).astype(spec.operand_dtype)
    if refs.weights is not None:
        refs.weights[...] = weights.astype(spec.operand_dtype)
