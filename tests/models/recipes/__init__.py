"""One file per model family: its mixing layer in JAX, written with public calls of ejkernel alone.

Weights have the names and the layout of the checkpoint. A file has `SOURCE`, the class of transformers that it ports,
and those of these functions that the layer has:

    prefill(w, x)                      whole sequences, x [B, T, width]
    packed(w, x, cu_seqlens)           sequences one after the other, x [1, total, width]
    empty_cache(batch, tokens)         what decoding keeps, before the first token
    decode(w, x, cache, position)      the token [B, 1, width] at `position`, a traced integer; returns (y, cache)
"""
