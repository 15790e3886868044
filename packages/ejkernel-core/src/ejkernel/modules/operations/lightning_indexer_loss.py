"""The loss that trains a lightning indexer: its distribution over the selected keys against attention's."""

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Integer

from ejkernel.families import indexer_loss as family
from ejkernel.modules.operations.cases import lightning_indexer_loss as cases
from ejkernel.modules.operations.configs import LightningIndexerLossConfig
from ejkernel.modules.operations.shared.latent_inputs import set_canonical_values
from ejkernel.modules.operations.shared.listed_keys import checked_indices
from ejkernel.modules.operations.shared.shapes import (
    as_number,
    check_dtype,
    check_not_empty,
    check_same_dtype,
    check_shape,
)
from ejkernel.ops.argument_records import ArgumentRecord
from ejkernel.ops.execution.kernel import Kernel
from ejkernel.ops.model import Op
from ejkernel.ops.operation import document_options, run_operation


@document_options
def lightning_indexer_loss(
    query: Float[Array, "b t h d"],
    key: Float[Array, "b s g d"],
    indices: Integer[Array, "b t k"],
    scores: Float[Array, "b t k"],
    *,
    softmax_scale: float | None = None,
    platform: str | None = None,
    cfg: LightningIndexerLossConfig | None = None,
    mesh: jax.sharding.Mesh | None = None,
    in_specs: Any = None,
    out_specs: Any = None,
) -> Float[Array, "b t"]:
    """Returns KL(attention || indexer) over the selected keys, for each query (DeepSeek-V3.2).

    Shape letters: B batch, T queries, S keys, H query heads, Hk KV heads, D head size, K selected keys. Query head h
    reads KV head `h // (H // Hk)`. The target is the softmax of attention over the selected keys, averaged over heads;
    the indexer's distribution is the softmax of its scores. The formulas are in `ejkernel.families.indexer_loss`.

    Attention is the target and constant: the gradient is that of the scores, which `lightning_indexer` passes on to its
    query, key and weights, and their projections pass on to their inputs. DeepSeek-V3.2 applies `jax.lax.stop_gradient`
    to these inputs, so that the loss trains the indexer alone. Memory is linear in T for a fixed K.

    Over devices, batch and the query's tokens can be split; heads cannot, as the target is a mean over all of them.

    Args:
        query: [B, T, H, D] floating, the queries of attention. Has no gradient here.
        key: [B, S, Hk, D], dtype of query; H is a multiple of Hk. Has no gradient here.
        indices: [B, T, K] int, as `lightning_indexer` returns them; outside of 0..S-1 for none.
        scores: [B, T, K] floating, as `lightning_indexer` returns them. Scores without a key are not read.
        softmax_scale: Factor on attention's scores, the same as in the attention; None means `D ** -0.5`, which is not
            the scale of absorbed keys.

    Returns:
        [B, T] float32 (float64 for float64), at least 0 but for rounding; 0 for a query without a key.

    Example:
        ```python
        import jax, jax.numpy as jnp
        from ejkernel.modules import lightning_indexer, lightning_indexer_loss

        keys = jax.random.split(jax.random.key(0), 4)
        query, key = jax.random.normal(keys[0], (1, 64, 8, 32)), jax.random.normal(keys[1], (1, 64, 2, 32))
        query_index, weights = jax.random.normal(keys[2], (1, 64, 4, 16)), jnp.ones((1, 64, 4))

        def loss(key_index):
            indices, scores = lightning_indexer(query_index, key_index, weights, top_k=16)
            return lightning_indexer_loss(query, key, indices, scores).mean()

        gradient = jax.grad(loss)(jax.random.normal(keys[3], (1, 64, 16)))
        assert jnp.isfinite(gradient).all()
        ```
    """
    return run_operation(OP, locals())


class LightningIndexerLossArguments(ArgumentRecord, of=lightning_indexer_loss):
    """The arguments of a call of `lightning_indexer_loss`."""

    def __post_init__(self) -> None:
        if self.softmax_scale is not None:
            set_canonical_values(self, softmax_scale=as_number("softmax_scale", self.softmax_scale))


def validate(args: LightningIndexerLossArguments) -> None:
    """Raises ValueError for arrays that are wrong on every backend; the record has checked the rest."""
    sizes: dict[str, int] = {}
    for name, axes in (("query", "B T H D"), ("key", "B S Hk D"), ("indices", "B T K"), ("scores", "B T K")):
        check_shape(name, getattr(args, name), axes, sizes)
    check_not_empty("query", args.query, "B T H D", "H D")
    check_not_empty("key", args.key, "B S Hk D", "Hk")
    for name in ("query", "scores"):
        check_dtype(name, getattr(args, name), jnp.floating, "a floating dtype")
    check_dtype("indices", args.indices, jnp.integer, "an integer dtype")
    check_same_dtype({"query": args.query, "key": args.key})
    if sizes["H"] % sizes["Hk"]:
        raise ValueError(
            f"key: got shape {tuple(args.key.shape)} with {sizes['Hk']} heads, wants a divisor of query's {sizes['H']}"
        )


def lower(args: LightningIndexerLossArguments) -> family.IndexerLoss:
    """Returns the record of a call. Attention is constant to JAX's differentiation."""
    query, key = lax.stop_gradient((args.query, args.key))
    return family.IndexerLoss(
        query=query,
        key=key,
        indices=checked_indices(args.indices, args.key.shape[1]),
        scores=args.scores,
        softmax_scale=args.query.shape[3] ** -0.5 if args.softmax_scale is None else args.softmax_scale,
    )


class LightningIndexerLoss(Kernel[LightningIndexerLossConfig, Array]):
    """Wraps `lightning_indexer_loss` in an object that an `Executor` can call."""


OP = Op(
    arguments=LightningIndexerLossArguments,
    family=family.FAMILY,
    validate=validate,
    lower=lower,
    cases=cases.cases(LightningIndexerLossArguments),
    make_inputs=cases.make_inputs,
)
LightningIndexerLoss.op = OP
