"""GPT-OSS's experts: biases, and a SwiGLU with a limit whose gate and factor are neighbouring columns."""

from ejkernel.modules import expert_routing, gated_grouped_matmul, gather_reduce, grouped_matmul
from ejkernel.quantization import from_mxfp4

SOURCE = "gpt_oss.GptOssMLP"
TOP_K, LIMIT, ALPHA = 2, 1.5, 1.702


def prefill(w, x):
    return layer(w, x, {"rhs": w["experts.gate_up_proj"]}, {"rhs": w["experts.down_proj"]})


def on_disk(w, x):
    """The same with matrices as the checkpoint stores them: blocks of mxfp4 codes, and their scales."""
    names = "experts.gate_up_proj", "experts.down_proj"
    return layer(w, x, *(from_mxfp4(w[f"{name}_blocks"], w[f"{name}_scales"]) for name in names))


def layer(w, x, first, second):
    tokens = x.reshape(-1, x.shape[-1])
    logits = tokens @ w["router.weight"].T + w["router.bias"]
    _, rows, order, sizes, weights = expert_routing(logits, TOP_K, scores="softmax", normalise=True)
    hidden = gated_grouped_matmul(
        tokens,
        group_sizes=sizes,
        indices=order // TOP_K,
        rhs_bias=w["experts.gate_up_proj_bias"],
        interleaved=True,
        alpha=ALPHA,
        beta=1.0,
        limit=LIMIT,
        **first,
    )
    bias = w["experts.down_proj_bias"][:, None]
    results = grouped_matmul(hidden, group_sizes=sizes, rhs_bias=bias, **second)
    return gather_reduce(results, rows, order[:, None], weights).reshape(x.shape)
