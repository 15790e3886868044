"""Qwen3's experts: the softmax is over all experts, and the chosen weights are normalised or not."""

import jax
import jax.numpy as jnp

from ejkernel.modules import expert_routing, gather_reduce, grouped_matmul

SOURCE = "qwen3_moe.Qwen3MoeSparseMoeBlock"
TOP_K = 2


def prefill(w, x):
    tokens = x.reshape(-1, x.shape[-1])
    logits = tokens @ w["gate.weight"].T
    # With `norm_topk_prob`, pass normalise=True.
    _, rows, order, sizes, weights = expert_routing(logits, TOP_K, scores="softmax")
    expert_rows = gather_reduce(tokens, order[:, None] // TOP_K, rows)
    # The checkpoint stores [E, columns, features]: `transpose_rhs` reads it as it is.
    products = grouped_matmul(expert_rows, w["experts.gate_up_proj"], sizes, transpose_rhs=True)
    gate, up = jnp.split(products, 2, axis=-1)
    results = grouped_matmul(jax.nn.silu(gate) * up, w["experts.down_proj"], sizes, transpose_rhs=True)
    return gather_reduce(results, rows, order[:, None], weights).reshape(x.shape)
