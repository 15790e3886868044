"""The methods of MaskInfo that restrict or widen a mask. Each is bound to the class as a method.

All of them write the mask out ([batch, heads or 1, q_len, kv_len] booleans) and return a new MaskInfo.

"Place" below means the stored position of a token where a MaskInfo stores positions of its side, else its index, as in
the kernels. So packed sequences whose queries and keys have lengths of their own (`MaskInfo.from_cu_seqlens`) are
causal within each sequence.
"""

from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import ArrayLike, DTypeLike

from ejkernel.promotion import with_standard_promotion
from ejkernel.types import changes
from ejkernel.types.checks import as_per_row_integers, check_choice, check_number, check_static_size, checked_integers
from ejkernel.types.derived import get_or_compute_attention_mask, get_or_compute_segment_ids
from ejkernel.types.integers import NO_LIMIT, clamp_positions, clamp_to_int32, exact_segment_ids, limit_or_none
from ejkernel.types.mask_parts import MaskParts, MaskType
from ejkernel.types.segments import same_segment_mask

# The token types whose zeros match nothing, by zero_policy: (of the queries, of the keys).
_ZERO_TYPE_DISABLED_BY_POLICY = {"q": (True, False), "kv": (False, True), "both": (True, True), "none": (False, False)}
_COMBINE_MODES = ("union", "intersect", "replace")
_WINDOW_MODES = (None, "default", "decode", "prefill")


def apply_causal(info: MaskType, offset: ArrayLike = 0) -> MaskType:
    """Keeps the keys whose place is at most that of the query plus `offset`.

    Args:
        info: The mask.
        offset: A number or [batch] integers, may be traced.

    Returns:
        A mask with `causal_mask_baked_in` set.

    Raises:
        ValueError: The mask is empty, or `offset` has another shape.
    """
    mask = get_or_compute_attention_mask(info)
    q_positions, kv_positions = _broadcast_positions(info)
    causal = kv_positions <= q_positions + _offset_of_each_row(offset, mask)
    return _restrict_mask(info, mask & causal, causal_mask_baked_in=True)


def apply_sliding_window(
    info: MaskType,
    sliding_window: ArrayLike | tuple[ArrayLike | None, ArrayLike | None],
    *,
    offset: ArrayLike = 0,
    mode: Literal["default", "decode", "prefill"] | None = None,
    index: ArrayLike | None = None,
) -> MaskType:
    """Keeps the keys from `left` places before a query to `right` places after it, both included.

    Args:
        info: The mask.
        sliding_window: `(left, right)`, or one number for both sides; None in the pair does not limit that side.
            Numbers may be traced where no columns are cut.
        offset: Added to the place of every query: a number or [batch] integers, may be traced.
        mode: None and "default" keep the shape. "decode" keeps one row, that of the query `index`, and the `left +
            right + 1` columns that begin `left` before it (with the offset). "prefill" keeps all rows and the last
            columns: as many as the number, or `left + right + 1` for a pair. Both keep all columns if there are fewer.
        index: The query of "decode": a number or [batch] integers, may be traced; clipped to the rows there are.

    Returns:
        A mask with `sliding_window_baked_in` set; ids and positions are cut like the mask.

    Raises:
        ValueError: The mask is empty, the window is negative, or open or traced where columns are cut, the mode is
            unknown, or "decode" has no index.
    """
    check_choice("mode", mode, _WINDOW_MODES)
    left, right = sliding_window if isinstance(sliding_window, tuple | list) else (sliding_window, sliding_window)
    for side in (left, right):
        if side is not None:
            check_number("sliding_window", side, minimum=0)
    left_distance, right_distance = (None if side is None else _int32_window_side(side) for side in (left, right))
    mask = get_or_compute_attention_mask(info)
    q_positions, kv_positions = _broadcast_positions(info)
    q_positions = q_positions + _offset_of_each_row(offset, mask)
    if left_distance is not None:
        mask = mask & (kv_positions >= q_positions - left_distance)
    if right_distance is not None:
        mask = mask & (kv_positions <= q_positions + right_distance)
    windowed_info = _restrict_mask(info, mask, sliding_window_baked_in=True)
    if mode == "decode":
        return _mask_of_decode_row(windowed_info, left, right, offset, index)
    if mode == "prefill":
        width = (
            _window_width(left, right)
            if isinstance(sliding_window, tuple | list)
            else max(_window_width(left, 0) - 1, 1)
        )
        width = min(width, mask.shape[3])
        return _cut(windowed_info, columns=_IndexSpan(jnp.full(mask.shape[0], mask.shape[3] - width), width))
    return windowed_info


def apply_chunked(info: MaskType, chunk_size: ArrayLike, offset: ArrayLike = 0) -> MaskType:
    """Keeps the keys of the query's own chunk that are causal: place at most that of the query plus `offset`.

    Args:
        info: The mask.
        chunk_size: Places in a chunk; chunk n holds the places from `n * chunk_size`. May be traced.
        offset: Of the causal rule alone: a number or [batch] integers, may be traced.

    Returns:
        A mask with `chunked_mask_baked_in` set. Its segment ids are the chunk numbers plus 1, with padding kept; the
        segments there were are part of the mask.

    Raises:
        ValueError: The mask is empty, `chunk_size` is not positive, or `offset` has another shape.
    """
    check_number("chunk_size", chunk_size, minimum=1)
    mask = get_or_compute_attention_mask(info)
    q_positions, kv_positions = _broadcast_positions(info)
    size = chunk_size if isinstance(chunk_size, jax.Array) else min(int(np.asarray(chunk_size)), NO_LIMIT)
    q_chunk_index, kv_chunk_index = q_positions // size, kv_positions // size
    mask = mask & (q_chunk_index == kv_chunk_index) & (kv_positions <= q_positions + _offset_of_each_row(offset, mask))
    q_ids, kv_ids = get_or_compute_segment_ids(info)
    return changes.replace(
        info,
        attention_mask=mask,
        q_segment_ids=jnp.where(q_ids < 0, -1, q_chunk_index[:, 0, :, 0] + 1),
        kv_segment_ids=jnp.where(kv_ids < 0, -1, kv_chunk_index[:, 0, 0, :] + 1),
        chunked_mask_baked_in=True,
    )


@with_standard_promotion
def apply_kv_lengths(
    info: MaskType,
    kv_lengths: ArrayLike,
    *,
    q_len: int | None = None,
    end_index: ArrayLike | None = None,
    sliding_window: int | None = None,
) -> MaskType:
    """Keeps what a step with a KV cache sees: the keys that are filled, and the rows of the newest queries.

    Args:
        info: The mask of the whole cache.
        kv_lengths: [batch] (or one number for all), filled keys of each row; keys from there on become padding.
        q_len: Static number of rows that are kept.
        end_index: [batch] (or one number), the row after the last one that is kept. The kept rows always lie inside
            the mask.
        sliding_window: Static number of columns that are kept, the last filled ones; None keeps all.

    Returns:
        A mask [batch, heads or 1, q_len, columns]; ids and positions are cut like the mask.

    Raises:
        ValueError: The mask is empty, `q_len` or `end_index` is missing, `q_len` is more than there are rows, or shapes
            do not fit.
    """
    if q_len is None or end_index is None:
        raise ValueError("apply_kv_lengths needs q_len and end_index, which say which rows are kept")
    mask = get_or_compute_attention_mask(info)
    batch_size, _, rows, columns = mask.shape
    if check_static_size("q_len", q_len) > rows:
        raise ValueError(f"q_len is {q_len}, but the mask has only {rows} rows")
    lengths = as_per_row_integers("kv_lengths", kv_lengths, batch_size)
    filled = jnp.arange(columns) < lengths[:, None]
    limited_info = _restrict_mask(info, mask & filled[:, None, None, :])
    if info.explicit_kv_segment_ids is not None:
        kv_ids = jnp.where(filled, info.explicit_kv_segment_ids, -1)
        limited_info = changes.replace(limited_info, kv_segment_ids=kv_ids)
    width = columns if sliding_window is None else min(check_static_size("sliding_window", sliding_window), columns)
    return _cut(
        limited_info,
        rows=_IndexSpan(as_per_row_integers("end_index", end_index, batch_size) - q_len, q_len),
        columns=_IndexSpan(lengths - width, width),
    )


def apply_token_type_ids(
    info: MaskType,
    token_type_ids: ArrayLike | tuple[ArrayLike, ArrayLike],
    *,
    combine: Literal["union", "intersect", "replace"] = "union",
    zero_policy: Literal["q", "kv", "both", "none"] = "q",
    update_segment_ids: bool | None = None,
) -> MaskType:
    """Lets tokens of the same type attend to each other, or only those.

    Args:
        info: The mask.
        token_type_ids: [batch, length] integers of both sides, or a tuple of those of the queries and those of the
            keys. A negative type matches nothing.
        combine: "union" adds the pairs of equal type, across segments, but never to padding; "intersect" keeps only
            them; "replace" forgets the mask and attends to exactly them.
        zero_policy: On which side type 0 matches nothing.
        update_segment_ids: Whether the token types become the segment ids. Default: unless `combine` is "union", which
            segment ids cannot express. If not, "intersect" keeps the ids, and the others keep their padding alone.

    Returns:
        A mask with `token_type_ids_baked_in` set.

    Raises:
        ValueError: The mask is empty, a choice is unknown, shapes do not fit, or the ids of a union are to be updated.
    """
    check_choice("combine", combine, _COMBINE_MODES)
    check_choice("zero_policy", zero_policy, tuple(_ZERO_TYPE_DISABLED_BY_POLICY))
    update = combine != "union" if update_segment_ids is None else update_segment_ids
    if update and combine == "union":
        raise ValueError('update_segment_ids=True with combine="union": segment ids cannot express a union')
    mask = get_or_compute_attention_mask(info)
    q_types, kv_types = _token_types(info, token_type_ids, _ZERO_TYPE_DISABLED_BY_POLICY[zero_policy])
    same = same_segment_mask(q_types, kv_types)[:, None]
    ids = _stored_ids(info)
    if update:
        ids = {"q_segment_ids": q_types, "kv_segment_ids": kv_types}
    elif combine != "intersect" and info.explicit_q_segment_ids is not None:
        ids = {"q_segment_ids": _padding_only_ids(info.explicit_q_segment_ids)}
        ids["kv_segment_ids"] = _padding_only_ids(info.explicit_kv_segment_ids)
    new_mask = {"union": mask | same, "intersect": mask & same, "replace": same}[combine]
    return changes.replace(info, attention_mask=new_mask, token_type_ids_baked_in=True, **ids)


def create_chunked_attention_mask(
    chunk_size: int, q_len: int, kv_len: int | None = None, offset: int = 0, dtype: DTypeLike = jnp.bool_
) -> jax.Array:
    """Returns [q_len, kv_len]: both lie in one chunk, and the key's index is at most the query's plus `offset`.

    Args:
        chunk_size: Tokens in a chunk.
        q_len: Static number of queries.
        kv_len: Static number of keys, default `q_len`.
        offset: Of the causal rule alone.
        dtype: Of the result; True becomes 1.

    Raises:
        ValueError: `chunk_size` is not positive.
    """
    chunk_size = min(check_static_size("chunk_size", chunk_size, minimum=1), NO_LIMIT)
    offset = max(min(offset, NO_LIMIT), -NO_LIMIT)
    query = jnp.arange(q_len)[:, None]
    key = jnp.arange(q_len if kv_len is None else kv_len)[None, :]
    return ((query // chunk_size == key // chunk_size) & (key <= query + offset)).astype(dtype)


class _IndexSpan(NamedTuple):
    """Rows or columns `start` to `start + size` of each row of the batch."""

    start: jax.Array
    size: int


def _restrict_mask(info: MaskType, mask: jax.Array, **fields: Any) -> MaskType:
    """Returns a new mask over the same tokens; unlike with `replace` ids and cumulative lengths stay, as the sequences
    do.
    """
    cu_q, cu_kv = info.explicit_cu_seqlens_q, info.explicit_cu_seqlens_kv
    return changes.replace(
        info, attention_mask=mask, **_stored_ids(info), cu_seqlens_q=cu_q, cu_seqlens_kv=cu_kv, **fields
    )


def _stored_ids(info: MaskParts) -> dict[str, jax.Array | None]:
    return {"q_segment_ids": info.explicit_q_segment_ids, "kv_segment_ids": info.explicit_kv_segment_ids}


def _broadcast_positions(info: MaskParts) -> tuple[jax.Array, jax.Array]:
    """Returns the places of the queries [batch or 1, 1, q_len, 1] and of the keys [batch or 1, 1, 1, kv_len]."""
    q_positions = _column_indices(info.q_len) if info.q_positions is None else clamp_positions(info.q_positions)
    kv_positions = _column_indices(info.kv_len) if info.kv_positions is None else clamp_positions(info.kv_positions)
    return q_positions[:, None, :, None], kv_positions[:, None, None, :]


def _column_indices(length: int | None) -> jax.Array:
    return jnp.arange(length or 0, dtype=jnp.int32)[None]


def _offset_of_each_row(offset: Any, mask: jax.Array) -> jax.Array:
    return clamp_positions(as_per_row_integers("offset", offset, mask.shape[0]))[:, None, None, None]


def _int32_window_side(side: Any) -> Any:
    """Returns a side of a window that leaves int32 neither added to a place nor subtracted from it; None bounds
    nothing.
    """
    if isinstance(side, jax.Array):
        return jnp.minimum(clamp_to_int32(side), NO_LIMIT - 1)
    return limit_or_none(int(np.asarray(side)))


def _window_width(left: Any, right: Any) -> int:
    if left is None or right is None:
        raise ValueError("sliding_window: got a side without a limit, wants a limit on both sides to cut columns")
    return check_static_size("sliding_window", left) + check_static_size("sliding_window", right) + 1


def _mask_of_decode_row(info: MaskType, left: Any, right: Any, offset: Any, index: Any) -> MaskType:
    if index is None:
        raise ValueError('mode="decode" needs index, the query whose row is kept')
    batch_size, _, rows, columns = get_or_compute_attention_mask(info).shape
    row = jnp.clip(as_per_row_integers("index", index, batch_size), 0, rows - 1)
    first = row + as_per_row_integers("offset", offset, batch_size) - left
    return _cut(info, rows=_IndexSpan(row, 1), columns=_IndexSpan(first, min(_window_width(left, right), columns)))


def _cut(info: MaskType, *, rows: _IndexSpan | None = None, columns: _IndexSpan | None = None) -> MaskType:
    """Cuts every stored leaf to the given rows and columns; a span that sticks out is moved inside."""
    mask = get_or_compute_attention_mask(info)
    q_side = {"q_segment_ids": info.explicit_q_segment_ids, "q_positions": info.q_positions}
    kv_side = {"kv_segment_ids": info.explicit_kv_segment_ids, "kv_positions": info.kv_positions}
    cut: dict[str, Any] = dict(_stored_ids(info))
    for span, axis, side in ((rows, 2, q_side), (columns, 3, kv_side)):
        if span is None:
            continue
        mask = _slice_span(mask, span, axis)
        cut |= {name: _slice_span(leaf, span, 1) for name, leaf in side.items() if leaf is not None}
    return changes.replace(info, attention_mask=mask, **cut)


def _slice_span(leaf: jax.Array, span: _IndexSpan, axis: int) -> jax.Array:
    rows = jnp.broadcast_to(leaf, (span.start.shape[0], *leaf.shape[1:]))
    start = jnp.clip(span.start, 0, leaf.shape[axis] - span.size)
    return jax.vmap(lambda row, first: jax.lax.dynamic_slice_in_dim(row, first, span.size, axis - 1))(rows, start)


def _padding_only_ids(ids: jax.Array | None) -> jax.Array | None:
    return None if ids is None else jnp.where(ids < 0, -1, 0)


def _token_types(
    info: MaskParts, token_type_ids: Any, zeros_disabled: tuple[bool, bool]
) -> tuple[jax.Array, jax.Array]:
    """Returns the types of both sides as segment ids: -1 where a type matches nothing."""
    pair = token_type_ids if isinstance(token_type_ids, tuple | list) else (token_type_ids, token_type_ids)
    names = ("q", "kv")
    arrays = [checked_integers(f"{name} token_type_ids", value) for name, value in zip(names, pair, strict=True)]
    zeros = [jnp.asarray(array == 0) for array in arrays]  # before types beyond int32 are renumbered
    segment_types = []
    for name, ids, length, zero in zip(
        names, exact_segment_ids(*arrays), (info.q_len, info.kv_len), zeros, strict=True
    ):
        array = jnp.asarray(ids)
        if array.shape != (info.batch_size, length):
            raise ValueError(
                f"{name} token_type_ids: got shape {array.shape}, wants [batch={info.batch_size}, length={length}]"
            )
        segment_types.append(jnp.where((array < 0) | (zero & zeros_disabled[len(segment_types)]), -1, array))
    return segment_types[0], segment_types[1]
