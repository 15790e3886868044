"""Experts with a SwiGLU, after routing: each expert multiplies the rows of the tokens that chose it."""

import jax
import jax.numpy as jnp

from ejkernel.modules import expert_routing, gather_reduce, grouped_matmul


def swiglu_experts(w, tokens, top_k, **routing):
    """The weighted sum of the `top_k` experts of each token [N, width]; `routing` are arguments of `expert_routing`."""
    _, rows, order, sizes, weights = expert_routing(tokens @ w["gate.weight"].T, top_k, **routing)
    expert_rows = gather_reduce(tokens, order[:, None] // top_k, rows)
    # The checkpoint stores [E, columns, features]: `transpose_rhs` reads it as it is.
    products = grouped_matmul(expert_rows, w["experts.gate_up_proj"], sizes, transpose_rhs=True)
    gate, up = jnp.split(products, 2, axis=-1)
    results = grouped_matmul(jax.nn.silu(gate) * up, w["experts.down_proj"], sizes, transpose_rhs=True)
    return gather_reduce(results, rows, order[:, None], weights)
