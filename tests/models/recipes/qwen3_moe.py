"""Qwen3's experts: the softmax is over all experts, and the chosen weights are normalised or not."""

from tests.models.recipes.shared.experts import swiglu_experts

SOURCE = "qwen3_moe.Qwen3MoeSparseMoeBlock"
TOP_K = 2


def prefill(w, x):
    tokens = x.reshape(-1, x.shape[-1])
    # With `norm_topk_prob`, pass normalise=True.
    return swiglu_experts(w, tokens, TOP_K, scores="softmax").reshape(x.shape)
