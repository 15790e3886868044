"""Defines what ring attention computes, in plain jnp.

The meaning is that of `ejkernel.families.tiled_attention` on the whole sequence. Device i of the axis holds queries
`i * T : (i + 1) * T` and keys `i * S : (i + 1) * S`; indices that causal and window compare are those of the whole. An
implementation may not gather the keys of all devices: its memory is that of one part.

Source: Liu, Zaharia & Abbeel 2023 (arXiv:2310.01889).
"""

import jax

from ejkernel.families import tiled_attention
from ejkernel.families.ring_attention.record import RingAttention, as_tiled_attention, axis_size, with_gathered_keys
from ejkernel.families.tiled_attention import SoftmaxResiduals


def reference(record: RingAttention) -> tuple[jax.Array, SoftmaxResiduals]:
    """Computes the result of the family in plain jnp: every device gathers all keys."""
    return tiled_attention.reference(
        as_tiled_attention(record if axis_size(record.axis_name) == 1 else with_gathered_keys(record))
    )
