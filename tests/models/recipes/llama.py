"""Llama: grouped queries with rotary positions."""

from tests.models.recipes.shared import grouped_attention

SOURCE = "llama.LlamaAttention"
prefill, packed, decode = grouped_attention.functions_of()
empty_cache = grouped_attention.empty_cache
