"""Programs of attention over dense arrays."""

from typing import Any

import numpy as np

from ejkernel.types import MaskInfo
from ejkernel_conformance.random_calls.draws import (
    HEAD_DIMS,
    NARROW_HEAD_DIMS,
    Arrays,
    Drawn,
    Rng,
    bounds,
    dtype,
    given,
    heads,
    normal,
    pick,
    poison,
    segment_ids,
    some,
    tokens,
    uniform,
    window,
)


def _options(rng: Rng, most: int, **more: Any) -> dict[str, Any]:
    return given(
        causal=some(rng, 0.5),
        sliding_window=window(rng, most),
        softmax_scale=float(rng.uniform(0.05, 0.5)) if some(rng, 0.3) else None,
        **more,
    )


def _sizes(rng: Rng) -> tuple[int, int, int, int, int, int, int]:
    """Returns rows, queries, keys, query heads, KV heads, and sizes of keys and values."""
    b, t = int(rng.integers(1, 4)), tokens(rng, 200)
    s = t if some(rng, 0.5) else tokens(rng, 300)
    d = pick(rng, HEAD_DIMS)
    v = d if some(rng, 0.8) else pick(rng, NARROW_HEAD_DIMS)
    return (b, t, s, *heads(rng), d, v)


def _mask_info(rng: Rng, kind: str, b: int, t: int, s: int) -> tuple[MaskInfo | None, Arrays]:
    """Returns a mask of one kind, and where arrays hold padding, which is poisoned."""
    info: Any = MaskInfo
    if kind == "segments":
        q = segment_ids(rng, b, t)
        kv = q if t == s else segment_ids(rng, b, s)
        return info.from_segments(q, kv), {"query": q < 0, "key": kv < 0, "value": kv < 0}
    if kind == "positions":
        q = np.sort(rng.integers(0, s, (b, t)), axis=1).astype(np.int32)
        kv = np.broadcast_to(np.arange(s, dtype=np.int32), (b, s)).copy()
        return info(q_positions=q, kv_positions=kv), {}
    if kind == "mask":
        return info(_attention_mask=rng.random((b, 1, t, s)) < 0.7), {}
    return None, {}


def flash(rng: Rng, op: str = "flash_attention") -> Drawn:
    """Draws a call of `flash_attention`, or of an operation with the same arrays."""
    b, t, s, h, g, d, v = _sizes(rng)
    kind, kinds = dtype(rng), ("none", "none", "segments", "mask", "positions")
    mask = pick(rng, kinds)
    capped = op in ("flash_attention", "ring_attention") and some(rng, 0.3)
    lse = op in ("flash_attention", "ring_attention", "scaled_dot_product_attention") and some(rng, 0.3)
    sinks = op in ("flash_attention", "ring_attention", "attention") and some(rng, 0.3)
    bias = (pick(rng, (1, b)), pick(rng, (1, h)), t, s) if some(rng, 0.2) else None
    extra = given(logits_soft_cap=1.5 if capped else None, return_lse=True if lse else None)

    def values(rng: Rng) -> Arrays:
        arrays: Arrays = {
            "query": normal(rng, (b, t, h, d), kind),
            "key": normal(rng, (b, s, g, d), kind),
            "value": normal(rng, (b, s, g, v), kind),
        }
        info, unread = _mask_info(rng, mask, b, t, s)
        arrays |= {name: poison(arrays[name], where) for name, where in unread.items()}
        arrays |= given(mask_info=info)
        arrays |= {"bias": normal(rng, bias, kind)} if bias else {}
        arrays |= {"softmax_aux": normal(rng, (h, 2))} if sinks else {}
        return arrays

    return Drawn(values, _options(rng, max(t, s), **extra))


def packed(rng: Rng) -> Drawn:
    """Draws a call of `flash_attention` of packed sequences."""
    t, (h, g), d, kind = tokens(rng, 300), heads(rng), pick(rng, HEAD_DIMS), dtype(rng)
    sequences = int(rng.integers(1, 6))

    def values(rng: Rng) -> Arrays:
        ends = bounds(rng, sequences, t)
        padding = np.arange(t)[None] >= ends[-1]
        shapes = {"query": (1, t, h, d), "key": (1, t, g, d), "value": (1, t, g, d)}
        arrays: Arrays = {name: poison(normal(rng, shape, kind), padding) for name, shape in shapes.items()}
        return {**arrays, "cum_seqlens_q": ends, "cum_seqlens_k": ends}

    return Drawn(values, _options(rng, t))


def flash_or_packed(rng: Rng) -> Drawn:
    """Draws a call of packed or of dense sequences."""
    return packed(rng) if some(rng, 0.25) else flash(rng)


def blocksparse(rng: Rng) -> Drawn:
    """Draws a call of `blocksparse_attention`, whose arrays have heads first."""
    drawn = flash(rng, "blocksparse_attention")

    def values(rng: Rng) -> Arrays:
        arrays = drawn.values(rng)
        return {**arrays, **{name: np.swapaxes(arrays[name], 1, 2) for name in ("query", "key", "value")}}

    return Drawn(values, drawn.options)


def latent(rng: Rng) -> Drawn:
    """Draws a call of `flash_mla`."""
    b, t, (h, g) = int(rng.integers(1, 3)), tokens(rng, 200), heads(rng)
    r, n, v, rope = pick(rng, (32, 64, 128)), pick(rng, (32, 64, 128)), pick(rng, (32, 64, 128)), pick(rng, (16, 64))
    form, kind = pick(rng, "abc"), dtype(rng)

    def values(rng: Rng) -> Arrays:
        arrays: Arrays = {
            "query": normal(rng, (b, t, h, n + (rope if form == "b" else 0)), kind),
            "key_value": normal(rng, (b, t, r), kind),
            "w_kc": normal(rng, (r, g, n), kind, r**-0.5),
            "w_vc": normal(rng, (r, g, v), kind, r**-0.5),
        }
        arrays |= {"b_k": normal(rng, (b, t, rope), kind)} if form != "a" else {}
        return arrays | ({"b_q": normal(rng, (b, t, rope), kind)} if form == "c" else {})

    return Drawn(values, _options(rng, t))


def latent_decode(rng: Rng) -> Drawn:
    """Draws a call of `mla_decode`, with unread memory after the lengths."""
    b, s, (h, g) = int(rng.integers(1, 5)), tokens(rng, 400), heads(rng, 16)
    r, n, v, rope = pick(rng, (64, 128, 512)), pick(rng, (32, 64, 128)), pick(rng, (32, 128)), pick(rng, (0, 64))
    one_cache, kind = rope == 0 or some(rng, 0.5), dtype(rng)
    options = given(
        return_lse=True if some(rng, 0.5) else None,
        sliding_window=int(rng.integers(1, s + 1)) if some(rng, 0.3) else None,
        logits_soft_cap=1.5 if some(rng, 0.3) else None,
    )

    def values(rng: Rng) -> Arrays:
        lengths = rng.integers(0, s + 1, b).astype(np.int32)
        unread = np.arange(s) >= lengths[:, None]
        width = r + (rope if one_cache else 0)
        arrays: Arrays = {
            "query": normal(rng, (b, h, n + rope), kind),
            "latent_cache": poison(normal(rng, (b, s, width), kind), unread),
            "w_kc": normal(rng, (r, g, n), kind, r**-0.5),
            "w_vc": normal(rng, (r, g, v), kind, r**-0.5),
            "lengths": lengths,
        }
        return arrays | ({} if one_cache else {"rope_cache": poison(normal(rng, (b, s, rope), kind), unread)})

    return Drawn(values, options)


def native_sparse(rng: Rng) -> Drawn:
    """Draws a call of `native_sparse_attention`."""
    b, t, d = int(rng.integers(1, 3)), tokens(rng, 200), pick(rng, (16, 32, 64, 128))
    s = t + tokens(rng, 100) if some(rng, 0.3) else t
    h, g = pick(rng, ((4, 2), (4, 1), (16, 1), (32, 2), (8, 8)))
    block, kind = pick(rng, (8, 16, 32)), dtype(rng)
    gates = [name for name in ("g_cmp", "g_slc", "g_swa") if some(rng, 0.6)]
    options: dict[str, Any] = {"block_size": block, "block_counts": int(rng.integers(1, 5))}
    options |= {"window_size": int(rng.integers(1, s + 1))} if "g_swa" in gates else {}

    def values(rng: Rng) -> Arrays:
        shapes = {"query": (b, t, h, d), "key": (b, s, g, d), "value": (b, s, g, d)}
        arrays: Arrays = {name: normal(rng, shape, kind) for name, shape in shapes.items()}
        arrays |= {name: uniform(rng, (b, t, h), kind) for name in gates}
        if "g_cmp" not in gates:  # nothing else says which blocks to read
            arrays["block_indices"] = rng.integers(-1, s // block + 1, (b, t, g, 4)).astype(np.int32)
        return arrays

    return Drawn(values, options)


def indexer(rng: Rng) -> Drawn:
    """Draws a call of `lightning_indexer`.

    Numbers are multiples of 1/4, so that scores are the same in any order of summation and many are equal.
    """
    b, s, kind = int(rng.integers(1, 4)), tokens(rng, 200), dtype(rng)
    t, h, d = int(rng.integers(1, s + 1)), pick(rng, (1, 4, 8, 64)), pick(rng, (16, 32, 64, 128))

    def values(rng: Rng) -> Arrays:
        shapes = {"query": (b, t, h, d), "key": (b, s, d), "weights": (b, t, h)}
        return {name: (np.clip(np.rint(4 * normal(rng, x)), -8, 8) / 4).astype(kind) for name, x in shapes.items()}

    window = (int(rng.integers(0, s + 1)), None) if some(rng, 0.3) else None
    options = given(causal=some(rng, 0.8), sliding_window=window, softmax_scale=0.125)
    return Drawn(values, {"top_k": pick(rng, (1, 3, 16, 64, 256)), **options})


def token_sparse(rng: Rng) -> Drawn:
    """Draws a call of `token_sparse_attention`. Keys that no query lists are poisoned."""
    b, t, s, kind = int(rng.integers(1, 3)), tokens(rng, 100), tokens(rng, 200), dtype(rng)
    (h, g), d, count = heads(rng, 16), pick(rng, (16, 32, 64, 128)), pick(rng, (1, 7, 16, 64))
    latent, by_head, sinks = some(rng, 0.5), some(rng, 0.3), some(rng, 0.3)

    def values(rng: Rng) -> Arrays:
        shape = (b, t, g, count) if by_head else (b, t, count)
        indices = rng.integers(-1, s + 1, shape).astype(np.int32)
        listed = np.zeros(s, bool)
        listed[indices[(indices >= 0) & (indices < s)]] = True
        key, value = (poison(normal(rng, (b, s, g, d), kind).swapaxes(0, 1), ~listed).swapaxes(0, 1) for _ in "kv")
        arrays: Arrays = {"query": normal(rng, (b, t, h, d), kind), "key": key, "value": None if latent else value}
        return {**arrays, "indices": indices, **({"softmax_aux": normal(rng, (h,))} if sinks else {})}

    form = {"value_size": d // 2, "softmax_scale": (2 * d) ** -0.5} if latent else {}
    return Drawn(values, given(**form, return_lse=some(rng, 0.3) or None))


def deepseek(rng: Rng) -> Drawn:
    """Draws a call of `deepseek_attn`. The arrays of the indexer are multiples of 1/4, as in `indexer`."""
    b, t, kind, (h, g) = int(rng.integers(1, 3)), tokens(rng, 150), dtype(rng), heads(rng)
    r, n, c, v = pick(rng, (32, 64)), pick(rng, (16, 32)), pick(rng, (8, 16)), pick(rng, (16, 24))
    form, index_heads, size = pick(rng, "abc"), pick(rng, (1, 4)), pick(rng, (16, 32))

    def values(rng: Rng) -> Arrays:
        index = {
            "query_index": (b, t, index_heads, size),
            "key_index": (b, t, size),
            "index_weights": (b, t, index_heads),
        }
        arrays: Arrays = {
            name: (np.clip(np.rint(4 * normal(rng, x)), -8, 8) / 4).astype(kind) for name, x in index.items()
        }
        arrays |= {"query": normal(rng, (b, t, h, n + (c if form == "b" else 0)), kind)}
        arrays |= {"key_value": normal(rng, (b, t, r), kind), "w_kc": normal(rng, (r, g, n), kind, r**-0.5)}
        arrays |= {"w_vc": normal(rng, (r, g, v), kind, r**-0.5)}
        rotary = {"a": (), "b": ("b_k",), "c": ("b_q", "b_k")}[form]
        return {**arrays, **{name: normal(rng, (b, t, c), kind) for name in rotary}}

    return Drawn(values, given(index_topk=pick(rng, (1, 16, 64)), causal=some(rng, 0.8), index_softmax_scale=0.125))


def indexer_loss(rng: Rng) -> Drawn:
    """Draws a call of `lightning_indexer_loss`."""
    b, t, s, kind = int(rng.integers(1, 3)), tokens(rng, 100), tokens(rng, 200), dtype(rng)
    (h, g), d, count = heads(rng, 16), pick(rng, (16, 32, 64, 128)), pick(rng, (1, 7, 16, 64))

    def values(rng: Rng) -> Arrays:
        indices = rng.integers(-1, s + 1, (b, t, count)).astype(np.int32)
        arrays: Arrays = {"query": normal(rng, (b, t, h, d), kind), "key": normal(rng, (b, s, g, d), kind)}
        return {**arrays, "indices": indices, "scores": normal(rng, (b, t, count))}

    return Drawn(values, {})


def indexer_dense_loss(rng: Rng) -> Drawn:
    """Draws a call of `lightning_indexer_dense_loss`."""
    b, s, kind = int(rng.integers(1, 3)), tokens(rng, 150), dtype(rng)
    t, (h, g), d = int(rng.integers(1, s + 1)), heads(rng, 16), pick(rng, (16, 32, 64))
    j, e = pick(rng, (1, 4, 8)), pick(rng, (16, 32))

    def values(rng: Rng) -> Arrays:
        shapes = {"query": (b, t, h, d), "key": (b, s, g, d), "query_index": (b, t, j, e), "key_index": (b, s, e)}
        arrays: Arrays = {name: normal(rng, shape, kind) for name, shape in shapes.items()}
        return {**arrays, "index_weights": normal(rng, (b, t, j))}

    window = (int(rng.integers(0, s + 1)), None) if some(rng, 0.3) else None
    return Drawn(values, given(causal=some(rng, 0.8), sliding_window=window))
