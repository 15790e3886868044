"""GPT-OSS's experts: biases, and a SwiGLU with a limit whose gate and factor are neighbouring columns."""

import jax
import jax.numpy as jnp

from ejkernel.modules import expert_routing, gather_reduce, grouped_matmul

SOURCE = "gpt_oss.GptOssMLP"
TOP_K, LIMIT, ALPHA = 2, 1.5, 1.702


def prefill(w, x):
    tokens = x.reshape(-1, x.shape[-1])
    logits = tokens @ w["router.weight"].T + w["router.bias"]
    _, rows, order, sizes, weights = expert_routing(logits, TOP_K, scores="softmax", normalise=True)
    expert_rows = gather_reduce(tokens, order[:, None] // TOP_K, rows)
    bias = w["experts.gate_up_proj_bias"][:, None]
    products = grouped_matmul(expert_rows, w["experts.gate_up_proj"], sizes, rhs_bias=bias)
    gate, up = jnp.minimum(products[:, ::2], LIMIT), jnp.clip(products[:, 1::2], -LIMIT, LIMIT)
    hidden = gate * jax.nn.sigmoid(ALPHA * gate) * (up + 1)
    bias = w["experts.down_proj_bias"][:, None]
    results = grouped_matmul(hidden, w["experts.down_proj"], sizes, rhs_bias=bias)
    return gather_reduce(results, rows, order[:, None], weights).reshape(x.shape)
