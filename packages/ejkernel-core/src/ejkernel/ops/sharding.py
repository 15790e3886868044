"""Runs a call under `shard_map` so that the result is that of the call without it.

The caller passes partition specs for the first arguments, in public order. They say which mesh axes split which axis of
the operation (batch, heads, queries, ...). Axes have letters, such as `b t h d` for queries. The specs of all arrays of
the lowered record follow from the letters, with a spec from the caller or without: a replicated bias is split where the
queries are split, so that each device reads the rows of its queries.
"""

import dataclasses
import math
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from ejkernel.families.contract import TokenShardFunctions
from ejkernel.ops.model import Op
from ejkernel.planning.token_shards import TokenShards
from ejkernel.types.arguments import array_fields, optional_fields

MeshAxes = tuple[str, ...]


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class AxisLetters:
    """The axis letters of one call.

    Attributes:
        op: The operation.
        arguments: Letters of the positional arguments, in public order.
        record: Letters of the lowered record's fields and of the family's `"output"`.
        outputs: Letters of what the public function returns.
        results: Letters of what the family's call returns: its output, or that and the residuals' lse.
        shardable: Letters that may be split.
        aligned: Pairs of letters that must be split alike.
        sizes: Size of each letter in the positional arguments.
    """

    op: Op
    arguments: Mapping[str, str]
    record: Mapping[str, Any]
    outputs: tuple[str, ...]
    results: Any
    shardable: str
    aligned: tuple[tuple[str, str], ...]
    sizes: Mapping[str, int]


def axis_letters_of(op: Op, args: Any) -> AxisLetters:
    """Returns the axis letters of a call, from the shapes of its arguments."""
    untyped = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), args)
    record = jax.eval_shape(op.lower, untyped)
    axes = op.family.axes_of(record)
    arguments, output = op.letters(args)
    outputs = axes["output"] if output is None else output
    first, *others = (outputs,) if isinstance(outputs, str) else outputs
    lse = (op.lse,) if op.lse is not None and args.return_lse else ()
    results = (axes["output"], op.family.lse) if op.returns_residual_lse(args) else axes["output"]
    return AxisLetters(
        op=op,
        arguments=arguments,
        record=axes,
        outputs=(first, *lse, *others),
        results=results,
        shardable=op.family.splittable_axes_of(record),
        aligned=op.family.aligned_axes_of(record),
        sizes=_letter_sizes(arguments, args),
    )


def split_axes(
    letters: AxisLetters, in_specs: tuple[Any, ...], mesh: Any, keep_size_one_axes: bool = False
) -> dict[str, MeshAxes]:
    """Returns which mesh axes split which letter of the operation's axes.

    Args:
        letters: The letters of a call.
        in_specs: Partition specs of its first arguments.
        mesh: The mesh whose axes they name.
        keep_size_one_axes: Whether to keep mesh axes of size 1, which split nothing.

    Raises:
        ValueError: There are fewer specs than required arguments, or more than arguments; an entry is not a spec; a
            mesh axis does not exist; two specs split a letter over different mesh axes; a letter cannot be split.
    """
    _check_specs(letters, in_specs)
    split: dict[str, tuple[MeshAxes, str]] = {}
    for (argument, axis_letters), spec in zip(letters.arguments.items(), in_specs, strict=False):
        if spec is None:
            continue
        entries = [_mesh_axes(entry) for entry in spec]
        if len(entries) > len(axis_letters.split()):
            raise ValueError(
                f"in_specs: got {spec} for {argument}, wants at most one entry per axis of {axis_letters!r}"
            )
        for letter, axes in zip(axis_letters.split(), entries, strict=False):
            _check_known_axes(argument, axes, mesh)
            axes = axes if keep_size_one_axes else _axes_with_devices(axes, mesh)
            _check_shardable(letters, argument, letter, axes)
            # An argument that is not split along this letter is replicated by the caller. The split of another argument
            # decides, and `shard_map` then slices the replicated array.
            known = split.setdefault(letter, (axes, argument)) if axes else split.get(letter, ((), argument))
            if axes and known[0] != axes:
                raise ValueError(
                    f"in_specs: {argument} splits {letter!r} over {axes}, {known[1]} splits it over {known[0]}"
                )
    return {letter: axes for letter, (axes, _) in split.items()}


def specs_from_array_types(op: Op, args: Any) -> tuple[Any, tuple[Any, ...]]:
    """Returns the mesh and the specs in the types of a call's arrays; None and no specs if they have no explicit axis.

    Types have explicit axes under `jax.set_mesh`, and for arrays that were put on such a mesh. Inside of the caller's
    `shard_map` some axes are manual, and the call is about the caller's shard alone.
    """
    meshes = [jax.typeof(x).sharding.mesh for x in jax.tree.leaves(args)]
    mesh = next((mesh for mesh in meshes if AxisType.Explicit in mesh.axis_types), None)
    if mesh is None or AxisType.Manual in mesh.axis_types:
        return None, ()
    arrays = (getattr(args, name) for name in op.axes)
    return mesh, tuple(jax.typeof(x).sharding.spec if isinstance(x, jax.Array) else None for x in arrays)


def record_specs(letters: AxisLetters, record: Any, mesh_axes_by_letter: Mapping[str, MeshAxes], mesh: Any) -> Any:
    """Returns a record of partition specs, one for every leaf of `record`.

    Raises:
        ValueError: An axis cannot be divided evenly, or aligned axes are split differently.
    """
    specs: dict[str, Any] = {}
    sizes: dict[str, int] = {}
    for name, value in array_fields(record).items():
        if letters.record[name] is None:  # every shard has these arrays whole
            specs[name] = jax.tree.map(lambda _: PartitionSpec(), value)
            continue
        axis_letters = letters.record[name].split()
        for letter, size in zip(axis_letters, value.shape, strict=True):
            if size != 1:  # an axis of size 1 broadcasts: it is not split, and is not the size of the letter
                sizes[letter] = size
        specs[name] = PartitionSpec(
            *(
                _spec_entry(mesh_axes_by_letter.get(letter, ()), size)
                for letter, size in zip(axis_letters, value.shape, strict=True)
            )
        )
    for letter, axes in mesh_axes_by_letter.items():
        parts = math.prod(mesh.shape[axis] for axis in axes)
        # An axis may have size 1 in the record and more in the arguments, such as KV heads that share latent vectors.
        size = sizes.get(letter, letters.sizes.get(letter, 1))
        if size % parts:
            raise ValueError(f"in_specs: axis {letter!r} of size {size} does not divide into {parts} parts")
    # A shard must hold the KV heads that its query heads read, so such axes are split over the same mesh axes.
    for one, other in letters.aligned:
        if mesh_axes_by_letter.get(one, ()) != mesh_axes_by_letter.get(other, ()) and sizes.get(other, 1) > 1:
            raise ValueError(
                f"in_specs: axes {one!r} and {other!r} of {letters.op.name} must be split alike, got "
                f"{mesh_axes_by_letter.get(one, ())} and {mesh_axes_by_letter.get(other, ())}"
            )
    ordered = [specs[name] for name in array_fields(record)]
    return jax.tree.unflatten(jax.tree.structure(record), jax.tree.leaves(ordered, is_leaf=_is_partition_spec))


def _is_partition_spec(value: Any) -> bool:
    return isinstance(value, PartitionSpec)


def check_out_specs(letters: AxisLetters, split: Mapping[str, MeshAxes], out_specs: Any, mesh: Any) -> None:
    """Checks `out_specs` against the split that follows from the inputs; mesh axes of size 1 do not count.

    Raises:
        ValueError: `out_specs` disagrees with how the inputs are split.
    """
    outputs = letters.outputs
    is_sequence = isinstance(out_specs, tuple | list) and not isinstance(out_specs, PartitionSpec)
    specs: tuple[Any, ...] = tuple(out_specs) if is_sequence else (out_specs,)
    # Trailing specs may be left out, as those of arguments: which results a call returns can depend on its arguments.
    if len(specs) > len(outputs):
        raise ValueError(f"out_specs: got {len(specs)} specs, {letters.op.name} returns at most {len(outputs)} arrays")
    for index, (axis_letters, spec) in enumerate(zip(outputs, specs, strict=False)):
        if not isinstance(spec, PartitionSpec | None):
            raise ValueError(f"out_specs: got {spec!r}, wants a PartitionSpec")
        expected = [split.get(letter, ()) for letter in axis_letters.split()]
        named = [_axes_with_devices(_mesh_axes(entry), mesh) for entry in spec or ()]
        while len(named) > len(expected) and not named[-1]:
            named.pop()  # entries that split nothing may outnumber an output's axes, as on a mesh of one device
        if named + [()] * (len(expected) - len(named)) != expected:
            of = f" {index} of {letters.op.name}, with axes {axis_letters!r}," if len(outputs) > 1 else ""
            expected_spec = _partition_spec(axis_letters, split)
            raise ValueError(f"out_specs: the inputs' specs make the output{of} {expected_spec}, got {spec}")


def run_sharded(op: Op, args: Any, mesh: Any, in_specs: tuple[Any, ...], out_specs: Any, run: Any) -> Any:
    """Runs `run(record)` on every shard and returns the result of the call without sharding.

    `out_specs` is None if the specs come from the types of the arrays; those of the output then follow from the inputs.
    """
    letters = axis_letters_of(op, args)
    split = _checked_split(letters, mesh, in_specs, out_specs)
    parts = jax.tree.map(lambda axis_letters: _partition_spec(axis_letters, split), letters.results)

    def run_on_mesh(mesh: Any, args: Any) -> Any:
        token_sharding = _token_shard_functions(letters, split, mesh)

        def on_shard(local: Any) -> Any:
            if token_sharding is None:
                return run(local)
            return token_sharding.run(
                run, local, _token_shards_of_call(letters, token_sharding.token_axis_letter, local, split, mesh)
            )

        return op.finish(args, _run_under_shard_map(letters, op.lower(args), mesh, split, parts, on_shard))

    def shardings() -> Any:
        untyped = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), args)
        structure = jax.tree.structure(jax.eval_shape(op.reference, untyped))
        outputs = letters.outputs[: structure.num_leaves]  # which results there are can depend on the arguments
        return jax.tree.unflatten(
            structure, [NamedSharding(mesh, _partition_spec(axis_letters, split)) for axis_letters in outputs]
        )

    return _with_automatic_axes(run_on_mesh, mesh, args, shardings)


def record_on_shard(
    op: Op, args: Any, mesh: Any, in_specs: tuple[Any, ...], out_specs: Any, receive_record: Any
) -> Any:
    """Calls `receive_record(record)` with the record of one shard; the result is unused."""
    letters = axis_letters_of(op, args)
    split = _checked_split(letters, mesh, in_specs, out_specs)

    token_sharding = _token_shard_functions(letters, split, mesh)

    def run(local: Any) -> Any:
        receive_record(local if token_sharding is None else token_sharding.kernel_record_for_explain(local))
        return jnp.zeros(())

    def run_on_mesh(mesh: Any, args: Any) -> Any:
        return _run_under_shard_map(letters, op.lower(args), mesh, split, PartitionSpec(), run)

    return _with_automatic_axes(run_on_mesh, mesh, args, lambda: NamedSharding(mesh, PartitionSpec()))


def _checked_split(letters: AxisLetters, mesh: Any, in_specs: tuple[Any, ...], out_specs: Any) -> dict[str, MeshAxes]:
    if out_specs is not None:
        split = split_axes(letters, in_specs, mesh)
        check_out_specs(letters, split, out_specs, mesh)
        return split
    try:  # mesh axes of size 1 stay in the types of the results, unless the arrays disagree about them
        return split_axes(letters, in_specs, mesh, keep_size_one_axes=True)
    except ValueError:
        pass
    try:
        return split_axes(letters, in_specs, mesh)
    except ValueError as error:
        raise ValueError(f"{error}; without mesh=, in_specs are the shardings in the arrays' types") from error


def _run_under_shard_map(
    letters: AxisLetters, record: Any, mesh: Any, split: Mapping[str, MeshAxes], out_specs: Any, run: Any
) -> Any:
    specs = record_specs(letters, record, split, mesh)

    def body(local: Any) -> Any:
        return run(letters.op.family.apply_shard_offsets(local, _shard_offsets(letters, local, split, mesh)))

    # JAX cannot infer over which mesh axes the results of a kernel vary, so it does not check them (`check_vma`). The
    # specs are derived from the letters and need no check.
    return jax.shard_map(body, mesh=mesh, in_specs=(specs,), out_specs=out_specs, check_vma=False)(record)


def _token_shard_functions(
    letters: AxisLetters, split: Mapping[str, MeshAxes], mesh: Any
) -> TokenShardFunctions | None:
    """Returns how the family of a call computes tokens that are split; None where they are not, or need no exchange."""
    token_sharding = letters.op.family.token_sharding
    return (
        token_sharding
        if token_sharding and _axes_with_devices(split.get(token_sharding.token_axis_letter, ()), mesh)
        else None
    )


def _token_shards_of_call(
    letters: AxisLetters, token_letter: str, local_record: Any, split: Mapping[str, MeshAxes], mesh: Any
) -> TokenShards:
    """Returns how the tokens of a call, whose axis has a letter, are split, from the record of one device."""
    tokens = max(
        size
        for name, value in letters.op.family.arrays_with_axes(local_record).items()
        for each, size in zip(letters.record[name].split(), value.shape, strict=True)
        if each == token_letter
    )
    axes = _axes_with_devices(split[token_letter], mesh)
    return TokenShards(axes=axes, sizes=tuple(mesh.shape[axis] for axis in axes), tokens=tokens)


def _with_automatic_axes(run: Any, mesh: Any, args: Any, shardings: Any) -> Any:
    """Calls `run(mesh, args)` with automatic instead of explicit mesh axes; `shardings()` are those of the results.

    With explicit axes `shard_map` does not move arrays by itself, and many reshapes need a sharding. If no array has an
    explicit sharding and no mesh is set, the result has none in its type either: JAX could not differentiate it outside
    of `jax.set_mesh`.
    """
    if AxisType.Explicit not in mesh.axis_types:
        return run(mesh, args)
    has_explicit_axes = any(not jax.typeof(x).sharding.mesh.empty for x in jax.tree.leaves(args))
    if not has_explicit_axes and isinstance(mesh, Mesh) and jax.sharding.get_abstract_mesh().empty:
        return run(Mesh(mesh.devices, mesh.axis_names), args)

    def run_with_automatic_axes(args: Any) -> Any:
        return run(jax.sharding.get_abstract_mesh(), args)

    return jax.sharding.auto_axes(run_with_automatic_axes, out_sharding=shardings())(args)


def _shard_offsets(letters: AxisLetters, local: Any, split: Mapping[str, MeshAxes], mesh: Any) -> dict[str, Any]:
    """Returns the index in the whole array of the shard's first element, for every letter that is split."""
    sizes = {
        letter: size
        for name, value in letters.op.family.arrays_with_axes(local).items()
        for letter, size in zip(letters.record[name].split(), value.shape, strict=True)
        if size != 1 or letter not in split
    }
    # Masks, windows and dropout count positions and heads of the whole call, so a shard needs to know where it begins.
    offsets = {}
    for letter, axes in split.items():
        index = jnp.int32(0)
        for axis in axes:
            index = index * mesh.shape[axis] + jax.lax.axis_index(axis)
        offsets[letter] = index * sizes.get(letter, 1)
    return offsets


def _check_specs(letters: AxisLetters, in_specs: tuple[Any, ...]) -> None:
    optional, names = optional_fields(letters.op.arguments), letters.arguments
    least = sum(name not in optional for name in names)
    if not least <= len(in_specs) <= len(names):
        wants = f"{least} to {len(names)}, of {', '.join(names)}"
        raise ValueError(f"in_specs: got {len(in_specs)} specs, wants {wants}")
    for argument, spec in zip(names, in_specs, strict=False):
        if not isinstance(spec, PartitionSpec | None):
            raise ValueError(f"in_specs: got {spec!r} for {argument}, wants a PartitionSpec or None")


def _check_known_axes(argument: str, axes: MeshAxes, mesh: Any) -> None:
    unknown = [axis for axis in axes if axis not in mesh.shape]
    if unknown:
        raise ValueError(f"in_specs: {argument} names mesh axis {unknown[0]!r}, the mesh has {tuple(mesh.shape)}")


def _axes_with_devices(axes: MeshAxes, mesh: Any) -> MeshAxes:
    """Returns the mesh axes that have more than one device."""
    return tuple(axis for axis in axes if mesh.shape.get(axis) != 1)


def _check_shardable(letters: AxisLetters, argument: str, letter: str, axes: MeshAxes) -> None:
    if axes and letter not in letters.shardable:
        instead = letters.op.family.unsplittable_axis_hints.get(letter)
        raise ValueError(
            f"in_specs: axis {letter!r} of {argument} cannot be split over devices in {letters.op.name}"
            f"{f'; {instead}' if instead else ''}"
        )


def _partition_spec(letters: str, split: Mapping[str, MeshAxes]) -> PartitionSpec:
    return PartitionSpec(*(_spec_entry(split.get(letter, ()), 2) for letter in letters.split()))


def _mesh_axes(entry: Any) -> MeshAxes:
    if entry is None:
        return ()
    return (entry,) if isinstance(entry, str) else tuple(entry)


def _letter_sizes(letters: Mapping[str, str], args: Any) -> dict[str, int]:
    """Returns the size of each letter whose size is not 1."""
    shapes = {name: getattr(getattr(args, name), "shape", ()) for name in letters}
    axes_and_shapes = [(axis_letters.split(), shapes[name]) for name, axis_letters in letters.items()]
    pairs = [
        pair
        for axis_letters, shape in axes_and_shapes
        if len(axis_letters) == len(shape)
        for pair in zip(axis_letters, shape, strict=True)
    ]
    return {letter: size for letter, size in pairs if size != 1}


def _spec_entry(axes: MeshAxes, size: int) -> Any:
    if size == 1 or not axes:
        return None
    return axes[0] if len(axes) == 1 else axes
