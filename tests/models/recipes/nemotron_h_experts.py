"""Nemotron-H's experts: no gate but a squared ReLU, between two projections to a smaller width."""

import jax
import jax.numpy as jnp

from ejkernel.modules import expert_routing, gated_grouped_matmul, gather_reduce, grouped_matmul

SOURCE = "nemotron_h.NemotronHMoE"
TOP_K, SCALE = 2, 1.5


def relu2(x):
    return jnp.square(jax.nn.relu(x))


def prefill(w, x):
    tokens = x.reshape(-1, x.shape[-1])
    _, rows, order, sizes, weights = expert_routing(
        tokens @ w["gate.weight"].T,
        TOP_K,
        scores="sigmoid",
        selection_bias=w["gate.e_score_correction_bias"],
        normalise=True,
        scale=SCALE,
    )
    latent = tokens @ w["fc1_latent_proj.weight"].T
    # The checkpoint stores [E, columns, features]: `transpose_rhs` reads it as it is.
    hidden = gated_grouped_matmul(
        latent, w["experts.up_proj"], sizes, order // TOP_K, activation="relu2", transpose_rhs=True, gated=False
    )
    results = grouped_matmul(hidden, w["experts.down_proj"], sizes, transpose_rhs=True)
    routed = gather_reduce(results, rows, order[:, None], weights) @ w["fc2_latent_proj.weight"].T
    shared = relu2(tokens @ w["shared_experts.up_proj.weight"].T) @ w["shared_experts.down_proj.weight"].T
    return (routed + shared).reshape(x.shape)
