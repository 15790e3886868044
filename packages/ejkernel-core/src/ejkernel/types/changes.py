"""The fields of a MaskInfo, and the methods that change some of them. Each method is bound to the class."""

import dataclasses
from typing import Any

import jax.numpy as jnp
from jax.typing import DTypeLike

from ejkernel.types.derived import get_or_compute_attention_mask, get_or_compute_segment_ids
from ejkernel.types.mask_parts import BAKED_IN_FLAGS, CU_SEQLENS_FIELDS, SEGMENT_ID_FIELDS, STATIC_FIELDS, MaskType

_FIELDS_BY_PART = {
    "attention_mask": ("_attention_mask", *CU_SEQLENS_FIELDS),
    "segment_ids": (*SEGMENT_ID_FIELDS, *CU_SEQLENS_FIELDS),
    "cu_seqlens": CU_SEQLENS_FIELDS,
    "positions": ("q_positions", "kv_positions"),
}


def replace(
    info: MaskType,
    *,
    attention_mask: Any = None,
    q_segment_ids: Any = None,
    kv_segment_ids: Any = None,
    cu_seqlens_q: Any = None,
    cu_seqlens_kv: Any = None,
    **fields: Any,
) -> MaskType:
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
        computed = get_or_compute_segment_ids(info)
        q_segment_ids = computed[0] if q_segment_ids is None else q_segment_ids
        kv_segment_ids = computed[1] if kv_segment_ids is None else kv_segment_ids
    named = {
        "_attention_mask": attention_mask,
        "_q_segment_ids": q_segment_ids,
        "_kv_segment_ids": kv_segment_ids,
        "_cu_seqlens_q": cu_seqlens_q,
        "_cu_seqlens_kv": cu_seqlens_kv,
    }
    changes = {name: value for name, value in named.items() if value is not None}
    unknown = fields.keys() - {"q_positions", "kv_positions", *STATIC_FIELDS}
    if unknown:
        raise ValueError(f"replace() got {sorted(unknown)}, but MaskInfo has no such field")
    if "_attention_mask" in changes and not changes.keys() & set(SEGMENT_ID_FIELDS):
        changes |= dict.fromkeys(SEGMENT_ID_FIELDS)
    if changes.keys() - set(CU_SEQLENS_FIELDS):
        changes = dict.fromkeys(CU_SEQLENS_FIELDS) | changes
    return dataclasses.replace(info, **changes, **fields)


def without(info: MaskType, *names: str) -> MaskType:
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
    unknown = set(names) - _FIELDS_BY_PART.keys()
    if unknown:
        raise ValueError(f"without() got {sorted(unknown)}, wants any of {sorted(_FIELDS_BY_PART)}")
    cleared = dict.fromkeys(part for name in names for part in _FIELDS_BY_PART[name])
    flags = dict.fromkeys(BAKED_IN_FLAGS.values(), False) if "attention_mask" in names else {}
    return dataclasses.replace(info, **cleared, **flags)


def materialize_attention_mask(info: MaskType, dtype: DTypeLike = jnp.bool_) -> MaskType:
    """Returns a MaskInfo of the same meaning that stores an explicit mask in `dtype`.

    Raises:
        ValueError: The mask is empty.
    """
    return replace(
        info,
        attention_mask=get_or_compute_attention_mask(info, dtype),
        q_segment_ids=info.explicit_q_segment_ids,
        kv_segment_ids=info.explicit_kv_segment_ids,
        cu_seqlens_q=info.explicit_cu_seqlens_q,
        cu_seqlens_kv=info.explicit_cu_seqlens_kv,
    )


def materialize_segment_ids(info: MaskType, per_head: bool = False) -> MaskType:
    """Returns a MaskInfo of the same meaning that stores segment ids, if need be those of `mask_to_segment_ids`.

    Args:
        info: The mask.
        per_head: Only for masks with one head. Stored ids are shared by the heads;
            `get_or_compute_segment_ids(per_head=True)` returns ids of every head.

    Raises:
        ValueError: The mask is empty, or has several heads and `per_head` is set.
    """
    heads = 1 if info.explicit_mask is None else info.explicit_mask.shape[1]
    if per_head and heads > 1:
        raise ValueError(
            f"per_head=True with {heads} heads: stored segment ids are shared by the heads; "
            "get_or_compute_segment_ids(per_head=True) returns ids of every head"
        )
    if info.explicit_q_segment_ids is not None:
        return info
    q_ids, kv_ids = get_or_compute_segment_ids(info)
    return replace(info, q_segment_ids=q_ids, kv_segment_ids=kv_ids)
