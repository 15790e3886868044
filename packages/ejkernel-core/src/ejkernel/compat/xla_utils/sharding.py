"""Computes the shardings of arrays on a mesh, and orders of tokens for them."""

import math
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from ejkernel.modules.operations.shared.shapes import as_count, as_flag, got
from ejkernel.renamed import accept_older_names


@accept_older_names(spec="partition_spec")
def get_corrected_named_sharding(shape: Sequence[int], partition_spec: PartitionSpec, mesh: Mesh) -> NamedSharding:
    """Returns the sharding that a mesh can give an array of this shape: what does not fit is replicated instead.

    Args:
        shape: Of the array.
        partition_spec: What is wished for, one entry for each leading dimension at most. Of several axes of one
            dimension, those are kept, from the left, whose sizes together divide it.
        mesh: Axes that it does not have are left out.

    Raises:
        ValueError: `partition_spec` has more entries than `shape`.

    Example:
        ```python
        import jax
        from jax.sharding import PartitionSpec as P
        from ejkernel.xla_utils import get_corrected_named_sharding

        mesh = jax.sharding.Mesh(jax.devices()[:2], ("dp",))
        assert get_corrected_named_sharding((4, 3), P("dp", "tp"), mesh).spec == P("dp", None)
        assert get_corrected_named_sharding((3, 3), P("dp"), mesh).spec == P(None)
        ```
    """
    if len(partition_spec) > len(shape):
        raise ValueError(
            f"partition_spec: got {partition_spec} for shape {tuple(shape)}, wants at most {len(shape)} entries"
        )
    entries = [_fitting_spec_entry(size, entry, mesh) for size, entry in zip(shape, partition_spec, strict=False)]
    return NamedSharding(mesh, PartitionSpec(*entries))


def _fitting_spec_entry(size: int, entry: Any, mesh: Mesh) -> Any:
    if entry is None or entry is PartitionSpec.UNCONSTRAINED:
        return entry
    axes: list[str] = []
    for name in (entry,) if isinstance(entry, str) else entry:
        if name in mesh.shape and size % math.prod(mesh.shape[axis] for axis in (*axes, name)) == 0:
            axes.append(name)
    if isinstance(entry, str) or not axes:
        return axes[0] if axes else None
    return tuple(axes)


@accept_older_names(x="tensor")
def reorder_sequence(tensor: jax.Array, cp_size: int, seq_dim: int = 1, to_contiguous: bool = False) -> jax.Array:
    """Deals tokens out to devices so that causal attention gives each of them equally much to do. Differentiable.

    The sequence is cut into `2 * cp_size` pieces; device i gets the pieces i and `2 * cp_size - 1 - i`, the first of
    which has few keys before it, and the second many (Llama 3 team 2024, arXiv:2407.21783, section 3.3.2). Positions
    do not follow by themselves: reorder `jnp.arange(T)` in the same way and give it as `MaskInfo.q_positions`.

    Args:
        tensor: Array; its size along `seq_dim` is a multiple of `2 * cp_size`.
        cp_size: Devices along the sequence, an int >= 1.
        seq_dim: Dimension of the sequence; may be negative.
        to_contiguous: Go back from the zig-zag order to the natural one.

    Returns:
        `tensor` with its tokens reordered along `seq_dim`.

    Raises:
        ValueError: A size or an argument does not fit.

    Example:
        ```python
        import jax.numpy as jnp
        from ejkernel.xla_utils import reorder_sequence

        x = jnp.arange(8)[None]
        zigzag = reorder_sequence(x, cp_size=2)
        assert zigzag.tolist() == [[0, 1, 6, 7, 2, 3, 4, 5]]
        assert (reorder_sequence(zigzag, cp_size=2, to_contiguous=True) == x).all()
        ```
    """
    pieces = 2 * as_count("cp_size", cp_size, minimum=1)
    if seq_dim not in range(-tensor.ndim, tensor.ndim):
        raise ValueError(f"seq_dim: got {got(seq_dim)}, wants a dimension of tensor, which has shape {tensor.shape}")
    axis = seq_dim % tensor.ndim
    if tensor.shape[axis] % pieces:
        raise ValueError(
            f"tensor: got shape {tensor.shape}, wants a multiple of 2 * cp_size = {pieces} along dimension {axis}"
        )
    zigzag = [piece for device in range(pieces // 2) for piece in (device, pieces - 1 - device)]
    order = [zigzag.index(n) for n in range(pieces)] if as_flag("to_contiguous", to_contiguous) else zigzag
    cut = tensor.reshape(*tensor.shape[:axis], pieces, tensor.shape[axis] // pieces, *tensor.shape[axis + 1 :])
    return jnp.take(cut, jnp.array(order), axis=axis).reshape(tensor.shape)
