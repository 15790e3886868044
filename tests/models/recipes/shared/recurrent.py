"""The three functions of a recipe whose layer carries states from token to token."""


def functions_of(mix):
    """Returns `prefill`, `packed` and `decode` of a layer `mix(w, x, *states, cu_seqlens) -> (output, *new states)`."""

    def prefill(w, x):
        return mix(w, x)[0]

    def packed(w, x, cu_seqlens):
        return mix(w, x, cu_seqlens=cu_seqlens)[0]

    def decode(w, x, cache, position):
        output, *cache = mix(w, x, *cache)
        return output, tuple(cache)

    return prefill, packed, decode
