"""Defines a family: the contract between the operations that lower to it and the kernels that serve it."""

import dataclasses
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from ejkernel.families.split_recurrence import SplitRecurrence
from ejkernel.types.arguments import array_fields
from ejkernel.types.invariances import depends_on_batch


def _dtype_of_first_field(record: Any) -> Any:
    return getattr(record, dataclasses.fields(record)[0].name).dtype


def _no_head_dims(record: Any) -> tuple[int, ...]:
    return ()


def _unchanged_record(record: Any, shard_offsets: Mapping[str, Any]) -> Any:
    return record


@dataclasses.dataclass(frozen=True, kw_only=True)
class RequestIsolation:
    """The functions that keep one request's NaN and infinities from reaching other requests of a call.

    Attributes:
        record: Converts a record to the record that forward functions get.
        pullback: Converts a pullback to the pullback that backward functions get.
        may_share_tiles: Returns for a record whether requests may share a tile.
    """

    record: Callable[[Any], Any]
    pullback: Callable[[Any], Any]
    may_share_tiles: Callable[[Any], bool]


@dataclasses.dataclass(frozen=True, kw_only=True)
class TokenShardFunctions:
    """The functions of a family whose tokens may be split over devices, though each token depends on those before it.

    Attributes:
        run: `(run, record, shards) -> output` computes the output of one device, where `run(record)` computes a record
            of one device and `shards`, an `ejkernel.planning.token_shards.TokenShards`, says how tokens are split. Each
            device calls it in `shard_map`, with its tokens. `run.row_states`, if it has that, is
            `ejkernel.ops.grad.DeviceRun.row_states`.
        kernel_record_for_explain: Record of a device's tokens -> the record that its kernel gets, for `explain`.
        token_axis_letter: The axis letter of tokens.
        recurrence: The functions of a recurrence that summarise a shard, if `run` calls them; the conformance suite
            computes summaries with kernels that have `Implementation.row_states`.
    """

    run: Callable[[Callable[[Any], Any], Any, Any], Any]
    kernel_record_for_explain: Callable[[Any], Any]
    token_axis_letter: str = "t"
    recurrence: SplitRecurrence | None = None


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class Family:
    """A contract that several operations lower to and that backends implement: record, output and residuals.

    An operation that needs other outputs or residuals is another family, though its record may be the same.

    Attributes:
        name: The name that implementations use for the family; unique among the registered operations' families.
        record: The `@arguments` class.
        differentiable: Record fields that have a gradient; those that the record declares with `array(gradient=True)`
            unless given.
        dtype: The dtype `Requires.dtypes` is about; that of the first field unless given.
        head_dims: The sizes `Requires.head_dims` is about; none unless given.
        axes: Axis letters of `"output"`, and of every array field that the record does not declare with `array`
            or with `arrays_of_function` (a field of the latter has None):
            `{"query": "b t h d", ...}`, with a tuple of letters where the output is a tuple. A function of the record
            that returns all letters where they follow from it. An output of size 1 along an axis that is split has an
            entry for each shard.
        shardable: Letters that may be split over mesh axes, for which each shard is a call of its own; as above.
        aligned: Pairs of letters that must be split alike (query heads with KV heads), where both may be split.
        apply_shard_offsets: `(record, offsets) -> record` makes one shard's record mean its part of the global call;
            `offsets` maps each letter to the global index of the shard's first element. By default a shard is a call of
            its own.
        reference: record -> (output, residuals), their meaning in plain jnp at float32 (float64 when x64 is on).
        lse: Axis letters of the residuals' lse, which operations with `return_lse` return with the output; None
            where the residuals have none, or the output has it already.
        token_sharding: How tokens are split, for which devices exchange states; None where they cannot be split, or are
            among `shardable`.
        unsplittable_axis_hints: What to do instead, for letters that cannot be split; the message of a call that splits
            them ends so.
        requests: Record -> how its arrays belong to the requests that the call serves, in one or several ways, each as
            `ejkernel.planning.requests` describes it; None where the requests are the rows of axis `b` and their
            segments. What one request holds never reaches another: the conformance suite poisons it.
        request_isolation: What the passes of every implementation are given in an `isolate_sequences` block, so that
            requests that share a tile cannot reach each other; None where kernels keep them apart by themselves.
        invariances: Record -> names in `ejkernel.types.invariances.INVARIANCES`: what the bits of a row of such a call
            may depend on. In a `batch_invariant` block, an implementation has to be invariant to each of them.
    """

    name: str
    record: type
    axes: Mapping[str, Any] | Callable[[Any], Mapping[str, Any]]
    shardable: str | Callable[[Any], str]
    reference: Callable[[Any], tuple[Any, Any]]
    differentiable: tuple[str, ...] = ()
    dtype: Callable[[Any], Any] = _dtype_of_first_field
    head_dims: Callable[[Any], tuple[int, ...]] = _no_head_dims
    aligned: tuple[tuple[str, str], ...] = ()
    apply_shard_offsets: Callable[[Any, Mapping[str, Any]], Any] = _unchanged_record
    lse: str | None = None
    token_sharding: TokenShardFunctions | None = None
    unsplittable_axis_hints: Mapping[str, str] = dataclasses.field(default_factory=dict)
    requests: Callable[[Any], Iterable[Mapping[str, Any]]] | None = None
    request_isolation: RequestIsolation | None = None
    invariances: Callable[[Any], frozenset[str]] = depends_on_batch

    def __post_init__(self) -> None:
        declared = {f.name: f.metadata for f in dataclasses.fields(self.record) if "axes" in f.metadata}
        if not callable(self.axes):
            axes = {name: metadata["axes"] for name, metadata in declared.items()}
            object.__setattr__(self, "axes", {**axes, **self.axes})
        if not self.differentiable:
            gradients = tuple(name for name, metadata in declared.items() if metadata["gradient"])
            object.__setattr__(self, "differentiable", gradients)

    def arrays_with_axes(self, record: Any) -> dict[str, Any]:
        """Returns the array fields of a record whose axes have letters, which excludes the arrays of functions."""
        letters = self.axes_of(record)
        return {name: x for name, x in array_fields(record).items() if letters[name] is not None}

    def axes_of(self, record: Any) -> Mapping[str, Any]:
        """Returns the axis letters of a record's fields and of `"output"`."""
        return self.axes(record) if callable(self.axes) else self.axes

    def shardable_axes_of(self, record: Any) -> str:
        """Returns the letters of a record that may be split."""
        return self.shardable(record) if callable(self.shardable) else self.shardable

    def splittable_axes_of(self, record: Any) -> str:
        """Returns the letters of a record that may be split, that of tokens among them."""
        return self.shardable_axes_of(record) + (
            "" if self.token_sharding is None else self.token_sharding.token_axis_letter
        )

    def aligned_axes_of(self, record: Any) -> tuple[tuple[str, str], ...]:
        """Returns the pairs of letters of a record that must be split alike."""
        letters = self.shardable_axes_of(record)
        return tuple(pair for pair in self.aligned if pair[0] in letters and pair[1] in letters)
