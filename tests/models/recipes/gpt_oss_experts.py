"""GPT-OSS's experts: biases, and a SwiGLU with a limit whose gate and factor are neighbouring columns."""

from ejkernel.modules import expert_routing, gated_grouped_matmul, gather_reduce, grouped_matmul

SOURCE = "gpt_oss.GptOssMLP"
TOP_K, LIMIT, ALPHA = 2, 1.5, 1.702


def prefill(w, x):
    tokens = x.reshape(-1, x.shape[-1])
    logits = tokens @ w["router.weight"].T + w["router.bias"]
    _, rows, order, sizes, weights = expert_routing(logits, TOP_K, scores="softmax", normalise=True)
    hidden = gated_grouped_matmul(
        tokens,
        w["experts.gate_up_proj"],
        sizes,
        order // TOP_K,
        rhs_bias=w["experts.gate_up_proj_bias"],
        interleaved=True,
        alpha=ALPHA,
        beta=1.0,
        limit=LIMIT,
    )
    bias = w["experts.down_proj_bias"][:, None]
    results = grouped_matmul(hidden, w["experts.down_proj"], sizes, rhs_bias=bias)
    return gather_reduce(results, rows, order[:, None], weights).reshape(x.shape)
