"""Mistral, and every Llama with a sliding window: a window of W tokens is (W - 1, 0)."""

from tests.models.recipes.shared import grouped_attention

SOURCE = "mistral.MistralAttention"
WINDOW = (4, 0)  # `sliding_window = 5`: a token sees four before it, and itself
prefill, packed, decode = grouped_attention.functions_of(lambda w: dict(sliding_window=WINDOW))
empty_cache = grouped_attention.empty_cache
