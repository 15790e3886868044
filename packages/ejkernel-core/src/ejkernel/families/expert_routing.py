"""The expert routing family: the record its operations lower to and its meaning.

Every token chooses the K experts with its largest logits, the largest first, of equal ones the first. The T * K pairs
of a token and an expert, `t * K + n`, are rows of the experts' matrices, in a stable order by expert:

    order        the pair of every row
    places       the row of every pair
    sizes        how many rows each expert has

None of these has a gradient. NaN counts as the largest logit.

Source: the routing of the dropless mixture of experts of Gale et al. 2022, arXiv:2211.15841 (MegaBlocks).
"""

from collections.abc import Mapping

import jax
import jax.numpy as jnp
from jax import lax

from ejkernel.ops.arguments import arguments, static
from ejkernel.ops.model import Family

Routing = tuple[jax.Array, jax.Array, jax.Array, jax.Array]
"""Experts [T, K], places [T, K], order [T * K] and sizes [E], all int32."""


@arguments
class ExpertRouting:
    """Canonical input of one routing. T tokens, E experts, K experts a token.

    Attributes:
        logits: [T, E] floating.
        top_k: K.
    """

    logits: jax.Array
    top_k: int = static()


def reference(record: ExpertRouting) -> tuple[Routing, tuple[()]]:
    """The family's meaning in plain jnp. There are no residuals."""
    return sorted_by_expert(lax.top_k(record.logits, record.top_k)[1].astype(jnp.int32), record.logits.shape[1]), ()


def sorted_by_expert(experts: jax.Array, count: int) -> Routing:
    """The routing of experts that are chosen.

    Args:
        experts: [T, K] int32.
        count: E.
    """
    key = experts.reshape(-1)
    order = jnp.argsort(key, stable=True).astype(jnp.int32)
    places = jnp.zeros_like(order).at[order].set(jnp.arange(order.size, dtype=jnp.int32), unique_indices=True)
    sizes = jnp.sum(key[:, None] == jnp.arange(count), axis=0, dtype=jnp.int32)
    return experts, places.reshape(experts.shape), order, sizes


def localise(record: ExpertRouting, offsets: Mapping[str, jax.Array]) -> ExpertRouting:
    """One shard's record as it is: nothing is split."""
    return record


FAMILY = Family(
    name="expert_routing",
    record=ExpertRouting,
    differentiable=(),
    dtype=lambda record: record.logits.dtype,
    head_dims=lambda record: (record.logits.shape[-1],),
    axes={"logits": "t e", "output": ("t k", "t k", "r", "e")},
    shardable="",
    aligned=(),
    localise=localise,
    reference=reference,
)
