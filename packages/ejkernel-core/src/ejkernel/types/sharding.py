"""Computes the shardings of the parts of a `MaskInfo` on a mesh."""

import math
from typing import Any, NamedTuple

from jax.sharding import AbstractMesh, Mesh, PartitionSpec

from ejkernel.types.mask_parts import AxisNames, MaskParts

# A mesh axis, several that shard one dimension together, or None for replication.


class MaskSharding(NamedTuple):
    """Partition specs of the stored parts of a MaskInfo; None stands for a part that is not stored.

    Attributes:
        attention_mask: Of [batch, heads or 1, q_len, kv_len]; keys are replicated.
        q_segment_ids: Of [batch, q_len].
        kv_segment_ids: Of [batch, kv_len].
        cu_seqlens_q: Of [sequences + 1], replicated.
        cu_seqlens_kv: Of [sequences + 1], replicated.
        q_positions: Of [batch, q_len].
        kv_positions: Of [batch, kv_len].
    """

    attention_mask: PartitionSpec | None
    q_segment_ids: PartitionSpec | None
    kv_segment_ids: PartitionSpec | None
    cu_seqlens_q: PartitionSpec | None
    cu_seqlens_kv: PartitionSpec | None
    q_positions: PartitionSpec | None
    kv_positions: PartitionSpec | None


def get_empty_sharding() -> MaskSharding:
    """Returns the MaskSharding of a MaskInfo that stores nothing: None everywhere."""
    return MaskSharding(*[None] * len(MaskSharding._fields))


def get_shardings(info: MaskParts, sequence_parallel: bool = False, *, mesh: Mesh | AbstractMesh) -> MaskSharding:
    """Returns partition specs of the stored parts, from the axis names of this MaskInfo.

    A dimension that the devices of its axes do not divide is replicated, so a mask with one head is not sharded over
    heads.

    Args:
        info: The mask.
        sequence_parallel: Whether queries, ids and positions are sharded over `sequence_axis_name`.
        mesh: Whose axes are used.

    Returns:
        One spec for each stored part.

    Raises:
        ValueError: The mesh has no axis of a configured name.
    """
    sequence = info.sequence_axis_name if sequence_parallel else None
    axes = {
        "batch_axis_name": info.batch_axis_name,
        "qheads_axis_name": info.qheads_axis_name,
        "sequence_axis_name": sequence,
    }
    for label, names in axes.items():
        _check_axes(label, names, mesh)
    token_axes = (info.batch_axis_name, sequence)
    parts: dict[str, tuple[Any, tuple[AxisNames, ...]]] = {
        "attention_mask": (info.explicit_mask, (info.batch_axis_name, info.qheads_axis_name, sequence, None)),
        "q_segment_ids": (info.explicit_q_segment_ids, token_axes),
        "kv_segment_ids": (info.explicit_kv_segment_ids, token_axes),
        "cu_seqlens_q": (info.explicit_cu_seqlens_q, (None,)),
        "cu_seqlens_kv": (info.explicit_cu_seqlens_kv, (None,)),
        "q_positions": (info.q_positions, token_axes),
        "kv_positions": (info.kv_positions, token_axes),
    }
    return MaskSharding(**{name: _spec_of_array(array, names, mesh) for name, (array, names) in parts.items()})


def _axis_names_tuple(names: AxisNames) -> tuple[str, ...]:
    return () if names is None else (names,) if isinstance(names, str) else names


def _check_axes(label: str, names: AxisNames, mesh: Mesh | AbstractMesh) -> None:
    missing = [name for name in _axis_names_tuple(names) if name not in mesh.shape]
    if missing:
        raise ValueError(
            f"{label}={names!r}: the mesh has no axis {missing[0]!r}; its axes are {tuple(mesh.axis_names)}"
        )


def _spec_of_array(array: Any, names: tuple[AxisNames, ...], mesh: Mesh | AbstractMesh) -> PartitionSpec | None:
    if array is None:
        return None

    def axes_that_divide(size: int, dimension_names: AxisNames) -> AxisNames:
        devices = math.prod(mesh.shape[name] for name in _axis_names_tuple(dimension_names))
        return dimension_names if size % devices == 0 else None

    return PartitionSpec(*map(axes_that_divide, array.shape, names))
