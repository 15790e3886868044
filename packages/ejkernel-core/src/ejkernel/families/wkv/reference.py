"""Defines what RWKV-4's time mixing computes, in plain jnp.

Every channel averages the values of its earlier tokens, with weights exp(key) that decay token by token; the current
token has the weight exp(bonus + key) instead:

    o_t = (a_{t-1} + exp(bonus + k_t) v_t) / (b_{t-1} + exp(bonus + k_t))
    a_t = exp(decay) a_{t-1} + exp(k_t) v_t
    b_t = exp(decay) b_{t-1} + exp(k_t)

a and b are held as a exp(-m) and b exp(-m) with the running maximum m of the decayed keys, so that no exponential is
above 1. A token without any weight has output 0. States and sums are in float32 (float64 for float64 values).

Source: Peng et al. 2023, arXiv:2305.13048.
"""

import functools

import jax
import jax.numpy as jnp
from jax import lax

from ejkernel.families.wkv.record import WKV, accumulator, first_state, state_after_token


def reference(record: WKV) -> tuple[tuple[jax.Array, jax.Array], tuple[()]]:
    """Computes the result of the family, one token after another; in float64 if `value` is float64, else in float32.

    Returns:
        Output [B, T, C] in the value's dtype and the state [B, 3, C] after the last token, in the accumulator's. There
        are no residuals.
    """
    dtype = accumulator(record)
    token = functools.partial(state_after_token, (record.decay.astype(dtype), record.bonus.astype(dtype)))
    tokens = (jnp.moveaxis(record.key, 1, 0).astype(dtype), jnp.moveaxis(record.value, 1, 0).astype(dtype))
    state, outputs = lax.scan(token, first_state(record), tokens)
    return (jnp.moveaxis(outputs, 0, 1).astype(record.value.dtype), jnp.stack(state, axis=1)), ()
