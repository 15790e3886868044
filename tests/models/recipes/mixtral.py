"""Mixtral's experts: the two largest logits, weighted by their own softmax."""

from tests.models.recipes.shared.experts import swiglu_experts

SOURCE = "mixtral.MixtralSparseMoeBlock"
TOP_K = 2


def prefill(w, x):
    tokens = x.reshape(-1, x.shape[-1])
    return swiglu_experts(w, tokens, TOP_K, scores="softmax", normalise=True).reshape(x.shape)
