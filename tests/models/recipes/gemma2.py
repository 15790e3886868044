"""Gemma 2: a soft cap on the scores, a window in every other layer, a scale of its own."""

from tests.models.recipes.shared import grouped_attention

SOURCE = "gemma2.Gemma2Attention"
TERMS = dict(sliding_window=(4, 0), logits_soft_cap=2.0, softmax_scale=24**-0.5)
prefill, packed, decode = grouped_attention.functions_of(lambda w: TERMS)
empty_cache = grouped_attention.empty_cache
