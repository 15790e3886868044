"""A layer of two kinds of published models, from the public operations and as a float64 loop of nothing but `jnp`."""

from typing import Any

import jax
import jax.numpy as jnp

from ejkernel.modules import flash_attention, grouped_matmul

TOKENS, WIDTH, HEADS, KV_HEADS, SIZE, EXPERTS, HIDDEN, CHOSEN = 12, 16, 4, 2, 8, 4, 24, 2
WINDOW = 5
Weights = dict[str, Any]


def weights(key: jax.Array, kind: str) -> Weights:
    """Random parameters, float32."""
    shapes = {
        "query": (WIDTH, HEADS * SIZE),
        "key": (WIDTH, KV_HEADS * SIZE),
        "value": (WIDTH, KV_HEADS * SIZE),
        "out": (HEADS * SIZE, WIDTH),
        "router": (WIDTH, EXPERTS),
        "gate": (EXPERTS, WIDTH, HIDDEN),
        "up": (EXPERTS, WIDTH, HIDDEN),
        "down": (EXPERTS, HIDDEN, WIDTH),
    }
    if kind == "gpt-oss":
        shapes |= {"sinks": (HEADS,), "down_bias": (EXPERTS, 1, WIDTH)}
    keys = jax.random.split(key, len(shapes))
    made: Weights = {}
    for (name, shape), own in zip(shapes.items(), keys, strict=True):
        made[name] = jax.random.normal(own, shape) / shape[-2 if len(shape) > 1 else 0] ** 0.5
    return made | {"router": 6 * made["router"]}  # so that rounding changes no choice of experts


def block(x: jax.Array, w: Weights, **placed: Any) -> jax.Array:
    """The layer: attention, then experts, each with its residual. x [B, T, WIDTH] bfloat16."""

    def project(name: str, heads: int) -> jax.Array:
        return (x @ w[name].astype(x.dtype)).reshape(*x.shape[:2], heads, SIZE)

    attended = flash_attention(
        query=project("query", HEADS),
        key=project("key", KV_HEADS),
        value=project("value", KV_HEADS),
        softmax_aux=w.get("sinks"),
        causal=True,
        sliding_window=(WINDOW - 1, 0) if "sinks" in w else None,
        **placed,
    )
    x = x + attended.reshape(*x.shape[:2], -1) @ w["out"].astype(x.dtype)
    return x + experts(x.reshape(-1, WIDTH), w).reshape(x.shape)


def experts(rows: jax.Array, w: Weights) -> jax.Array:
    """Each row through its chosen experts: rows sorted by expert, bfloat16, times float32 matrices."""
    share, chosen = jax.lax.top_k(rows.astype(jnp.float32) @ w["router"], CHOSEN)
    share, chosen = jax.nn.softmax(share).reshape(-1), chosen.reshape(-1)
    order = jnp.argsort(chosen)
    sizes = jnp.bincount(chosen, length=EXPERTS)
    given = rows[order // CHOSEN]
    hidden = jax.nn.silu(grouped_matmul(given, w["gate"], sizes)) * grouped_matmul(given, w["up"], sizes)
    back = grouped_matmul(hidden, w["down"], sizes, rhs_bias=w.get("down_bias")) * share[order, None].astype(rows.dtype)
    return jnp.zeros_like(rows).at[order // CHOSEN].add(back)


def loop(x: jax.Array, w: Weights) -> jax.Array:
    """The same, row by row, head by head and expert by expert, in the dtype of x."""
    attended = [[_attended(x[b], w, h) for h in range(HEADS)] for b in range(len(x))]
    joined = jnp.stack([jnp.concatenate(heads, axis=-1) for heads in attended])
    x = x + joined @ w["out"]
    return jnp.stack([jnp.stack([row + _mixed(row, w) for row in rows]) for rows in x])


def _attended(rows: jax.Array, w: Weights, head: int) -> jax.Array:
    own, shared = slice(head * SIZE, (head + 1) * SIZE), head // (HEADS // KV_HEADS)
    theirs = slice(shared * SIZE, (shared + 1) * SIZE)
    query, key, value = rows @ w["query"][:, own], rows @ w["key"][:, theirs], rows @ w["value"][:, theirs]
    found = []
    for t in range(len(rows)):
        first = max(0, t - WINDOW + 1) if "sinks" in w else 0
        scores = key[first : t + 1] @ query[t] * SIZE**-0.5
        weights = jnp.exp(scores - scores.max())
        total = weights.sum() + (jnp.exp(w["sinks"][head] - scores.max()) if "sinks" in w else 0)
        found.append(weights @ value[first : t + 1] / total)
    return jnp.stack(found)


def _mixed(row: jax.Array, w: Weights) -> jax.Array:
    logits = row @ w["router"]
    chosen = [int(e) for e in jnp.argsort(-jax.lax.stop_gradient(logits))[:CHOSEN]]
    share = jax.nn.softmax(jnp.stack([logits[e] for e in chosen]))
    mixed = jnp.zeros_like(row)
    for part, e in zip(share, chosen, strict=True):
        hidden = jax.nn.silu(row @ w["gate"][e]) * (row @ w["up"][e])
        bias = w["down_bias"][e, 0] if "down_bias" in w else 0
        mixed = mixed + part * (hidden @ w["down"][e] + bias)
    return mixed
