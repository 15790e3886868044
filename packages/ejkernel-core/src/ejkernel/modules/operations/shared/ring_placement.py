"""Decides where a call with an `axis_name` runs: on the passed mesh, on the mesh of the context, or on the current
device.
"""

from collections.abc import Callable
from typing import Any

import jax
from jax.sharding import AbstractMesh, Mesh, NamedSharding, PartitionSpec

from ejkernel import _compat
from ejkernel.families.ring_attention import is_axis_bound


def mesh_and_specs(args: Any, mesh: Any, in_specs: Any, out_specs: Any) -> dict[str, Any]:
    """Returns the `mesh`, `in_specs` and `out_specs` that a call is carried out with.

    Args:
        args: The argument record.
        mesh: As the caller gave it; as above the specs. With `axis_name` alone with it, the specs follow.
        in_specs: Partition specs of the first arguments.
        out_specs: Partition spec of the output.

    Raises:
        ValueError: `axis_name` is neither bound nor an axis of a mesh, or the specs do not spread the sequence over it.
    """

    def specs_on_mesh(mesh: Any) -> tuple[tuple[PartitionSpec, ...], PartitionSpec]:
        query, keys = _query_and_key_specs(args, mesh)
        return (query, keys, keys), query

    options = {"mesh": mesh, "in_specs": in_specs, "out_specs": out_specs}
    return place_on_axis(args.axis_name, options, _check_specs, specs_on_mesh)


def place_on_axis(
    axis_name: str | None,
    options: dict[str, Any],
    check_specs: Callable[[str | None, Any, Any], None],
    specs_on_mesh: Callable[[Any], tuple[tuple[PartitionSpec, ...], PartitionSpec]],
) -> dict[str, Any]:
    """Returns the `mesh`, `in_specs` and `out_specs` of a call whose arrays are spread over a mesh axis.

    Args:
        axis_name: The mesh axis; None where one device has everything.
        options: `mesh`, `in_specs` and `out_specs` as the caller gave them.
        check_specs: (axis name, specs of the arguments, mesh) -> None; raises ValueError for specs that do not spread
            the arrays over the axis.
        specs_on_mesh: Mesh -> the specs of arguments and output where the caller gives none.

    Raises:
        ValueError: `axis_name` is neither bound nor an axis of a mesh, or `check_specs` raises one.
    """
    mesh, in_specs = options["mesh"], options["in_specs"]
    split = in_specs is not None or options["out_specs"] is not None
    if split or axis_name is None or is_axis_bound(axis_name):
        if all(value is not None for value in options.values()):
            _check_axis(axis_name, mesh)
            check_specs(axis_name, in_specs, mesh)
        return options
    mesh = _compat.ambient_mesh() if mesh is None else mesh
    if mesh is None:
        raise ValueError(
            f"axis_name: got {axis_name!r}, which is bound by no shard_map or pmap around the call, and there is "
            "no mesh: pass mesh=, or call in a block of jax.set_mesh(mesh), which must be outside of jax.jit"
        )
    if not isinstance(mesh, Mesh | AbstractMesh):
        raise ValueError(f"mesh: got {type(mesh).__name__}, wants a jax.sharding.Mesh")
    _check_axis(axis_name, mesh)
    in_specs, out_specs = specs_on_mesh(mesh)
    return {"mesh": mesh, "in_specs": in_specs, "out_specs": out_specs}


def _check_axis(axis_name: str | None, mesh: Any) -> None:
    axes = tuple(getattr(mesh, "shape", ()))
    if axis_name is not None and axes and axis_name not in axes:
        raise ValueError(f"axis_name: got {axis_name!r}, the mesh has {', '.join(map(repr, axes))}")


def _check_specs(axis_name: str | None, in_specs: Any, mesh: Any) -> None:
    """Queries, keys and values are spread over the axis, and over that alone; `call` checks everything else.

    Mesh axes of size 1 split nothing.
    """
    if isinstance(in_specs, PartitionSpec) or not isinstance(in_specs, tuple | list):
        return
    names = ("query", "key", "value")
    pairs = zip(names, in_specs, strict=False)
    along = {name: axes_of_several_devices(spec_entry_axes(spec, 1), mesh) for name, spec in pairs if spec is not None}
    if axis_name is not None:
        wrong = {name: axes for name, axes in along.items() if axes != axes_of_several_devices((axis_name,), mesh)}
        if wrong:
            name, axes = next(iter(wrong.items()))
            raise ValueError(
                f"in_specs: axis_name={axis_name!r} wants {name}'s sequence split over {axis_name!r}, got {axes}"
            )
    elif keys := next((axes for name, axes in along.items() if axes and name != "query"), ()):
        raise ValueError(f"axis_name: got None with the keys split over {keys}, wants the axis they are split over")


def axes_of_several_devices(axes: tuple[Any, ...], mesh: Any) -> tuple[Any, ...]:
    """Returns the mesh axes that have more than one device, and so split something."""
    sizes = getattr(mesh, "shape", {})
    return tuple(axis for axis in axes if sizes.get(axis) != 1)


def _query_and_key_specs(args: Any, mesh: Any) -> tuple[PartitionSpec, PartitionSpec]:
    """Specs of the queries and of the keys on the mesh around the call.

    Batch and heads stay where they are known to be: with arrays that have been placed, and with explicit mesh axes.
    """
    known = [_known_spec(x, mesh) for x in (args.query, args.key, args.value)]
    entries: dict[int, Any] = {}
    for axis in (0, 2):
        mesh_axes = [spec_entry_axes(spec, axis) for spec in known]
        shared = mesh_axes[0] == mesh_axes[1] == mesh_axes[2] and args.axis_name not in mesh_axes[0]
        entries[axis] = mesh_axes[0] if shared and mesh_axes[0] else None
    spec = PartitionSpec(entries[0], args.axis_name, entries[2])
    return spec, spec


def _known_spec(x: Any, mesh: Any) -> PartitionSpec:
    """Returns how an array lies on a mesh, as far as that can be told."""
    sharding: Any = jax.typeof(x).sharding if _compat.is_tracer(x) else getattr(x, "sharding", None)
    on_mesh = isinstance(sharding, NamedSharding) and set(sharding.mesh.axis_names) <= set(mesh.axis_names)
    return sharding.spec if on_mesh else PartitionSpec()


def spec_entry_axes(spec: Any, axis: int) -> tuple[Any, ...]:
    """Returns the mesh axes of one entry of a spec."""
    entry = spec[axis] if isinstance(spec, PartitionSpec) and axis < len(spec) else None
    return () if entry is None else (entry,) if isinstance(entry, str) else tuple(entry)
