"""Multi-head latent attention written out pair by pair in NumPy float64, from the formulas and from nothing else here.

Keys and values are made vector by vector; what happens to scores then is `naive`'s.
"""

import dataclasses

import naive
import numpy as np


@dataclasses.dataclass(frozen=True, kw_only=True)
class Latent:
    """Arrays of `flash_mla`, and the other arguments in `naive.Call`'s words."""

    query: np.ndarray
    key_value: np.ndarray
    w_kc: np.ndarray
    w_vc: np.ndarray
    b_q: np.ndarray | None = None
    b_k: np.ndarray | None = None
    options: dict = dataclasses.field(default_factory=dict)


def attention(call: Latent) -> np.ndarray:
    """The output, float64 [B, T, H, Dv]."""
    batch, tokens, heads, _ = call.query.shape
    kv_heads = call.w_kc.shape[1]
    query, key, value = [], [], []
    for b, t in np.ndindex(batch, tokens):
        for g in range(kv_heads):
            k = call.key_value[b, t] @ call.w_kc[:, g]
            key.append(k if call.b_k is None else np.concatenate([k, call.b_k[b, t]]))
            value.append(call.key_value[b, t] @ call.w_vc[:, g])
        for h in range(heads):
            q = call.query[b, t, h]
            query.append(q if call.b_q is None else np.concatenate([q, call.b_q[b, t]]))
    return naive.attention(
        naive.Call(
            query=np.array(query).reshape(batch, tokens, heads, -1),
            key=np.array(key).reshape(batch, tokens, kv_heads, -1),
            value=np.array(value).reshape(batch, tokens, kv_heads, -1),
            **call.options,
        )
    )
