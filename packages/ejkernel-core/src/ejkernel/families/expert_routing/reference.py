"""Defines what expert routing computes, in plain jnp.

Every token chooses the K experts with its largest logits, the largest first, of equal ones the first. The T * K pairs
of a token and an expert, `t * K + n`, are rows of the experts' matrices, in a stable order by expert:

    order        the pair of every row
    places       the row of every pair
    sizes        how many rows each expert has

None of these has a gradient. Logits are compared as numbers: -0 equals 0, NaN of either sign is above infinity, and
NaNs equal each other.

Source: the routing of the dropless mixture of experts of Gale et al. 2022, arXiv:2211.15841 (MegaBlocks).
"""

import jax.numpy as jnp
from jax import lax

from ejkernel.families.expert_routing.record import ExpertRouting, Routing, order_preserving_integers, sorted_by_expert


def reference(record: ExpertRouting) -> tuple[Routing, tuple[()]]:
    """Computes the result of the family in plain jnp. There are no residuals."""
    chosen = lax.top_k(order_preserving_integers(record.logits), record.top_k)[1].astype(jnp.int32)
    return sorted_by_expert(chosen, record.logits.shape[1]), ()
