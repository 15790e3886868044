"""The expert routing family: the record its operations lower to and its meaning.

Every token chooses the K experts with its largest logits, the largest first, of equal ones the first. The T * K pairs
of a token and an expert, `t * K + n`, are rows of the experts' matrices, in a stable order by expert:

    order        the pair of every row
    places       the row of every pair
    sizes        how many rows each expert has

None of these has a gradient. Logits are compared as numbers: -0 equals 0, NaN of either sign is above infinity, and
NaNs equal each other.

Source: the routing of the dropless mixture of experts of Gale et al. 2022, arXiv:2211.15841 (MegaBlocks).
"""

from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from ejkernel.families.grouped_matmul import EXPERTS_OVER_DEVICES
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
    chosen = lax.top_k(ordered(record.logits), record.top_k)[1].astype(jnp.int32)
    return sorted_by_expert(chosen, record.logits.shape[1]), ()


def ordered(logits: jax.Array) -> jax.Array:
    """Integers in the order of logits. A sort of floats puts -0 below 0, and a NaN whose sign bit is set last."""
    digits = jnp.finfo(logits.dtype)
    bits = lax.bitcast_convert_type(logits, f"int{digits.bits}")
    most = jnp.iinfo(bits.dtype).max
    magnitude = bits & most
    # The magnitudes of floats are in the order of their bits, of which those of infinity are the last before NaN's.
    infinity = ((1 << digits.nexp) - 1) << digits.nmant
    signed = jnp.where(bits < 0, -magnitude, magnitude)
    return jnp.where(magnitude > infinity, most, signed)


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


def requests(record: ExpertRouting) -> tuple[dict[str, Any], ...]:
    """The owners of a record's entries: its tokens."""
    return ({"t": np.arange(record.logits.shape[0])},)


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
    unsplit={"e": EXPERTS_OVER_DEVICES},
    reference=reference,
    requests=requests,
)
