"""From the arguments of a call to the record its kernels see."""

import math
from typing import Any

import jax
import jax.numpy as jnp

from ejkernel.ops.model import Op
from ejkernel.ops.sharding import axis_letters_of, record_specs, split_axes


def lowered_record(op: Op, args: Any, mesh: Any = None, in_specs: Any = None) -> Any:
    """Returns the record that the kernels of a call see: the lowered call or, under a mesh, its first shard.

    Args:
        op: The operation.
        args: Its argument record.
        mesh: With in_specs: the call runs under `shard_map`.
        in_specs: Partition specs of the first arguments, in public order.

    Raises:
        ValueError: The call is wrong.
    """
    op.validate(args)
    record = op.lower(args)
    if mesh is None:
        return record
    letters = axis_letters_of(op, args)
    split = split_axes(letters, tuple(in_specs), mesh)

    def first_shard(x: Any, spec: Any) -> Any:
        names = [(entry,) if isinstance(entry, str) else entry or () for entry in spec]
        parts = [math.prod(mesh.shape[name] for name in entry) for entry in names] + [1] * (x.ndim - len(names))
        return x[tuple(slice(size // part) for size, part in zip(x.shape, parts, strict=True))]

    local = jax.tree.map(first_shard, record, record_specs(letters, record, split, mesh))
    return op.family.apply_shard_offsets(local, {letter: jnp.int32(0) for letter in split})
