"""Softmax attention over dense or packed sequences that end together."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Integer

from ejkernel import _compat, modules
from ejkernel.compat.ejgpu import lowering
from ejkernel.compat.sample_inputs import LAYOUTS, Layout
from ejkernel.modules.operations.shared.shapes import (
    as_count,
    as_flag,
    as_number,
    check_cumulative_lengths,
    check_dtype,
    check_same_dtype,
    check_shape,
)
from ejkernel.types import MaskInfo
from ejkernel.types.segments import as_bool_mask


@dataclasses.dataclass(frozen=True, kw_only=True)
class QueriesAndKeys:
    """Dense rows or packed sequences, seen alike.

    Attributes:
        arrays: Query [B, T, H, D], key and value [B, S, Hk, D]; one row of packed sequences.
        cu_seqlens: Cumulative lengths of queries and keys of packed sequences, int32 [N + 1] each, or None.
        max_seqlens: Bounds of the lengths of queries and keys, or None where they are unknown.
        sequences: Number of rows, or of packed sequences.
    """

    arrays: tuple[jax.Array, jax.Array, jax.Array]
    cu_seqlens: tuple[jax.Array, jax.Array] | None
    max_seqlens: tuple[int | None, int | None]
    sequences: int


def flash_attn_varlen(
    q: Float[Array, "..."],
    k: Float[Array, "..."],
    v: Float[Array, "..."],
    sm_scale: float | None = None,
    causal: bool = True,
    layout: Layout = "bshd",
    b: Float[Array, "#n #h #t #s"] | None = None,
    dropout_p: float = 0.0,
    alibi_slopes: Float[Array, "n h"] | None = None,
    cu_seqlens_q: Integer[Array, " n+1"] | None = None,
    cu_seqlens_k: Integer[Array, " n+1"] | None = None,
    max_seqlens_q: int | None = None,
    max_seqlens_k: int | None = None,
    dropout_seed: int | Integer[Array, ""] | None = None,
) -> Float[Array, "..."]:
    """Returns softmax attention over rows, or over packed sequences, whose queries and keys end together.

    `ejkernel.modules.flash_attention` does the work. Here a causal query i of L_q sees the keys up to
    `i + L_k - L_q` of the L_k of its sequence (bottom-right), where there each sees those up to its own index. Queries
    that see no key give 0. Differentiable in q, k, v, b and alibi_slopes.

    Memory is linear in the lengths, also with slopes when causal. What is asked for pair by pair, a bias, or slopes
    without `causal`, takes memory for the pairs; packed sequences are then padded to `max_seqlens_q` and
    `max_seqlens_k`.

    Args:
        q: [B, T, H, D] for layout `"bshd"`, [B, H, T, D] for `"bhsd"`, [total_q, H, D] for `"thd"`.
        k: [B, S, Hk, D], [B, Hk, S, D] or [total_k, Hk, D], dtype of q; H is a multiple of Hk.
        v: The same; its last size may be another.
        sm_scale: Factor on the scores; None means `D ** -0.5`.
        causal: As above.
        layout: Of q, k, v and the result.
        b: [N|1, H|1, T|1, S|1] bias, added to the scaled scores; N is B or the number of packed sequences, of which
            T and S are then the bounds `max_seqlens_q` and `max_seqlens_k`.
        dropout_p: Probability in [0, 1) of dropping a weight.
        alibi_slopes: [N, H]; `-slope * |i + L_k - L_q - j|` is added to the scaled scores (Press et al. 2022,
            arXiv:2108.12409).
        cu_seqlens_q: [N + 1] int, for layout `"thd"`; may be traced, and sequences may be empty. Tokens after the
            last sequence give 0.
        cu_seqlens_k: The same for keys; None means those of the queries.
        max_seqlens_q: Bound of the query lengths, which is checked where they can be read; None looks them up where it
            is needed, for which they must not be traced.
        max_seqlens_k: The same for keys.
        dropout_seed: Integer, may be traced; None means 0. Equal seeds drop alike.

    Returns:
        q's shape with v's last size, in q's dtype.

    Raises:
        ValueError: A shape, dtype or value is wrong; the message names the argument.

    Example:
        ```python
        from ejkernel import ejgpu

        q, k, v, metadata = ejgpu.varlen_input_helper(3, 8, 2, 96, 192, 64, dtype="float32")
        output = ejgpu.flash_attn_varlen(
            q, k, v, causal=True, layout="thd", cu_seqlens_q=metadata.cu_seqlens_q, cu_seqlens_k=metadata.cu_seqlens_k
        )
        assert output.shape == q.shape
        ```
    """
    if layout not in LAYOUTS:
        raise ValueError(f"layout: got {layout!r}, wants one of {', '.join(map(repr, LAYOUTS))}")
    sides = _queries_and_keys(layout, (q, k, v), (cu_seqlens_q, cu_seqlens_k), (max_seqlens_q, max_seqlens_k))
    _check_bias_and_slopes(sides, b, alibi_slopes)
    options = {
        "softmax_scale": sm_scale,
        "causal": as_flag("causal", causal),
        "dropout_prob": as_number("dropout_p", dropout_p, minimum=0, less_than=1),
        "dropout_seed": dropout_seed,
    }
    if sides.cu_seqlens is None:
        output = lowering.dense_attention(sides.arrays, b, alibi_slopes, None, options)
        return output if layout == "bshd" else output.swapaxes(1, 2)
    if b is None and (alibi_slopes is None or causal):
        return lowering.packed_attention(sides.arrays, sides.cu_seqlens, alibi_slopes, options)[0]
    widths = _padded_row_lengths(sides, sides.cu_seqlens, (1, 1) if b is None else b.shape[2:])
    return lowering.attention_in_padded_rows(sides.arrays, sides.cu_seqlens, widths, (b, alibi_slopes), options)


def flash_attention(
    q: Float[Array, "b t h d"],
    k: Float[Array, "b s g d"],
    v: Float[Array, "b s g v"],
    attention_mask: Bool[Array, "..."] | Integer[Array, "..."] | None = None,
    bias: Float[Array, "#b #h #t #s"] | None = None,
    softmax_scale: float | None = None,
    dropout_prob: float = 0.0,
    causal: bool = False,
    dropout_seed: int | Integer[Array, ""] | None = None,
    varlen_mode: bool = True,
) -> Float[Array, "b t h v"]:
    """Returns softmax attention of rows whose queries and keys end together, with a mask.

    `ejkernel.modules.flash_attention` does the work; a causal query i of T sees the keys up to `i + S - T`
    (bottom-right). Queries that see no key give 0. Differentiable in q, k, v and bias.

    Args:
        q: [B, T, H, D] floating.
        k: [B, S, Hk, D], dtype of q; H is a multiple of Hk.
        v: [B, S, Hk, V], dtype of q.
        attention_mask: [B, S], nonzero for tokens that are no padding, wherever it lies; or [B|1, H|1, T, S], nonzero
            where a query may look at a key.
        bias: [B|1, H|1, T|1, S|1] floating, added to the scaled scores.
        softmax_scale: Factor on the scores; None means `D ** -0.5`.
        dropout_prob: Probability in [0, 1) of dropping a weight.
        causal: As above.
        dropout_seed: Integer, may be traced; None means 0. Equal seeds drop alike.
        varlen_mode: Whether a mask [B, S] is about queries too, of which there are as many then: those that are padding
            give 0. Otherwise it is about keys alone.

    Returns:
        [B, T, H, V] in q's dtype.

    Raises:
        ValueError: A shape, dtype or value is wrong; the message names the argument.

    Example:
        ```python
        import jax.numpy as jnp
        from ejkernel import ejgpu

        q, k, v = (ejgpu.numeric_gen(2, 16, 4, 32, dtype="float32", seed=seed) for seed in range(3))
        mask = jnp.arange(16) < jnp.array([[16], [9]])
        output = ejgpu.flash_attention(q, k, v, attention_mask=mask, causal=True)
        assert not output[1, 9:].any()
        ```
    """
    sides = _queries_and_keys("bshd", (q, k, v), (None, None), (None, None))
    parts = {} if attention_mask is None else _mask_fields(attention_mask, q, k, as_flag("varlen_mode", varlen_mode))
    if as_flag("causal", causal) and q.shape[1] != k.shape[1]:
        ends = jnp.arange(q.shape[1], dtype=jnp.int32)[None] + (k.shape[1] - q.shape[1])
        parts |= {"q_positions": ends, "kv_positions": jnp.arange(k.shape[1], dtype=jnp.int32)[None]}
    return modules.flash_attention(
        *sides.arrays,
        bias,
        mask_info=MaskInfo(**parts) if parts else None,
        softmax_scale=softmax_scale,
        dropout_prob=dropout_prob,
        causal=causal,
        dropout_seed=dropout_seed,
    )


def _mask_fields(attention_mask: Any, q: jax.Array, k: jax.Array, varlen_mode: bool) -> dict[str, Any]:
    """Returns the parts of a MaskInfo that a mask is."""
    (rows, queries, heads, _), keys = q.shape, k.shape[1]
    sizes = {"B": rows, "H": heads, "T": queries, "S": keys}
    allowed = as_bool_mask(attention_mask)
    if allowed.ndim != 2:
        check_shape("attention_mask", allowed, "B H T S", sizes, broadcast="B H")
        return {"_attention_mask": allowed}
    check_shape("attention_mask", allowed, "B S", sizes)
    if varlen_mode and queries != keys:
        raise ValueError(
            f"attention_mask: got shape {allowed.shape} with varlen_mode, wants as many queries as keys: {keys}"
        )
    ids = jnp.where(allowed, 0, -1)
    return {"_q_segment_ids": ids if varlen_mode else jnp.zeros((rows, queries), jnp.int32), "_kv_segment_ids": ids}


def _padded_row_lengths(
    queries_and_keys: QueriesAndKeys, cu_seqlens: tuple[jax.Array, jax.Array], bias_row_lengths: tuple[int, ...]
) -> tuple[int, int]:
    """Returns tokens of a padded row of queries and of keys: as given, as a bias has them, or the longest there are."""
    widths: list[int] = []
    for side, bound, size, lengths in zip(
        "qk", queries_and_keys.max_seqlens, bias_row_lengths, cu_seqlens, strict=True
    ):
        longest = _longest_sequence(lengths)
        width = bound if bound is not None else size if size > 1 else longest
        if width is None:
            raise ValueError(
                f"max_seqlens_{side}: got None with a traced cu_seqlens_{side}, wants a bound of the lengths"
            )
        if longest is not None and width < longest:
            raise ValueError(
                f"b: got {size} along one axis, wants {longest}, the longest sequence of cu_seqlens_{side}"
            )
        widths.append(max(1, width))
    return widths[0], widths[1]


def _queries_and_keys(
    layout: Layout,
    arrays: tuple[jax.Array, jax.Array, jax.Array],
    cu_seqlens: tuple[jax.Array | None, jax.Array | None],
    max_seqlens: tuple[int | None, int | None],
) -> QueriesAndKeys:
    axes = {"thd": "{} {} {}", "bshd": "B {} {} {}", "bhsd": "B {1} {0} {2}"}[layout]
    sizes: dict[str, int] = {}
    for name, array, names in zip("qkv", arrays, ("T H D", "S Hk D", "S Hk V"), strict=True):
        check_shape(name, array, axes.format(*names.split()), sizes)
    check_dtype("q", arrays[0], jnp.floating, "a floating dtype")
    check_same_dtype(dict(zip("qkv", arrays, strict=True)))
    if not sizes["Hk"] or sizes["H"] % sizes["Hk"]:
        raise ValueError(
            f"k: got shape {arrays[1].shape} with {sizes['Hk']} heads, wants a divisor of q's {sizes['H']}"
        )
    bounds = _checked_max_seqlens(max_seqlens)
    if layout == "thd":
        return _packed_queries_and_keys(arrays, cu_seqlens, bounds)
    for name, lengths in zip(("cu_seqlens_q", "cu_seqlens_k"), cu_seqlens, strict=True):
        if lengths is not None:
            raise ValueError(
                f"{name}: got a value with layout {layout!r}, wants None; packed sequences have layout 'thd'"
            )
    for name, bound, size in zip(("max_seqlens_q", "max_seqlens_k"), bounds, (sizes["T"], sizes["S"]), strict=True):
        if bound is not None and bound < size:
            raise ValueError(f"{name}: got {bound}, wants at least the {size} tokens of a row")
    q, k, v = arrays if layout == "bshd" else tuple(x.swapaxes(1, 2) for x in arrays)
    return QueriesAndKeys(arrays=(q, k, v), cu_seqlens=None, max_seqlens=(sizes["T"], sizes["S"]), sequences=sizes["B"])


def _checked_max_seqlens(max_seqlens: tuple[int | None, int | None]) -> tuple[int | None, int | None]:
    q, k = (
        None if bound is None else as_count(name, bound)
        for name, bound in zip(("max_seqlens_q", "max_seqlens_k"), max_seqlens, strict=True)
    )
    return q, k


def _packed_queries_and_keys(
    arrays: tuple[jax.Array, jax.Array, jax.Array],
    cu_seqlens: tuple[jax.Array | None, jax.Array | None],
    max_seqlens: tuple[int | None, int | None],
) -> QueriesAndKeys:
    cu_q, cu_k = cu_seqlens
    if cu_q is None:
        raise ValueError("cu_seqlens_q: got None with layout 'thd', wants [N + 1] ints")
    if cu_k is None and arrays[0].shape[0] != arrays[1].shape[0]:
        raise ValueError(
            f"cu_seqlens_k: got None with q of shape {arrays[0].shape} and k of {arrays[1].shape}, wants [N + 1] ints"
        )
    sizes: dict[str, int] = {}
    per_side: list[jax.Array] = []
    for side, lengths, array, bound in zip(
        "qk", (cu_q, cu_q if cu_k is None else cu_k), arrays, max_seqlens, strict=False
    ):
        name = f"cu_seqlens_{side}"
        check_shape(name, lengths, "N+1", sizes)
        check_dtype(name, lengths, jnp.integer, "an integer dtype")
        if sizes["N+1"] < 2:
            raise ValueError(f"{name}: got shape {lengths.shape}, wants [N + 1] with at least 1 sequence")
        check_cumulative_lengths(name, lengths, 1, array.shape[0])
        longest = _longest_sequence(lengths)
        if bound is not None and longest is not None and longest > bound:
            raise ValueError(f"max_seqlens_{side}: got {bound}, wants at least {longest}, the longest sequence")
        per_side.append(jnp.asarray(lengths).astype(jnp.int32))
    q, k, v = (x[None] for x in arrays)
    # One array for both sides says that they are packed alike, which `packed` makes use of.
    pair = (per_side[0], per_side[0] if cu_k is None or cu_k is cu_q else per_side[1])
    return QueriesAndKeys(arrays=(q, k, v), cu_seqlens=pair, max_seqlens=max_seqlens, sequences=sizes["N+1"] - 1)


def _longest_sequence(cu_seqlens: Any) -> int | None:
    """Returns the longest sequence; None where that cannot be read."""
    if _compat.is_tracer(cu_seqlens) or not getattr(cu_seqlens, "is_fully_addressable", True):
        return None
    return int(np.diff(np.asarray(cu_seqlens)).max(initial=0))


def _check_bias_and_slopes(queries_and_keys: QueriesAndKeys, bias: Any, slopes: Any) -> None:
    heads = queries_and_keys.arrays[0].shape[2]
    if bias is not None:
        sizes = {"N": queries_and_keys.sequences, "H": heads}
        sizes |= {
            axis: bound for axis, bound in zip("TS", queries_and_keys.max_seqlens, strict=True) if bound is not None
        }
        check_shape("b", bias, "N H T S", sizes, broadcast="N H T S")
        check_dtype("b", bias, jnp.floating, "a floating dtype")
    if slopes is not None:
        check_shape("alibi_slopes", slopes, "N H", {"N": queries_and_keys.sequences, "H": heads})
        check_dtype("alibi_slopes", slopes, jnp.floating, "a floating dtype")
