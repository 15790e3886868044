"""Joining softmaxes over disjoint sets of keys (Liu, Zaharia & Abbeel 2023; Dao et al. 2023, Flash-Decoding).

With `lse_n = log(sum_j exp(s_j))` and `o_n = sum_j exp(s_j - lse_n) v_j` over the n-th set:

    lse = log(sum_n exp(lse_n)),    o = sum_n exp(lse_n - lse) o_n
"""

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp


class PartialAttention(NamedTuple):
    """Attention to some of the keys.

    Attributes:
        output: [B, T, H, V], accumulator's dtype; 0 where no key was attended.
        lse: [B, H, T]; -inf where no key was attended and there is no sink.
    """

    output: jax.Array
    lse: jax.Array


def merge(*parts: PartialAttention) -> PartialAttention:
    """Returns attention to the keys of all parts."""
    row_max = functools.reduce(jnp.maximum, (part.lse for part in parts))
    shift = jnp.where(row_max == -jnp.inf, 0, row_max)
    masses = [jnp.exp(part.lse - shift) for part in parts]
    total = jnp.asarray(sum(masses))
    some = total > 0
    shares = [mass / jnp.where(some, total, 1) for mass in masses]
    output = sum(_heads_after_tokens(share) * part.output for share, part in zip(shares, parts, strict=True))
    lse = jnp.where(some, jnp.log(jnp.where(some, total, 1)) + shift, -jnp.inf)
    return PartialAttention(jnp.asarray(output), lse)


def _heads_after_tokens(x: jax.Array) -> jax.Array:
    """Returns [B, H, T] -> [B, T, H, 1]."""
    return x.swapaxes(1, 2)[..., None]
