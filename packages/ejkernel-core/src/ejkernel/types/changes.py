"""The fields of a MaskInfo, and the methods that change some of them. Each method is bound to the class."""

import dataclasses
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import ejkernel.types.mask

BAKED_IN = {
    "causal": "causal_mask_baked_in",
    "sliding_window": "sliding_window_baked_in",
    "chunked": "chunked_mask_baked_in",
    "token_type_ids": "token_type_ids_baked_in",
}
_CU_SEQLENS = ("_cu_seqlens_q", "_cu_seqlens_kv")
_SEGMENT_IDS = ("_q_segment_ids", "_kv_segment_ids")
_PARTS = {
    "attention_mask": ("_attention_mask", *_CU_SEQLENS),
    "segment_ids": (*_SEGMENT_IDS, *_CU_SEQLENS),
    "cu_seqlens": _CU_SEQLENS,
    "positions": ("q_positions", "kv_positions"),
}
LEAVES = (
    "_attention_mask",
    *_SEGMENT_IDS,
    *_CU_SEQLENS,
    "q_positions",
    "kv_positions",
)
STATIC = (*BAKED_IN.values(), "batch_axis_name", "qheads_axis_name", "kvheads_axis_name", "sequence_axis_name")


def replace(
    info: "ejkernel.types.mask.MaskInfo",
    *,
    attention_mask: Any = None,
    q_segment_ids: Any = None,
    kv_segment_ids: Any = None,
    cu_seqlens_q: Any = None,
    cu_seqlens_kv: Any = None,
    **fields: Any,
) -> "ejkernel.types.mask.MaskInfo":
    """Returns a copy with some parts changed. What is None is kept; `without` clears a part.

    A new mask replaces what the stored parts say about pairs: the stored ids go with the old mask, unless ids of
    at least one side are given too. Cumulative lengths are dropped when the mask or the ids change, unless they
    are given too.

    Args:
        info: The mask.
        attention_mask: [batch or 1, heads or 1, q_len, kv_len], every value but 0 attends.
        q_segment_ids: [batch, q_len] integers.
        kv_segment_ids: [batch, kv_len] integers.
        cu_seqlens_q: [sequences + 1] integers.
        cu_seqlens_kv: [sequences + 1] integers.
        **fields: Any other field of the class; None clears positions and means "no axis" for the axis names.

    Raises:
        ValueError: A name is no field, or shapes do not fit.

    Example:
        ```python
        import jax.numpy as jnp
        from ejkernel.types import MaskInfo

        info = MaskInfo.from_segments(jnp.array([[0, 0, 1]]))
        replaced = info.replace(attention_mask=jnp.ones((1, 1, 3, 3), bool))
        assert replaced.attention_mask.all()  # the segments of `info` are gone
        ```
    """
    ids = info.explicit_q_segment_ids, info.explicit_kv_segment_ids
    if (q_segment_ids is None) != (kv_segment_ids is None) and None in ids:
        found = info.get_or_compute_segment_ids()
        q_segment_ids = found[0] if q_segment_ids is None else q_segment_ids
        kv_segment_ids = found[1] if kv_segment_ids is None else kv_segment_ids
    named = {
        "_attention_mask": attention_mask,
        "_q_segment_ids": q_segment_ids,
        "_kv_segment_ids": kv_segment_ids,
        "_cu_seqlens_q": cu_seqlens_q,
        "_cu_seqlens_kv": cu_seqlens_kv,
    }
    changes = {name: value for name, value in named.items() if value is not None}
    unknown = fields.keys() - {"q_positions", "kv_positions", *STATIC}
    if unknown:
        raise ValueError(f"replace() got {sorted(unknown)}, but MaskInfo has no such field")
    if "_attention_mask" in changes and not changes.keys() & set(_SEGMENT_IDS):
        changes |= dict.fromkeys(_SEGMENT_IDS)
    if changes.keys() - set(_CU_SEQLENS):
        changes = dict.fromkeys(_CU_SEQLENS) | changes
    return dataclasses.replace(info, **changes, **fields)


def without(info: "ejkernel.types.mask.MaskInfo", *names: str) -> "ejkernel.types.mask.MaskInfo":
    """Returns a copy without some of its parts.

    Cumulative lengths go with the mask and with the ids. With the mask go the `*_baked_in` flags, since what was
    baked in is gone.

    Args:
        info: The mask.
        *names: Any of `"attention_mask"`, `"segment_ids"`, `"cu_seqlens"`, `"positions"`.

    Raises:
        ValueError: A name is none of these.

    Example:
        ```python
        import jax.numpy as jnp
        from ejkernel.types import MaskInfo

        info = MaskInfo.from_segments(jnp.array([[0, 0, 1]])).apply_causal()
        assert info.without("attention_mask").explicit_mask is None
        ```
    """
    unknown = set(names) - _PARTS.keys()
    if unknown:
        raise ValueError(f"without() got {sorted(unknown)}, wants any of {sorted(_PARTS)}")
    cleared = dict.fromkeys(part for name in names for part in _PARTS[name])
    flags = dict.fromkeys(BAKED_IN.values(), False) if "attention_mask" in names else {}
    return dataclasses.replace(info, **cleared, **flags)
