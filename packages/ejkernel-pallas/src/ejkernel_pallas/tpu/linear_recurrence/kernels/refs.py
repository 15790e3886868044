"""The refs of the linear recurrence's kernels, and loads and stores of one head of them."""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import pallas as pl

from ejkernel_pallas.tpu.linear_recurrence.kernels.chunk import Tokens
from ejkernel_pallas.tpu.linear_recurrence.kernels.gates import HeadDecay, last_row
from ejkernel_pallas.tpu.linear_recurrence.spec import RecurrenceSpec
from ejkernel_pallas.tpu.mosaic.launch import Ref


@dataclasses.dataclass(frozen=True, kw_only=True)
class RecurrenceRefs:
    """Refs of all kernels; unused fields are None.

    Attributes:
        table: int32 [B * chunks] of `Plan`.
        query: [C, heads per step * K], or [heads per step, C, K]; the same for the other fields with channels.
        key: As `query`.
        value: As `query`, with V channels.
        decay: As `query`, for gates per key channel.
        value_decay: As `query`, with V channels.
        columns: float32 [C, columns of the step's heads].
        along: float32 [rows of the step's heads, C]: sums of gates that channels share, and runs of segments.
        cotangent: Cotangent of the output.
        initial: float32 [heads, K, V] states before the first chunk, or their gradient.
        final: float32 [heads, K, V] states after the last chunk, or their cotangent.
        chunk_states: float32 [heads, K, V] states before the chunk.
        output: As `value`.
        state: Scratch, float32 [heads, K, V]: the states between chunks, or their cotangents.
        of_query: Gradient of the query; the following fields are named in the same way.
        of_key: Gradient of the key.
        of_value: Gradient of the value.
        of_decay: Gradient of the decay.
        of_value_decay: Gradient of the value decay.
        of_columns: Gradient of the columns.
        of_along: [heads, C], gradient of the sums in `along`.
    """

    table: Ref
    query: Ref
    key: Ref
    value: Ref
    state: Ref
    decay: Ref = None
    value_decay: Ref = None
    columns: Ref = None
    along: Ref = None
    cotangent: Ref = None
    initial: Ref = None
    final: Ref = None
    chunk_states: Ref = None
    output: Ref = None
    of_query: Ref = None
    of_key: Ref = None
    of_value: Ref = None
    of_decay: Ref = None
    of_value_decay: Ref = None
    of_columns: Ref = None
    of_along: Ref = None


@dataclasses.dataclass(frozen=True)
class Step:
    """A grid step.

    Attributes:
        runs: Passes over the chunk, one per run of a segment; 1 without segments.
        is_first: Whether the chunk is the first of its row or sequence.
        is_last: Whether it is the last.
        keeps: Whether the sequence has a slot; None where states are not in slots.
    """

    runs: Any
    is_first: Any
    is_last: Any
    keeps: Any = None


def step_of(
    refs: RecurrenceRefs, *, chunks: int, packed: bool, backwards: bool = False, in_slots: bool = False
) -> Step:
    """Returns the grid step of a kernel whose grid is (rows, steps over heads, chunks)."""
    chunk = pl.program_id(2)
    chunk = chunks - 1 - chunk if backwards else chunk
    entry = refs.table[pl.program_id(0) * chunks + chunk]
    if packed:
        return Step(1, (entry & 2) != 0, (entry & 1) != 0, (entry & 4) != 0 if in_slots else None)
    return Step(entry, chunk == 0, chunk == chunks - 1)


def part(ref: Ref, index: int, width: int) -> tuple[Any, ...]:
    """Returns the index of one head in a block: [C, heads * width], or [heads, C, width]."""
    return (index,) if len(ref.shape) == 3 else (slice(None), slice(index * width, (index + 1) * width))


def load(refs: RecurrenceRefs, spec: RecurrenceSpec, head: int, dtype: Any = None) -> Tokens:
    """Loads the tokens of a head of the step, unconverted or in a dtype."""
    inputs: dict[str, Any] = {}
    for name, count in spec.wide:
        ref = getattr(refs, name)
        x = ref[part(ref, _head_of(spec, head, count), spec.width(name))]
        # Gates are multiplied, and on some chips the vector unit has float32 only.
        needed_dtype = jnp.float32 if dtype is None and _is_weighted(spec, name) else dtype
        inputs[name] = x if needed_dtype is None else x.astype(needed_dtype)
    inputs |= {name: refs.columns[:, at : at + 1] for name, at in _places(spec, head)}
    if spec.sums:
        numbers = {name: inputs.pop(name) for name in spec.sums}
        for number, name in enumerate(spec.sums):
            at = number * spec.heads + head
            numbers[f"{name}_row"] = refs.along[at : at + 1]
        inputs["decay"] = HeadDecay(**numbers)
    return Tokens(**inputs)


def load_all(
    refs: RecurrenceRefs, spec: RecurrenceSpec, dtype: Any = None
) -> tuple[tuple[Tokens, ...], tuple[jax.Array, ...]]:
    """Returns the tokens and the scratch states of all heads of the step."""
    heads = range(spec.heads)
    return tuple(load(refs, spec, head, dtype) for head in heads), tuple(refs.state[head] for head in heads)


def _is_weighted(spec: RecurrenceSpec, name: str) -> bool:
    """Returns whether elements of a field are multiplied before they are an operand of the matrix unit."""
    by_channel = any(field in ("decay", "value_decay") for field, _ in spec.wide)
    return by_channel or name not in ("query", "key")


def _places(spec: RecurrenceSpec, head: int) -> list[tuple[str, int]]:
    """Returns the fields and column indices of a head."""
    return [(name, number * spec.heads + head) for number, name in enumerate(spec.columns)]


@dataclasses.dataclass(frozen=True)
class Run:
    """One run of a segment.

    Attributes:
        column: bool [C, 1], the tokens of the run.
        row: bool [1, C]; None if nothing reads it along lanes.
        is_last: Whether it is the last one of the chunk, whose sums of gates continue over padding at the end.
    """

    column: jax.Array
    row: jax.Array | None
    is_last: jax.Array

    def select(self, x: Tokens) -> Tokens:
        """Returns the tokens of the run, with zeros for all other tokens. They are selected and not multiplied by 0,
        since other tokens may hold NaN.
        """
        sums = x.decay if isinstance(x.decay, HeadDecay) else None
        x = dataclasses.replace(x, decay=None) if sums is not None else x
        found = jax.tree.map(lambda field: jnp.where(self.column, field, jnp.zeros_like(field)), x)
        if sums is None or self.row is None:
            return found
        decay_sums = HeadDecay(
            self._sums(sums.coarse),
            jnp.where(self.row, sums.coarse_row, 0.0),
            None if sums.fine is None else self._sums(sums.fine),
            None if sums.fine_row is None else jnp.where(self.row, sums.fine_row, 0.0),
        )
        return dataclasses.replace(found, decay=decay_sums)

    def _sums(self, column: jax.Array) -> jax.Array:
        """Returns the sums of its gates; other tokens get those of the chunk's last token, the weight of the whole
        run.
        """
        return jnp.where(self.column, column, jnp.where(self.is_last, last_row(column), 0.0))


@dataclasses.dataclass(frozen=True)
class Runs:
    """The runs of segments in a chunk, as an index per token, float32; -1 for padding.

    Attributes:
        count: Number of runs.
        column: [C, 1].
        row: [1, C]; None if nothing reads them along lanes.
    """

    count: jax.Array
    column: jax.Array
    row: jax.Array | None

    def __getitem__(self, number: jax.Array) -> Run:
        wanted = number.astype(jnp.float32)
        row = None if self.row is None else self.row == wanted
        return Run(self.column == wanted, row, number == self.count - 1)


def load_runs(refs: RecurrenceRefs, spec: RecurrenceSpec, step: Step) -> Runs | None:
    """Returns the runs of a chunk's tokens; None without segments."""
    if not spec.runs:
        return None
    at = len(spec.columns) * spec.heads
    row = refs.along[spec.rows - 1 : spec.rows] if spec.sums else None
    return Runs(step.runs, refs.columns[:, at : at + 1], row)


def fold_segment_runs(step: Step, run: Callable[[Any, Any], Any], start: Any) -> Any:
    """Calls `run` with the index of each run and the previous result."""
    return lax.fori_loop(np.int32(0), step.runs, run, start)


def _head_of(spec: RecurrenceSpec, head: int, count: int) -> int:
    """Returns the head of a field's block that a head of the step reads."""
    return head * spec.block_heads(count) // spec.heads


def add_heads(
    refs: RecurrenceRefs, spec: RecurrenceSpec, gradients: tuple[Tokens, ...], grad_fields: frozenset[str]
) -> None:
    """Writes gradients of tokens; those of heads that share a field's head are added first."""
    totals: dict[tuple[str, int], jax.Array] = {}
    for head, found in enumerate(gradients):
        for name, count in spec.wide:
            if name not in grad_fields:
                continue
            read_head, value = _head_of(spec, head, count), getattr(found, name)
            total = totals.pop((name, read_head), None)
            value = value if total is None else total + value
            if (head + 1) * spec.block_heads(count) // spec.heads == read_head:
                totals[name, read_head] = value  # more heads of the step read it
                continue
            ref = getattr(refs, f"of_{name}")
            ref[part(ref, read_head, spec.width(name))] = value.astype(ref.dtype)
        sum_gradients = found.decay if isinstance(found.decay, HeadDecay) and "decay" in grad_fields else None
        for name, at in _places(spec, head):
            # The coarse and the fine sum have the same gradient.
            if name == "coarse" and sum_gradients is not None:
                refs.of_columns[:, at : at + 1] = sum_gradients.coarse
            elif name in grad_fields:
                refs.of_columns[:, at : at + 1] = getattr(found, name)
        if sum_gradients is not None:
            refs.of_along[head : head + 1] = sum_gradients.coarse_row
