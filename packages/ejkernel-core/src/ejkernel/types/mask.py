"""MaskInfo: which query attends to which key."""

import dataclasses
import json
from typing import Any, final

import jax
import jax.numpy as jnp
from jax import export

from ejkernel.types import changes, constructors, derived, sharding, transforms
from ejkernel.types.checks import is_array
from ejkernel.types.cu_seqlens import (
    attention_mask_to_qkv_cu_seqlens,
    cu_seqlens_to_mask,
    cu_seqlens_to_segment_ids,
    qkv_cu_seqlens_to_attention_mask,
    qkv_cu_seqlens_to_qkv_masks,
    qkv_masks_to_cu_seqlens,
    segment_ids_to_cu_seqlens,
)
from ejkernel.types.debug import get_debug_mode, set_debug_mode
from ejkernel.types.mask_parts import BAKED_IN_FLAGS, LEAF_FIELDS, STATIC_FIELDS, MaskParts
from ejkernel.types.segments import (
    mask_to_segment_ids,
    segment_ids_to_mask,
    segment_ids_to_positions,
    segment_ids_to_qkv_masks,
)
from ejkernel.types.sharding import MaskSharding
from ejkernel.types.visualize import visualize as draw

__all__ = [
    "MaskInfo",
    "MaskSharding",
    "attention_mask_to_qkv_cu_seqlens",
    "cu_seqlens_to_mask",
    "cu_seqlens_to_segment_ids",
    "get_debug_mode",
    "mask_to_segment_ids",
    "qkv_cu_seqlens_to_attention_mask",
    "qkv_cu_seqlens_to_qkv_masks",
    "qkv_masks_to_cu_seqlens",
    "segment_ids_to_cu_seqlens",
    "segment_ids_to_mask",
    "segment_ids_to_positions",
    "segment_ids_to_qkv_masks",
    "set_debug_mode",
]


@final
@jax.tree_util.register_pytree_with_keys_class
@dataclasses.dataclass(frozen=True, eq=False, repr=False)
class MaskInfo(MaskParts):
    """Says which query attends to which key: by an explicit mask, segment ids, or both.

    A pair attends if **every** stored part lets it: the explicit mask is True and the segment ids are equal and not
    negative (a negative id is padding). With nothing stored everything attends. Nothing of size q_len x kv_len is made
    unless asked for: the constructors from ids, lengths and 2-D validity masks store ids alone.

    Ids and positions are stored as int32. Ids of wider or unsigned dtypes that it does not hold are renumbered, so that
    equal ones stay equal. Operations compare positions as if those further than `2**29` from 0 were `2**29` from it.

    A MaskInfo is an immutable pytree. Arrays are leaves, flags and axis names are static. Everything derived is
    computed anew from the leaves, never stored, and depends on values only through JAX operations, so it works under
    jit, vmap and grad.

    Kernels read what is stored: `explicit_mask`, `explicit_q_segment_ids`, `explicit_kv_segment_ids`,
    `explicit_cu_seqlens_q`, `explicit_cu_seqlens_kv`, `q_positions`, `kv_positions`; each is an array or None.

    Attributes:
        q_positions: [batch or 1, q_len] int32, place of a query in its sequence, or None.
        kv_positions: [batch or 1, kv_len] int32, or None.
        causal_mask_baked_in: Whether the explicit mask is already causal; set by `apply_causal`.
        sliding_window_baked_in: Set by `apply_sliding_window`.
        chunked_mask_baked_in: Set by `apply_chunked`.
        token_type_ids_baked_in: Set by `apply_token_type_ids`.
        batch_axis_name: Mesh axes of the batch, for `get_shardings`.
        qheads_axis_name: Mesh axes of the query heads.
        kvheads_axis_name: Mesh axes of the key heads.
        sequence_axis_name: Mesh axes of the sequence.

    Raises:
        ValueError: From the constructor, if the shapes of the parts do not fit each other; from a property that needs
            tokens (all but the `explicit_*`, `is_empty`, `baked_in_masks` and the sizes), if the MaskInfo is empty.

    Example:
        ```python
        import jax.numpy as jnp
        from ejkernel.types import MaskInfo

        # Two sequences and a padding token in one row.
        info = MaskInfo.from_segments(jnp.array([[0, 0, 0, 1, 1, -1]]))
        assert info.explicit_mask is None  # nothing 6 x 6 so far
        assert info.q_position_ids.tolist() == [[0, 1, 2, 0, 1, -1]]

        causal = info.apply_causal()
        assert causal.attention_mask[0, 0, 4].tolist() == [False, False, False, True, True, False]
        print(causal.visualize(block_size=1, return_str=True))
        ```
    """

    # Functions of the sibling modules, each documented where it is written.
    from_segments = classmethod(constructors.from_segments)
    decode = classmethod(constructors.decode)
    from_attention_mask = classmethod(constructors.from_attention_mask)
    from_cu_seqlens = classmethod(constructors.from_cu_seqlens)
    from_random = classmethod(constructors.from_random)
    dynamic_init = classmethod(constructors.dynamic_init)
    apply_causal = transforms.apply_causal
    apply_sliding_window = transforms.apply_sliding_window
    apply_chunked = transforms.apply_chunked
    apply_kv_lengths = transforms.apply_kv_lengths
    apply_token_type_ids = transforms.apply_token_type_ids
    create_chunked_attention_mask = staticmethod(transforms.create_chunked_attention_mask)
    get_shardings = sharding.get_shardings
    get_empty_sharding = staticmethod(sharding.get_empty_sharding)
    visualize = draw
    get_or_compute_attention_mask = derived.get_or_compute_attention_mask
    get_or_compute_segment_ids = derived.get_or_compute_segment_ids
    get_or_compute_positions = derived.get_or_compute_positions
    get_or_compute_qkv_cu_seqlens = derived.get_or_compute_qkv_cu_seqlens
    get_qkv_masks = derived.get_qkv_masks
    materialize_attention_mask = changes.materialize_attention_mask
    materialize_segment_ids = changes.materialize_segment_ids
    to_dtype = changes.materialize_attention_mask
    create_bias = derived.create_bias
    replace = changes.replace
    without = changes.without
    is_self_attention = derived.is_self_attention

    def tree_flatten_with_keys(self) -> tuple[tuple[tuple[Any, Any], ...], tuple[Any, ...]]:
        """Returns the leaves with their names, and the static fields."""
        leaves = tuple((jax.tree_util.GetAttrKey(name), getattr(self, name)) for name in LEAF_FIELDS)
        return leaves, tuple(getattr(self, name) for name in STATIC_FIELDS)

    @classmethod
    def tree_unflatten(cls, static: tuple[Any, ...], leaves: tuple[Any, ...]) -> "MaskInfo":
        """Rebuilds a MaskInfo around any objects: JAX also puts axis numbers, specs and sentinels where arrays were."""
        info = object.__new__(cls)
        for name, value in zip((*LEAF_FIELDS, *STATIC_FIELDS), (*leaves, *static), strict=True):
            object.__setattr__(info, name, value)
        return info

    def __repr__(self) -> str:
        stored = [(name, getattr(self, name)) for name in LEAF_FIELDS]
        parts = [f"{n.removeprefix('_')}={v.shape if is_array(v) else v}" for n, v in stored if v is not None]
        parts += [flag for flag in BAKED_IN_FLAGS.values() if getattr(self, flag)]
        return f"MaskInfo({', '.join(parts)})"

    @property
    def attention_mask(self) -> jax.Array:
        """Returns all parts as one mask [batch, heads or 1, q_len, kv_len], bool or in the dtype of the stored one."""
        return self.get_or_compute_attention_mask(
            jnp.bool_ if self._attention_mask is None else self._attention_mask.dtype
        )

    @property
    def q_segment_ids(self) -> jax.Array:
        """Returns [batch, q_len] int32, stored or found by `mask_to_segment_ids`."""
        return self.get_or_compute_segment_ids()[0]

    @property
    def kv_segment_ids(self) -> jax.Array:
        """Returns [batch, kv_len] int32, stored or found by `mask_to_segment_ids`."""
        return self.get_or_compute_segment_ids()[1]

    @property
    def cu_seqlens_q(self) -> jax.Array:
        """Returns what `get_or_compute_qkv_cu_seqlens` returns with its defaults."""
        return self.get_or_compute_qkv_cu_seqlens()[0]

    @property
    def cu_seqlens_kv(self) -> jax.Array:
        """Returns what `get_or_compute_qkv_cu_seqlens` returns with its defaults."""
        return self.get_or_compute_qkv_cu_seqlens()[1]

    @property
    def q_lens(self) -> jax.Array:
        """Returns [sequences] tokens of each if cumulative lengths are stored, else [batch] valid tokens of each row;
        int32.
        """
        cu_seqlens = self._cu_seqlens_q
        return _count_valid_tokens(self.q_segment_ids) if cu_seqlens is None else jnp.diff(cu_seqlens)

    @property
    def kv_lens(self) -> jax.Array:
        """Returns the lengths of the keys, in the same form as `q_lens`."""
        cu_seqlens = self._cu_seqlens_kv
        return _count_valid_tokens(self.kv_segment_ids) if cu_seqlens is None else jnp.diff(cu_seqlens)

    @property
    def is_multi_sequence(self) -> jax.Array:
        """Returns [] bool: whether any row holds two different ids that are not negative."""
        ids = self.q_segment_ids
        limit = jnp.iinfo(ids.dtype).max
        highest = ids.max(axis=-1, initial=-1)
        lowest = jnp.where(ids < 0, limit, ids).min(axis=-1, initial=limit)
        return (highest > lowest).any()

    @property
    def baked_in_masks(self) -> dict[str, bool]:
        """Returns the flags by short name: causal, sliding_window, chunked, token_type_ids."""
        return {short: getattr(self, flag) for short, flag in BAKED_IN_FLAGS.items()}

    @property
    def q_attention_mask(self) -> jax.Array:
        """Returns [batch, q_len] int32: 1 for a valid query, 0 for padding."""
        return (self.q_segment_ids >= 0).astype(jnp.int32)

    @property
    def q_position_ids(self) -> jax.Array:
        """Returns [batch, q_len] int32: place of a query in its segment, from 0; -1 for padding."""
        return segment_ids_to_positions(self.q_segment_ids)

    @property
    def bias(self) -> jax.Array:
        """Returns `create_bias` in float32."""
        return self.create_bias()


def _count_valid_tokens(ids: jax.Array) -> jax.Array:
    return (ids >= 0).sum(axis=-1, dtype=jnp.int32)


def _static_fields_to_json(static: tuple[Any, ...]) -> bytes:
    return json.dumps(static).encode()


def _static_fields_from_json(text: bytes | bytearray) -> tuple[Any, ...]:
    return tuple(tuple(value) if isinstance(value, list) else value for value in json.loads(text))


# `jax.export` has to write down the types of what a function takes and gives.
export.register_pytree_node_serialization(
    MaskInfo,
    serialized_name="ejkernel.types.MaskInfo",
    serialize_auxdata=_static_fields_to_json,
    deserialize_auxdata=_static_fields_from_json,
)
