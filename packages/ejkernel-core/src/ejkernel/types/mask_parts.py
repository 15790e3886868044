"""The stored parts of a MaskInfo, which all its methods read."""

import dataclasses
from typing import TypeVar

import jax

from ejkernel.types.checks import check_leaf_shapes, has_values
from ejkernel.types.debug import check_cu_seqlens_values, check_mask_values, get_debug_mode
from ejkernel.types.integers import clamp_to_int32, exact_segment_ids
from ejkernel.types.segments import as_bool_mask

AxisNames = tuple[str, ...] | str | None

BAKED_IN_FLAGS = {
    "causal": "causal_mask_baked_in",
    "sliding_window": "sliding_window_baked_in",
    "chunked": "chunked_mask_baked_in",
    "token_type_ids": "token_type_ids_baked_in",
}
CU_SEQLENS_FIELDS = ("_cu_seqlens_q", "_cu_seqlens_kv")
SEGMENT_ID_FIELDS = ("_q_segment_ids", "_kv_segment_ids")
LEAF_FIELDS = (
    "_attention_mask",
    *SEGMENT_ID_FIELDS,
    *CU_SEQLENS_FIELDS,
    "q_positions",
    "kv_positions",
)
STATIC_FIELDS = (
    *BAKED_IN_FLAGS.values(),
    "batch_axis_name",
    "qheads_axis_name",
    "kvheads_axis_name",
    "sequence_axis_name",
)

MaskType = TypeVar("MaskType", bound="MaskParts")


@dataclasses.dataclass(frozen=True, eq=False, repr=False)
class MaskParts:
    """The fields that a `MaskInfo` stores. `MaskInfo` documents them."""

    _attention_mask: jax.Array | None = None
    _q_segment_ids: jax.Array | None = None
    _kv_segment_ids: jax.Array | None = None
    _cu_seqlens_q: jax.Array | None = None
    _cu_seqlens_kv: jax.Array | None = None
    q_positions: jax.Array | None = None
    kv_positions: jax.Array | None = None
    causal_mask_baked_in: bool = False
    sliding_window_baked_in: bool = False
    chunked_mask_baked_in: bool = False
    token_type_ids_baked_in: bool = False
    batch_axis_name: AxisNames = ("dp", "fsdp")
    qheads_axis_name: AxisNames = "tp"
    kvheads_axis_name: AxisNames = "tp"
    sequence_axis_name: AxisNames = "sp"

    def __post_init__(self) -> None:
        leaves = {name.removeprefix("_"): getattr(self, name) for name in LEAF_FIELDS}
        check_leaf_shapes(leaves)
        self._narrow_integers()
        if get_debug_mode():
            check_mask_values("attention_mask", self._attention_mask)
            for name in ("cu_seqlens_q", "cu_seqlens_kv"):
                check_cu_seqlens_values(name, leaves[name])

    def _narrow_integers(self) -> None:
        """Brings ids and positions of wider dtypes into int32; JAX would wrap 64-bit ones around."""
        pair = (self._q_segment_ids, self._kv_segment_ids)
        if all(map(has_values, pair)):
            for name, ids in zip(("_q_segment_ids", "_kv_segment_ids"), exact_segment_ids(*pair), strict=True):
                object.__setattr__(self, name, ids)
        for name in ("q_positions", "kv_positions"):
            if has_values(getattr(self, name)):
                object.__setattr__(self, name, clamp_to_int32(getattr(self, name)))

    @property
    def explicit_mask(self) -> jax.Array | None:
        """Returns the stored mask [batch or 1, heads or 1, q_len, kv_len] as booleans, or None; ids apply as well."""
        return None if self._attention_mask is None else as_bool_mask(self._attention_mask)

    @property
    def explicit_q_segment_ids(self) -> jax.Array | None:
        """Returns the stored ids [batch, q_len] of the queries, or None."""
        return self._q_segment_ids

    @property
    def explicit_kv_segment_ids(self) -> jax.Array | None:
        """Returns the stored ids [batch, kv_len] of the keys, or None."""
        return self._kv_segment_ids

    @property
    def explicit_cu_seqlens_q(self) -> jax.Array | None:
        """Returns the stored cumulative lengths [sequences + 1] of the queries, or None."""
        return self._cu_seqlens_q

    @property
    def explicit_cu_seqlens_kv(self) -> jax.Array | None:
        """Returns the stored cumulative lengths [sequences + 1] of the keys, or None."""
        return self._cu_seqlens_kv

    @property
    def is_empty(self) -> bool:
        """Returns whether neither a mask nor ids are stored, so that everything attends; positions may be stored."""
        return self._attention_mask is None and self._q_segment_ids is None

    def _dimension_size(self, leaf_axes: dict[str, int]) -> int | None:
        """Returns the size of a dimension from the first of these leaves that is stored."""
        leaves = ((getattr(self, name), axis) for name, axis in leaf_axes.items())
        return next((leaf.shape[axis] for leaf, axis in leaves if leaf is not None), None)

    @property
    def batch_size(self) -> int | None:
        """Returns the number of rows of the stored parts, or None if nothing is stored."""
        return self._dimension_size({"_q_segment_ids": 0, "_attention_mask": 0, "q_positions": 0, "kv_positions": 0})

    @property
    def q_len(self) -> int | None:
        """Queries in a row, or None if nothing stored tells."""
        return self._dimension_size({"_q_segment_ids": -1, "_attention_mask": -2, "q_positions": -1})

    @property
    def kv_len(self) -> int | None:
        """Returns the number of keys in a row, or None if nothing stored says it."""
        return self._dimension_size({"_kv_segment_ids": -1, "_attention_mask": -1, "kv_positions": -1})

    @property
    def shape(self) -> tuple[int | None, int | None, int | None]:
        """Returns `(batch_size, q_len, kv_len)`."""
        return self.batch_size, self.q_len, self.kv_len
