"""The loss of an indexer's dense warm-up: its distribution over all keys against attention's."""

from collections.abc import Iterable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Integer

from ejkernel.families import dense_indexer_loss as family
from ejkernel.modules.operations.cases import lightning_indexer_dense_loss as cases
from ejkernel.modules.operations.configs import LightningIndexerDenseLossConfig
from ejkernel.modules.operations.shared.conditions import cumulative_length_conditions, have_ranks
from ejkernel.modules.operations.shared.dense_arguments import check_cum_seqlens
from ejkernel.modules.operations.shared.key_ranges import key_ranges
from ejkernel.modules.operations.shared.latent_inputs import set_canonical_values
from ejkernel.modules.operations.shared.shapes import (
    as_flag,
    as_number,
    as_window,
    check_cumulative_lengths,
    check_dtype,
    check_not_empty,
    check_same_dtype,
    check_shape,
)
from ejkernel.ops.argument_records import ArgumentRecord
from ejkernel.ops.execution.kernel import Kernel
from ejkernel.ops.model import Op
from ejkernel.ops.operation import document_options, run_operation
from ejkernel.ops.values import Condition


@document_options
def lightning_indexer_dense_loss(
    query: Float[Array, "b t h d"],
    key: Float[Array, "b s g d"],
    query_index: Float[Array, "b t j e"],
    key_index: Float[Array, "b s e"],
    index_weights: Float[Array, "b t j"],
    cum_seqlens_q: Integer[Array, " n"] | None = None,
    cum_seqlens_k: Integer[Array, " n"] | None = None,
    *,
    softmax_scale: float | None = None,
    index_softmax_scale: float | None = None,
    causal: bool = True,
    sliding_window: int | tuple[int | None, int | None] | None = None,
    platform: str | None = None,
    cfg: LightningIndexerDenseLossConfig | None = None,
    mesh: jax.sharding.Mesh | None = None,
    in_specs: Any = None,
    out_specs: Any = None,
) -> Float[Array, "b t"]:
    """Returns KL(attention || indexer) over all keys of each query, in memory linear in T (DeepSeek-V3.2's warm-up).

    Shape letters: B batch, T queries, S keys, H query heads, Hk KV heads, D head size, Hi indexer heads, Di their size.
    Query head h reads KV head `h // (H // Hk)`. The target is the softmax of attention, averaged over heads, the
    indexer's distribution the softmax of the scores that `lightning_indexer` computes from the same arrays. The
    formulas are in `ejkernel.families.dense_indexer_loss`.

    This trains the indexer before attention is sparse; `lightning_indexer_loss` is for the stage after it, over the
    selected keys. No array [T, S] is in memory: both passes compute tiles of scores again.

    Attention is the target and constant: there are gradients of the indexer's arrays alone.

    Over devices, batch and the query's tokens can be split; heads cannot, as the target is a mean over all of them.

    Args:
        query: [B, T, H, D] floating, the queries of attention. Has no gradient here.
        key: [B, S, Hk, D], dtype of query; H is a multiple of Hk. Has no gradient here.
        query_index: [B, T, Hi, Di] floating, queries of the indexer.
        key_index: [B, S, Di], dtype of query_index.
        index_weights: [B, T, Hi] floating, weights of the indexer's heads, with the model's own factor.
        cum_seqlens_q: Cumulative query lengths, int, as in `lightning_indexer`: [N + 1] of packed sequences with B = 1,
            else [B + 1] of rows with padding.
        cum_seqlens_k: The same for keys; None means those of the queries.
        softmax_scale: Factor on attention's scores, the same as in the attention; None means `D ** -0.5`, which is not
            the scale of absorbed keys.
        index_softmax_scale: Factor on the products of the indexer; None means `Di ** -0.5`.
        causal: Key position at most query position; the last query of a sequence has the position of its last key.
        sliding_window: `w >= 1`, meaning `(w, w)`, or `(left, right)`, inclusive; None on a side leaves it open.

    Returns:
        [B, T] float32 (float64 for float64), at least 0 but for rounding; 0 for padding and for a query without a key.

    Example:
        ```python
        import jax, jax.numpy as jnp
        from ejkernel.modules import lightning_indexer_dense_loss

        keys = jax.random.split(jax.random.key(0), 4)
        query, key = jax.random.normal(keys[0], (1, 64, 8, 32)), jax.random.normal(keys[1], (1, 64, 2, 32))
        query_index, weights = jax.random.normal(keys[2], (1, 64, 4, 16)), jnp.ones((1, 64, 4))

        def loss(key_index):
            return lightning_indexer_dense_loss(query, key, query_index, key_index, weights).mean()

        gradient = jax.grad(loss)(jax.random.normal(keys[3], (1, 64, 16)))
        assert jnp.isfinite(gradient).all()
        ```
    """
    return run_operation(OP, locals())


class LightningIndexerDenseLossArguments(ArgumentRecord, of=lightning_indexer_dense_loss):
    """The arguments of a call of `lightning_indexer_dense_loss`."""

    def __post_init__(self) -> None:
        scales = {name: getattr(self, name) for name in ("softmax_scale", "index_softmax_scale")}
        set_canonical_values(
            self,
            causal=as_flag("causal", self.causal),
            sliding_window=as_window("sliding_window", self.sliding_window),
            **{name: as_number(name, scale) for name, scale in scales.items() if scale is not None},
        )
        # The call goes on under a trace, where no values can be seen.
        for name, array in _cumulative_length_arguments(self):
            check_cumulative_lengths(name, getattr(self, name), *array.shape[:2])


def _cumulative_length_arguments(args: LightningIndexerDenseLossArguments) -> Iterable[tuple[str, Any]]:
    """Yields the names of the cumulative lengths of a call, with the arrays whose tokens they count."""
    if have_ranks(args, query=4, key=4):
        pairs = (("cum_seqlens_q", args.query), ("cum_seqlens_k", args.key))
        yield from ((name, array) for name, array in pairs if getattr(args, name) is not None)


def validate(args: LightningIndexerDenseLossArguments) -> None:
    """Raises ValueError for arrays that are wrong on every backend; the record has checked the rest."""
    sizes: dict[str, int] = {}
    axes = {"query": "B T H D", "key": "B S Hk D", "query_index": "B T Hi Di", "key_index": "B S Di"}
    for name, letters in (axes | {"index_weights": "B T Hi"}).items():
        check_shape(name, getattr(args, name), letters, sizes)
    for name, letters in (("query", "H D"), ("key", "Hk"), ("query_index", "Hi Di")):
        check_not_empty(name, getattr(args, name), axes[name], letters)
    for name in ("query", "query_index", "index_weights"):
        check_dtype(name, getattr(args, name), jnp.floating, "a floating dtype")
    check_same_dtype({"query": args.query, "key": args.key})
    check_same_dtype({"query_index": args.query_index, "key_index": args.key_index})
    if sizes["H"] % sizes["Hk"]:
        raise ValueError(
            f"key: got shape {tuple(args.key.shape)} with {sizes['Hk']} heads, wants a divisor of query's {sizes['H']}"
        )
    check_cum_seqlens(args, sizes)


def conditions(args: LightningIndexerDenseLossArguments) -> Iterable[Condition]:
    """Yields the conditions that cumulative lengths fit the arrays."""
    for name, array in _cumulative_length_arguments(args):
        yield from cumulative_length_conditions(name, getattr(args, name), *array.shape[:2])


def lower(args: LightningIndexerDenseLossArguments) -> family.DenseIndexerLoss:
    """Returns the record of a call. Attention is constant to JAX's differentiation."""
    query, key = lax.stop_gradient((args.query, args.key))
    lengths = None
    if args.cum_seqlens_q is not None:
        lengths = args.cum_seqlens_q, args.cum_seqlens_q if args.cum_seqlens_k is None else args.cum_seqlens_k
    starts, ends = key_ranges(
        (query.shape[0], query.shape[1], key.shape[1]),
        lengths,
        causal=args.causal,
        sliding_window=args.sliding_window,
    )
    index_scale = args.index_softmax_scale
    return family.DenseIndexerLoss(
        query=query,
        key=key,
        query_index=args.query_index,
        key_index=args.key_index,
        index_weights=args.index_weights,
        key_starts=starts,
        key_ends=ends,
        softmax_scale=query.shape[3] ** -0.5 if args.softmax_scale is None else args.softmax_scale,
        index_softmax_scale=args.query_index.shape[3] ** -0.5 if index_scale is None else index_scale,
    )


class LightningIndexerDenseLoss(Kernel[LightningIndexerDenseLossConfig, Array]):
    """Wraps `lightning_indexer_dense_loss` in an object that an `Executor` can call."""


OP = Op(
    arguments=LightningIndexerDenseLossArguments,
    family=family.FAMILY,
    validate=validate,
    lower=lower,
    conditions=conditions,
    cases=cases.cases(LightningIndexerDenseLossArguments),
    make_inputs=cases.make_inputs,
)
LightningIndexerDenseLoss.op = OP
