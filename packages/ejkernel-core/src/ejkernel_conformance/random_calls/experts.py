"""Programs of grouped and quantised products, of routing, and of pooling."""

from typing import Any

import numpy as np

from ejkernel.quantization import quantize
from ejkernel_conformance.random_calls.draws import (
    Arrays,
    Drawn,
    Rng,
    bounds,
    dtype,
    given,
    normal,
    pick,
    poison,
    some,
    tokens,
)

WIDTHS = (16, 60, 64, 96, 128, 256, 256, 512)


def _groups(rng: Rng, groups: int, rows: int) -> np.ndarray:
    """Returns rows of each group, some of which are empty; rows after the last belong to none."""
    return np.diff(bounds(rng, groups, rows)).astype(np.int32)


def grouped(rng: Rng) -> Drawn:
    """Draws a call of `grouped_matmul`."""
    m, k, n, e, kind = tokens(rng, 300), pick(rng, WIDTHS), pick(rng, WIDTHS), int(rng.integers(1, 9)), dtype(rng)
    transposed, bias = some(rng, 0.3), some(rng, 0.3)

    def values(rng: Rng) -> Arrays:
        sizes = _groups(rng, e, m)
        lhs = poison(normal(rng, (m, k), kind), np.arange(m) >= sizes.sum())
        rhs = normal(rng, (e, n, k) if transposed else (e, k, n), kind, k**-0.5)
        more = {"rhs_bias": normal(rng, (e, 1, n))} if bias else {}
        return {"lhs": lhs, "rhs": rhs, "group_sizes": sizes, **more}

    return Drawn(values, given(transpose_rhs=True if transposed else None))


def gated_grouped(rng: Rng) -> Drawn:
    """Draws a call of `gated_grouped_matmul`."""
    t, k, n, e, kind = tokens(rng, 200), pick(rng, WIDTHS), pick(rng, WIDTHS), int(rng.integers(1, 9)), dtype(rng)
    rows = tokens(rng, 400) if some(rng, 0.5) else None

    def values(rng: Rng) -> Arrays:
        sizes = _groups(rng, e, rows or t)
        lhs, rhs = normal(rng, (t, k), kind), normal(rng, (e, k, 2 * n), kind, k**-0.5)
        if rows is None:
            return {"lhs": poison(lhs, np.arange(t) >= sizes.sum()), "rhs": rhs, "group_sizes": sizes}
        indices = rng.integers(-1, t + 1, rows).astype(np.int32)
        return {"lhs": lhs, "rhs": rhs, "group_sizes": sizes, "indices": indices}

    return Drawn(values, {"activation": pick(rng, ("silu", "gelu"))})


def gather(rng: Rng) -> Drawn:
    """Draws a call of `gather_reduce`. Rows that no index names are poisoned."""
    rows, t, count, most, kind = (
        tokens(rng, 100),
        tokens(rng, 100),
        *(int(rng.integers(1, 5)) for _ in "ab"),
        dtype(rng),
    )
    channels, weighted = pick(rng, (*WIDTHS, 33)), some(rng, 0.5)

    def values(rng: Rng) -> Arrays:
        pairs, slots = t * count, rows * most
        used = int(rng.integers(0, min(pairs, slots) + 1))
        pair, slot = rng.permutation(pairs)[:used], rng.permutation(slots)[:used]
        indices, inverse = np.full(pairs, -1, np.int32), np.full(slots, pairs, np.int32)
        indices[pair], inverse[slot] = slot // most, pair
        unread = ~np.isin(np.arange(rows), indices)
        arrays: Arrays = {"rows": poison(normal(rng, (rows, channels), kind), unread)}
        arrays |= {"indices": indices.reshape(t, count), "inverse": inverse.reshape(rows, most)}
        return arrays | ({"weights": normal(rng, (t, count))} if weighted else {})

    return Drawn(values, {})


def routing(rng: Rng) -> Drawn:
    """Draws a call of `expert_routing` with logits that are often equal."""
    t, e, kind = tokens(rng, 300), int(rng.integers(1, 140)), dtype(rng)
    coarse = some(rng, 0.4)

    def values(rng: Rng) -> Arrays:
        logits = normal(rng, (t, e))
        return {"logits": (np.abs(np.round(logits)) if coarse else logits).astype(kind)}

    return Drawn(values, {"top_k": int(rng.integers(1, min(e, 9) + 1))})


def quantized(rng: Rng) -> Drawn:
    """Draws a call of `quantized_matmul`."""
    mode = pick(rng, ("affine", "affine", "affine", "nf4", "mxfp4", "mxfp8"))
    group = {"affine": pick(rng, (32, 64)), "nf4": 64}.get(mode, 32)
    bits = pick(rng, (2, 4, 4, 8)) if mode == "affine" else None
    m, k, n = pick(rng, (1, 5, 16, 17, 64, 130)), group * int(rng.integers(1, 9)), group * int(rng.integers(1, 9))
    transpose, kind = some(rng, 0.5), dtype(rng)

    def values(rng: Rng) -> Arrays:
        axis = "col" if transpose else "row"
        weights: Any = normal(rng, (n, k), factor=k**-0.5)
        packed, scales, *third = quantize(weights, group, bits, mode, axis)
        arrays: Arrays = {"x": normal(rng, (m, k), kind), "w": np.asarray(packed), "scales": np.asarray(scales)}
        return arrays | ({"zeros": np.asarray(third[0])} if third else {})

    return Drawn(values, given(transpose=transpose, group_size=group, bits=bits, mode=mode))


def all_gather_product(rng: Rng) -> Drawn:
    """Draws a call of `all_gather_matmul` on one device."""
    transpose = some(rng, 0.5)
    return _product(rng, transpose, rhs_transpose=transpose)


def reduce_scatter_product(rng: Rng) -> Drawn:
    """Draws a call of `reduce_scatter_matmul` on one device."""
    return _product(rng, True)


def _product(rng: Rng, transposes_y: bool, **options: Any) -> Drawn:
    m, k, n = (pick(rng, (1, 5, 16, 64, 130, 256)) for _ in "mkn")
    kind = dtype(rng)

    def values(rng: Rng) -> Arrays:
        y = normal(rng, (n, k) if transposes_y else (k, n), kind, k**-0.5)
        return {"x": normal(rng, (m, k), kind), "y": y}

    return Drawn(values, {"axis_name": None, **options})


def pooling(rng: Rng) -> Drawn:
    """Draws a call of `mean_pooling` of rows or of packed sequences."""
    b, t, kind = int(rng.integers(1, 4)), tokens(rng, 200), dtype(rng)
    tail = pick(rng, ((60,), (4, 32), (128,), (2, 16)))
    packed, chunk = some(rng, 0.5), int(rng.integers(1, 40)) if some(rng, 0.5) else None

    def values(rng: Rng) -> Arrays:
        if not packed:
            return {"x": normal(rng, (b, t, *tail), kind)}
        ends = bounds(rng, int(ends_count), t)
        x: Any = normal(rng, (1, t, *tail), kind)
        return {"x": poison(x, np.arange(t)[None] >= ends[-1]), "cu_seqlens": ends}

    ends_count = rng.integers(1, 6)
    return Drawn(values, given(chunk_size=chunk))
