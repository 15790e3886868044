"""DeepSeek V3's routing and experts: the best groups by biased sigmoid scores, and in them the best experts."""

import jax
import jax.numpy as jnp

from ejkernel.modules import expert_routing, gather_reduce, grouped_matmul

SOURCE = "deepseek_v3.DeepseekV3MoE"
GROUPS, TOP_GROUPS, TOP_K, SCALE = 4, 2, 3, 2.5


def prefill(w, x):
    tokens = x.reshape(-1, x.shape[-1])
    _, rows, order, sizes, weights = expert_routing(
        tokens @ w["gate.weight"].T,
        TOP_K,
        scores="sigmoid",
        selection_bias=w["gate.e_score_correction_bias"],
        n_groups=GROUPS,
        top_groups=TOP_GROUPS,
        normalise=True,
        scale=SCALE,
    )
    expert_rows = gather_reduce(tokens, order[:, None] // TOP_K, rows)
    # The checkpoint stores [E, columns, features]: `transpose_rhs` reads it as it is.
    products = grouped_matmul(expert_rows, w["experts.gate_up_proj"], sizes, transpose_rhs=True)
    gate, up = jnp.split(products, 2, axis=-1)
    results = grouped_matmul(jax.nn.silu(gate) * up, w["experts.down_proj"], sizes, transpose_rhs=True)
    routed = gather_reduce(results, rows, order[:, None], weights)
    gate, up = (tokens @ w[f"shared_experts.{name}_proj.weight"].T for name in ("gate", "up"))
    return (routed + (jax.nn.silu(gate) * up) @ w["shared_experts.down_proj.weight"].T).reshape(x.shape)
