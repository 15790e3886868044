"""The constructors of MaskInfo. Each is bound to the class as a class method."""

from typing import Any

import jax
import jax.numpy as jnp
from jax.typing import ArrayLike

from ejkernel.types.checks import as_int32_array, check_rank, check_static_size, checked_integers
from ejkernel.types.cu_seqlens import as_cu_seqlens, cu_seqlens_to_segment_ids
from ejkernel.types.debug import check_mask_values
from ejkernel.types.integers import as_array, exact_segment_ids
from ejkernel.types.mask_parts import AxisNames, MaskType
from ejkernel.types.segments import (
    as_bool_mask,
    padding_segment_ids,
    segment_ids_to_positions,
    validity_to_segment_ids,
)

_BATCH_AXES: AxisNames = ("dp", "fsdp")
_MASK_SHAPES = {2: "[batch, length]", 3: "[batch, q_len, kv_len]", 4: "[batch, heads or 1, q_len, kv_len]"}
# A padding key lies after every query, so no causal rule ever reaches it.
KV_PADDING_POSITION = int(jnp.iinfo(jnp.int32).max)


def from_segments(  # noqa: PLR0913 - a public constructor
    cls: type[MaskType],
    q_segment_ids: ArrayLike,
    kv_segment_ids: ArrayLike | None = None,
    q_positions: ArrayLike | None = None,
    kv_positions: ArrayLike | None = None,
    batch_axis_name: AxisNames = _BATCH_AXES,
    qheads_axis_name: AxisNames = "tp",
    kvheads_axis_name: AxisNames = "tp",
    sequence_axis_name: AxisNames = "sp",
    is_attn_mask: bool = False,
) -> MaskType:
    """Makes a mask from segment ids. Only the ids are stored.

    Args:
        cls: The class.
        q_segment_ids: [batch, q_len] integers of any dtype; equal ids that are not negative attend, negative is
            padding.
        kv_segment_ids: [batch, kv_len], default `q_segment_ids`.
        q_positions: [batch or 1, q_len] integers, the place of a query in its sequence.
        kv_positions: [batch or 1, kv_len] integers.
        batch_axis_name: Mesh axes of the batch, for `get_shardings`.
        qheads_axis_name: Mesh axes of the query heads.
        kvheads_axis_name: Mesh axes of the key heads.
        sequence_axis_name: Mesh axes of the sequence.
        is_attn_mask: Whether the two first arguments are validity masks of any dtype (0 is padding) and not ids.

    Returns:
        The mask.

    Raises:
        ValueError: Ids are not integers (a boolean mask needs `is_attn_mask=True`), or shapes do not fit.
    """
    kv_segment_ids = q_segment_ids if kv_segment_ids is None else kv_segment_ids
    if is_attn_mask:
        q_ids, kv_ids = validity_to_segment_ids(q_segment_ids), validity_to_segment_ids(kv_segment_ids)
    else:
        q_ids, kv_ids = _checked_segment_ids(q_segment_ids, kv_segment_ids)
    return cls(
        _q_segment_ids=q_ids,
        _kv_segment_ids=kv_ids,
        **_position_fields(q_positions, kv_positions),
        **_axis_name_fields(batch_axis_name, qheads_axis_name, kvheads_axis_name, sequence_axis_name),
    )


def _checked_segment_ids(queries: Any, keys: Any) -> tuple[jax.Array, jax.Array]:
    arrays = []
    for name, value in (("q_segment_ids", queries), ("kv_segment_ids", keys)):
        array = as_array(value)
        if array.dtype == jnp.bool_:
            raise ValueError(f"{name} is boolean; pass is_attn_mask=True if it is a validity mask, or integer ids")
        arrays.append(arrays[0] if arrays and value is queries else checked_integers(name, array))
    q_ids, kv_ids = exact_segment_ids(*arrays)
    q_array = jnp.asarray(q_ids)
    return q_array, q_array if kv_ids is q_ids else jnp.asarray(kv_ids)


def _position_fields(queries: Any, keys: Any) -> dict[str, Any]:
    """Returns the fields of positions, whose values have been checked."""
    given = {"q_positions": queries, "kv_positions": keys}
    return {name: None if value is None else as_int32_array(name, value) for name, value in given.items()}


def _axis_name_fields(batch: AxisNames, qheads: AxisNames, kvheads: AxisNames, sequence: AxisNames) -> dict[str, Any]:
    """Returns the fields that name axes of a mesh."""
    names = {"batch": batch, "qheads": qheads, "kvheads": kvheads, "sequence": sequence}
    return {f"{name}_axis_name": axes for name, axes in names.items()}


def decode(cls: type[MaskType], queries: int, keys: int, kv_lens: ArrayLike | None = None) -> MaskType:
    """Makes the positions of queries that are the last tokens of their keys: with causal=True, bottom-right alignment.

    The last query is at the position of the last key, as in a step of decoding or a chunk of a prompt over a cache.
    Operations align the first query with the first key without it.

    Args:
        cls: The class.
        queries: Number of queries.
        keys: Number of keys, or of places in the cache.
        kv_lens: [batch] integers, how many of the keys each row has; those after them are padding. None for all.

    Returns:
        The mask, which stores positions, and with `kv_lens` segment ids of the padding.

    Raises:
        ValueError: A number is not positive, or `kv_lens` are not [batch] integers.

    Example:
        ```python
        import jax, jax.numpy as jnp
        from ejkernel.modules import flash_attention
        from ejkernel.types import MaskInfo

        query = jax.random.normal(jax.random.key(0), (1, 1, 2, 8))
        key, value = jax.random.normal(jax.random.key(1), (2, 1, 6, 2, 8))
        output = flash_attention(query, key, value, causal=True, mask_info=MaskInfo.decode(1, 6))
        assert jnp.allclose(output, flash_attention(query, key, value), atol=1e-5)  # the last query sees every key
        ```
    """
    queries, keys = check_static_size("queries", queries, 1), check_static_size("keys", keys, 1)
    query, key = jnp.arange(queries, dtype=jnp.int32)[None], jnp.arange(keys, dtype=jnp.int32)[None]
    if kv_lens is None:
        return cls(q_positions=query + (keys - queries), kv_positions=key)
    lengths = jnp.asarray(checked_integers("kv_lens", kv_lens)).astype(jnp.int32)
    check_rank("kv_lens", lengths.shape, {1: "[batch]"})
    ids = jnp.where(key < lengths[:, None], 0, -1)
    return cls(
        _q_segment_ids=jnp.zeros((lengths.shape[0], queries), jnp.int32),
        _kv_segment_ids=ids,
        q_positions=query + (lengths[:, None] - queries),
        kv_positions=jnp.broadcast_to(key, ids.shape),
    )


def from_attention_mask(  # noqa: PLR0913 - a public constructor
    cls: type[MaskType],
    attention_mask: ArrayLike,
    q_positions: ArrayLike | None = None,
    kv_positions: ArrayLike | None = None,
    *,
    mask_is_valid: bool = True,
    batch_axis_name: AxisNames = _BATCH_AXES,
    qheads_axis_name: AxisNames = "tp",
    kvheads_axis_name: AxisNames = "tp",
    sequence_axis_name: AxisNames = "sp",
) -> MaskType:
    """Makes a mask from a boolean array.

    A 2-D validity mask is stored as ids alone. A pairwise mask is stored as it is, together with ids that carry its
    padding (-1 for queries that attend to nothing and keys no query attends to, 0 for the rest).

    Args:
        cls: The class.
        attention_mask: [batch, length] validity of the tokens of both sides, [batch, q_len, kv_len] or
            [batch, heads or 1, q_len, kv_len]. Every value but 0 attends.
        q_positions: See `from_segments`.
        kv_positions: See `from_segments`.
        mask_is_valid: False for a mask that says what is hidden: every value but 0 is masked out.
        batch_axis_name: See `from_segments`.
        qheads_axis_name: See `from_segments`.
        kvheads_axis_name: See `from_segments`.
        sequence_axis_name: See `from_segments`.

    Returns:
        The mask.

    Raises:
        ValueError: The mask has another rank, or (if its values are readable) is a floating bias and no mask.
    """
    check_mask_values("attention_mask", attention_mask)
    attends = as_bool_mask(attention_mask)
    attends = attends if mask_is_valid else ~attends
    check_rank("attention_mask", attends.shape, _MASK_SHAPES)
    if attends.ndim == 2:
        pairwise, q_ids = None, validity_to_segment_ids(attends)
        kv_ids = q_ids
    else:
        pairwise = attends if attends.ndim == 4 else attends[:, None]
        q_ids, kv_ids = padding_segment_ids(pairwise.any(axis=1))
    return cls(
        _attention_mask=pairwise,
        _q_segment_ids=q_ids,
        _kv_segment_ids=kv_ids,
        **_position_fields(q_positions, kv_positions),
        **_axis_name_fields(batch_axis_name, qheads_axis_name, kvheads_axis_name, sequence_axis_name),
    )


def from_cu_seqlens(  # noqa: PLR0913 - a public constructor
    cls: type[MaskType],
    cu_seqlens_q: ArrayLike,
    *,
    max_q_len: int,
    cu_seqlens_kv: ArrayLike | None = None,
    max_kv_len: int | None = None,
    q_positions: ArrayLike | None = None,
    kv_positions: ArrayLike | None = None,
    batch_axis_name: AxisNames = _BATCH_AXES,
    qheads_axis_name: AxisNames = "tp",
    kvheads_axis_name: AxisNames = "tp",
    sequence_axis_name: AxisNames = "sp",
) -> MaskType:
    """Makes the mask of one packed row: sequences one after the other, each attending to itself.

    The vectors and the ids made of them are stored. If the keys have lengths of their own, an index no longer says
    where in its sequence a token is, so the positions (from 0 in every sequence, on each side) are stored as well,
    unless they are given.

    Args:
        cls: The class.
        cu_seqlens_q: [sequences + 1] cumulative lengths, starting with 0; may be traced, sequences may be empty.
        max_q_len: Static length of the whole row of queries; what lies past the last sequence is padding.
        cu_seqlens_kv: [sequences + 1] of the keys, default `cu_seqlens_q`.
        max_kv_len: Static length of the row of keys, default `max_q_len`.
        q_positions: [1, max_q_len]; see `from_segments`.
        kv_positions: [1, max_kv_len]; see `from_segments`.
        batch_axis_name: See `from_segments`.
        qheads_axis_name: See `from_segments`.
        kvheads_axis_name: See `from_segments`.
        sequence_axis_name: See `from_segments`.

    Returns:
        A mask of batch size 1.

    Raises:
        ValueError: A vector is not 1-D or not of integers, the two have different lengths, a length is not static, or
            (if values are readable) a vector does not start with 0, decreases or is longer than its row.
    """
    q_len = check_static_size("max_q_len", max_q_len)
    kv_len = q_len if max_kv_len is None else check_static_size("max_kv_len", max_kv_len)
    has_kv = cu_seqlens_kv is not None
    cu_q = as_cu_seqlens("cu_seqlens_q", cu_seqlens_q, q_len)
    cu_kv = as_cu_seqlens("cu_seqlens_kv", cu_seqlens_kv, kv_len) if has_kv else cu_q
    q_ids, kv_ids = cu_seqlens_to_segment_ids(cu_q, q_len), cu_seqlens_to_segment_ids(cu_kv, kv_len)
    if has_kv and q_positions is None:
        q_positions = segment_ids_to_positions(q_ids)
    if has_kv and kv_positions is None:
        kv_positions = segment_ids_to_positions(kv_ids, pad_value=KV_PADDING_POSITION)
    return cls(
        _q_segment_ids=q_ids,
        _kv_segment_ids=kv_ids,
        _cu_seqlens_q=cu_q,
        _cu_seqlens_kv=cu_kv,
        **_position_fields(q_positions, kv_positions),
        **_axis_name_fields(batch_axis_name, qheads_axis_name, kvheads_axis_name, sequence_axis_name),
    )


def from_random(  # noqa: PLR0913 - a public constructor
    cls: type[MaskType],
    batch_size: int,
    q_len: int,
    kv_len: int | None = None,
    sparsity: float = 0.5,
    seed: int = 0,
    q_positions: ArrayLike | None = None,
    kv_positions: ArrayLike | None = None,
    batch_axis_name: AxisNames = _BATCH_AXES,
    qheads_axis_name: AxisNames = "tp",
    kvheads_axis_name: AxisNames = "tp",
    sequence_axis_name: AxisNames = "sp",
) -> MaskType:
    """Makes a random mask, for tests: every pair attends with probability `1 - sparsity`. No ids are stored.

    Args:
        cls: The class.
        batch_size: Rows.
        q_len: Queries in a row.
        kv_len: Keys in a row, default `q_len`.
        sparsity: From 0 (everything attends) to 1 (nothing does).
        seed: Of the random numbers; the same seed gives the same mask.
        q_positions: See `from_segments`.
        kv_positions: See `from_segments`.
        batch_axis_name: See `from_segments`.
        qheads_axis_name: See `from_segments`.
        kvheads_axis_name: See `from_segments`.
        sequence_axis_name: See `from_segments`.

    Returns:
        The mask, stored as [batch_size, 1, q_len, kv_len] booleans.

    Raises:
        ValueError: `sparsity` lies outside [0, 1].
    """
    if not 0.0 <= sparsity <= 1.0:
        raise ValueError(f"sparsity must be from 0 to 1, got {sparsity}")
    shape = (batch_size, 1, q_len, q_len if kv_len is None else kv_len)
    return cls(
        _attention_mask=jax.random.bernoulli(jax.random.key(seed), 1.0 - sparsity, shape),
        **_position_fields(q_positions, kv_positions),
        **_axis_name_fields(batch_axis_name, qheads_axis_name, kvheads_axis_name, sequence_axis_name),
    )


def dynamic_init(
    cls: type[MaskType],
    *,
    mask_info: MaskType | None = None,
    input_ids: ArrayLike | None = None,
    inputs_embeds: ArrayLike | None = None,
    attention_mask: ArrayLike | None = None,
) -> MaskType:
    """Makes a mask from the arguments of a model; the first of the following arguments that is not None decides.

    Args:
        cls: The class.
        mask_info: Returned as it is.
        attention_mask: As for `from_attention_mask`, but in a mask that is not boolean only the value 1 attends.
        input_ids: [batch, length]; every token is valid.
        inputs_embeds: [batch, length, features]; every token is valid.

    Returns:
        The mask.

    Raises:
        ValueError: Nothing is given, or an array has the wrong rank.
    """
    if mask_info is not None:
        return mask_info
    if attention_mask is not None:
        mask = jnp.asarray(attention_mask)
        return from_attention_mask(cls, mask if mask.dtype == jnp.bool_ else mask == 1)
    if input_ids is not None:
        check_rank("input_ids", jnp.shape(input_ids), {2: "[batch, length]"})
        return from_segments(cls, jnp.zeros(jnp.shape(input_ids), jnp.int32))
    if inputs_embeds is not None:
        check_rank("inputs_embeds", jnp.shape(inputs_embeds), {3: "[batch, length, features]"})
        return from_segments(cls, jnp.zeros(jnp.shape(inputs_embeds)[:2], jnp.int32))
    raise ValueError("one of mask_info, attention_mask, input_ids and inputs_embeds must be given")
