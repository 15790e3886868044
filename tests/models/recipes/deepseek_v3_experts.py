"""DeepSeek V3's routing and experts: the best groups by biased sigmoid scores, and in them the best experts."""

import jax
import jax.numpy as jnp

from ejkernel.modules import expert_routing, gather_reduce, grouped_matmul

SOURCE = "deepseek_v3.DeepseekV3MoE"
GROUPS, TOP_GROUPS, TOP_K, SCALE = 4, 2, 3, 2.5


def choice(scores):
    """The scores [T, E], -inf in groups whose two best experts are not among the best."""
    grouped = scores.reshape(len(scores), GROUPS, -1)
    best = jax.lax.top_k(jax.lax.top_k(grouped, 2)[0].sum(-1), TOP_GROUPS)[1]
    chosen = (best[:, :, None] == jnp.arange(GROUPS)).any(1)
    return jnp.where(chosen[:, :, None], grouped, -jnp.inf).reshape(scores.shape)


def prefill(w, x):
    tokens = x.reshape(-1, x.shape[-1])
    scores = jax.nn.sigmoid(tokens @ w["gate.weight"].T)
    experts, rows, order, sizes = expert_routing(choice(scores + w["gate.e_score_correction_bias"]), TOP_K)
    weights = jnp.take_along_axis(scores, experts, axis=1)
    weights *= SCALE / weights.sum(-1, keepdims=True)
    expert_rows = gather_reduce(tokens, order[:, None] // TOP_K, rows)
    # The checkpoint stores [E, columns, features]: `transpose_rhs` reads it as it is.
    products = grouped_matmul(expert_rows, w["experts.gate_up_proj"], sizes, transpose_rhs=True)
    gate, up = jnp.split(products, 2, axis=-1)
    results = grouped_matmul(jax.nn.silu(gate) * up, w["experts.down_proj"], sizes, transpose_rhs=True)
    routed = gather_reduce(results, rows, order[:, None], weights)
    gate, up = (tokens @ w[f"shared_experts.{name}_proj.weight"].T for name in ("gate", "up"))
    return (routed + (jax.nn.silu(gate) * up) @ w["shared_experts.down_proj.weight"].T).reshape(x.shape)
