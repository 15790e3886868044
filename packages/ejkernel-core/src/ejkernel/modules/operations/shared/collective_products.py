"""Shared by the products of arrays that are spread over a mesh axis: their arguments, checks and specs."""

from collections.abc import Iterable
from typing import Any

import jax.numpy as jnp
from jax.sharding import PartitionSpec

from ejkernel import _compat
from ejkernel.families.collective_matmul import Collective, CollectiveMatmul
from ejkernel.families.ring_attention import axis_size
from ejkernel.modules.operations.shared.ring_placement import axes_of_several_devices, place_on_axis, spec_entry_axes
from ejkernel.modules.operations.shared.shapes import as_count, as_precision, check_dtype, check_same_dtype, got


def canonical_fields(args: Any) -> dict[str, Any]:
    """Returns the canonical values of the arguments that both products have.

    Raises:
        ValueError: An argument is wrong; the message names it.
    """
    axis: Any = args.axis_name
    if not isinstance(axis, str | None):
        raise ValueError(f"axis_name: got {got(axis)}, wants the name of one mesh axis, or None")
    return {
        "collective_id": as_count("collective_id", args.collective_id),
        "precision": as_precision("precision", args.precision),
        "tp_size": None if args.tp_size is None else as_count("tp_size", args.tp_size, minimum=1),
    }


def check_matrices(args: Any, y_axis: int) -> None:
    """Checks x and y.

    Args:
        args: The argument record.
        y_axis: The contracted axis of y.

    Raises:
        ValueError: An argument is wrong; the message names it.
    """
    for name, array in (("x", args.x), ("y", args.y)):
        shape = getattr(array, "shape", None)
        if shape is None or len(shape) != 2:
            raise ValueError(f"{name}: got {got(array) if shape is None else f'shape {shape}'}, wants two axes")
        check_dtype(name, array, jnp.floating, "a floating dtype")
    check_same_dtype({"x": args.x, "y": args.y})
    contracted = args.x.shape[1]
    if args.y.shape[y_axis] != contracted:
        wants = f"[{contracted}, N]" if y_axis == 0 else f"[N, {contracted}]"
        raise ValueError(f"y: got shape {tuple(args.y.shape)}, wants {wants} for x of shape {tuple(args.x.shape)}")


def check_axis_size(args: Any, devices: int, divided_axes: Iterable[tuple[str, int]]) -> None:
    """Checks the arguments that have to go with the number of devices along the axis.

    Args:
        args: The argument record.
        devices: The number of devices.
        divided_axes: Name of x or y and the axis of it that the devices divide among them, for each such axis.

    Raises:
        ValueError: `tp_size` is another number, an axis is empty, or the devices cannot divide an axis evenly.
    """
    if args.tp_size not in (None, devices):
        raise ValueError(f"tp_size: got {args.tp_size}, axis {args.axis_name!r} has {devices} devices")
    for name in ("x", "y"):
        shape = tuple(getattr(args, name).shape)
        if devices > 1 and 0 in shape:
            raise ValueError(f"{name}: got shape {shape}, wants no empty axis over {devices} devices")
    for name, axis in divided_axes:
        shape = tuple(getattr(args, name).shape)
        if shape[axis] % devices:
            wants = f"axis {axis} to divide among the {devices} devices of {args.axis_name!r}"
            raise ValueError(f"{name}: got shape {shape}, wants {wants}")


def lower_to_record(args: Any, collective: Collective, *, transpose_y: bool) -> CollectiveMatmul:
    """Returns the family's record of a call."""
    record = CollectiveMatmul(
        x=args.x,
        y=args.y,
        collective=collective,
        axis_name=args.axis_name,
        transpose_y=transpose_y,
        collective_id=args.collective_id,
        precision=args.precision,
    )
    # Where `shard_map` keeps track of what varies, an array that does not gets its gradient summed over the devices.
    if args.axis_name is not None:
        record = _compat.as_varying_over(record, args.axis_name)
    return _compat.as_varying(record, record)


def placement(
    args: Any,
    options: dict[str, Any],
    split_axes: dict[str, int],
    specs: tuple[tuple[PartitionSpec, ...], PartitionSpec],
    *,
    scatters_rows: bool,
) -> dict[str, Any]:
    """Returns the call options with the `mesh`, `in_specs` and `out_specs` that the call is carried out with.

    Args:
        args: The argument record.
        options: The call options.
        split_axes: Name of x or y -> the axis of it that is spread over `axis_name`.
        specs: The specs of the arguments and of the output where the caller gives none.
        scatters_rows: Whether the rows of x are those that the devices divide among them.

    Raises:
        ValueError: `axis_name` is neither bound nor an axis of a mesh, or the caller's specs do not spread the arrays
            over it, or an argument does not go with its size.
    """

    def check_specs(axis_name: str | None, in_specs: Any, mesh: Any) -> None:
        if axis_name is None or not isinstance(in_specs, tuple | list):
            return
        expected = axes_of_several_devices((axis_name,), mesh)
        for name, spec in zip(("x", "y"), in_specs, strict=False):
            axis = split_axes.get(name)
            if axis is not None and axes_of_several_devices(spec_entry_axes(spec, axis), mesh) != expected:
                wants = f"axis_name={axis_name!r} wants axis {axis} of {name} split over {axis_name!r}"
                raise ValueError(f"in_specs: {wants}, got {spec}")

    sharding_options = {name: options[name] for name in ("mesh", "in_specs", "out_specs")}
    placed = place_on_axis(args.axis_name, sharding_options, check_specs, lambda mesh: specs)
    if args.axis_name is None and args.tp_size not in (None, 1):
        raise ValueError(f"tp_size: got {args.tp_size}, wants 1 or None with axis_name=None")
    if args.axis_name is not None:
        mesh_sizes = getattr(placed["mesh"], "shape", {})
        scattered = [("x", 0)] if scatters_rows else []
        divided = [*split_axes.items(), *scattered] if mesh_sizes else scattered
        check_axis_size(args, mesh_sizes.get(args.axis_name, axis_size(args.axis_name)), divided)
    return {**options, **placed}
