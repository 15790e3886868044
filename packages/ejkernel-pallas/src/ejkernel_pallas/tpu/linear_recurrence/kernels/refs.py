"""The refs of the linear recurrence's kernels, and loads and stores of one head of them."""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import pallas as pl

from ejkernel_pallas.tpu.linear_recurrence.kernels.chunk import ChunkTokens
from ejkernel_pallas.tpu.linear_recurrence.kernels.gates import HeadLogDecaySums, last_row
from ejkernel_pallas.tpu.linear_recurrence.spec import RecurrenceSpec
from ejkernel_pallas.tpu.mosaic.launch import Ref


@dataclasses.dataclass(frozen=True, kw_only=True)
class RecurrenceRefs:
    """Refs of all kernels; unused fields are None.

    Attributes:
        chunk_table: int32 [B * chunks] of `ChunkPlan`.
        query: [C, heads per step * K], or [heads per step, C, K]; the same for the other fields with channels.
        key: In the layout of `query`.
        value: In the layout of `query`, with V channels.
        decay: Log gates per key channel, in the layout of `query`.
        value_decay: Log gates per value channel, in the layout of `value`.
        low_rank_write: In the layout of `query`.
        low_rank_read: In the layout of `query`.
        scalar_columns: float32 [C, columns of the step's heads], one element per token and head of each of its fields.
        scalar_rows: float32 [rows of the step's heads, C], tokens along lanes: sums of gates that channels share, and
            runs of segments.
        cotangent: Cotangent of the output.
        initial_state: float32 [heads, K, V] states before the first chunk, or their gradient.
        final_state: float32 [heads, K, V] states after the last chunk, or their cotangent.
        chunk_states: float32 [heads, K, V] states before the chunk.
        output: In the layout of `value`.
        state: Scratch, float32 [heads, K, V]: the states between chunks, or their cotangents.
        dquery: Gradient of the query, in its layout.
        dkey: Gradient of the key.
        dvalue: Gradient of the value.
        ddecay: Gradient of the decay.
        dvalue_decay: Gradient of the value decay.
        dlow_rank_write: Gradient of the vectors that the low-rank term writes.
        dlow_rank_read: Gradient of those that it reads with.
        dscalar_columns: Gradient of the columns.
        dscalar_rows: [heads, C], gradient of the sums in `scalar_rows`.
    """

    chunk_table: Ref
    query: Ref
    key: Ref
    value: Ref
    state: Ref
    decay: Ref = None
    value_decay: Ref = None
    low_rank_write: Ref = None
    low_rank_read: Ref = None
    scalar_columns: Ref = None
    scalar_rows: Ref = None
    cotangent: Ref = None
    initial_state: Ref = None
    final_state: Ref = None
    chunk_states: Ref = None
    output: Ref = None
    dquery: Ref = None
    dkey: Ref = None
    dvalue: Ref = None
    ddecay: Ref = None
    dvalue_decay: Ref = None
    dlow_rank_write: Ref = None
    dlow_rank_read: Ref = None
    dscalar_columns: Ref = None
    dscalar_rows: Ref = None


@dataclasses.dataclass(frozen=True)
class GridStep:
    """A grid step.

    Attributes:
        num_runs: The number of passes over the chunk, one per run of a segment; 1 without segments.
        is_first: Whether the chunk is the first of its row or packed sequence.
        is_last: Whether the chunk is the last of its row or packed sequence.
        has_slot: Whether the sequence has a slot for its state; None where states are not in slots.
    """

    num_runs: Any
    is_first: Any
    is_last: Any
    has_slot: Any = None


def grid_step_of(
    refs: Any,
    *,
    chunks_per_row: int,
    is_packed: bool,
    reverses_chunks: bool = False,
    states_in_slots: bool = False,
) -> GridStep:
    """Returns the grid step of a kernel whose grid is (rows, steps over heads, chunks); `refs` have a chunk_table."""
    chunk = pl.program_id(2)
    chunk = chunks_per_row - 1 - chunk if reverses_chunks else chunk
    entry = refs.chunk_table[pl.program_id(0) * chunks_per_row + chunk]
    if is_packed:
        return GridStep(1, (entry & 2) != 0, (entry & 1) != 0, (entry & 4) != 0 if states_in_slots else None)
    return GridStep(entry, chunk == 0, chunk == chunks_per_row - 1)


def head_index(ref: Ref, index: int, width: int) -> tuple[Any, ...]:
    """Returns the index that selects one head of a block [C, heads * width] or [heads, C, width]."""
    return (index,) if len(ref.shape) == 3 else (slice(None), slice(index * width, (index + 1) * width))


def load_head_tokens(refs: RecurrenceRefs, spec: RecurrenceSpec, head: int, dtype: Any = None) -> ChunkTokens:
    """Loads the tokens of a head of the step, unconverted or in a dtype."""
    inputs: dict[str, Any] = {}
    for name, count in spec.channel_field_head_counts:
        ref = getattr(refs, name)
        x = ref[head_index(ref, _field_head_of_step_head(spec, head, count), spec.num_channels(name))]
        # Gates are multiplied, and on some chips the vector unit has float32 only.
        needed_dtype = jnp.float32 if dtype is None and _is_multiplied_before_product(spec, name) else dtype
        inputs[name] = x if needed_dtype is None else x.astype(needed_dtype)
    inputs |= {name: refs.scalar_columns[:, at : at + 1] for name, at in _columns_of_head(spec, head)}
    if spec.gate_sum_names:
        numbers = {name: inputs.pop(name) for name in spec.gate_sum_names}
        for number, name in enumerate(spec.gate_sum_names):
            at = number * spec.heads_per_step + head
            numbers[f"{name}_row"] = refs.scalar_rows[at : at + 1]
        inputs["decay"] = HeadLogDecaySums(**numbers)
    return ChunkTokens(**inputs)


def load_tokens_and_states(
    refs: RecurrenceRefs, spec: RecurrenceSpec, dtype: Any = None
) -> tuple[tuple[ChunkTokens, ...], tuple[jax.Array, ...]]:
    """Returns the tokens and the scratch states of all heads of the step."""
    heads = range(spec.heads_per_step)
    return tuple(load_head_tokens(refs, spec, head, dtype) for head in heads), tuple(refs.state[head] for head in heads)


def _is_multiplied_before_product(spec: RecurrenceSpec, name: str) -> bool:
    """Returns whether elements of a field are multiplied before they are an operand of the matrix unit."""
    channel_fields = {field for field, _ in spec.channel_field_head_counts}
    return bool(channel_fields & {"decay", "value_decay", "low_rank_read"}) or name not in ("query", "key")


def _columns_of_head(spec: RecurrenceSpec, head: int) -> list[tuple[str, int]]:
    """Returns the fields and column indices of a head."""
    return [(name, number * spec.heads_per_step + head) for number, name in enumerate(spec.scalar_names)]


@dataclasses.dataclass(frozen=True)
class SegmentRun:
    """One run of a segment.

    Attributes:
        column_mask: bool [C, 1], whether a token is in the run.
        row_mask: bool [1, C], the same along lanes; None if nothing reads it.
        is_last: Whether the run is the last of the chunk, whose sums of gates continue over padding at the end.
    """

    column_mask: jax.Array
    row_mask: jax.Array | None
    is_last: jax.Array

    def select_tokens(self, x: ChunkTokens) -> ChunkTokens:
        """Returns the tokens of the run, with zeros for all other tokens. They are selected and not multiplied by 0,
        since other tokens may hold NaN.
        """
        sums = x.decay if isinstance(x.decay, HeadLogDecaySums) else None
        x = dataclasses.replace(x, decay=None) if sums is not None else x
        found = jax.tree.map(lambda field: jnp.where(self.column_mask, field, jnp.zeros_like(field)), x)
        if sums is None or self.row_mask is None:
            return found
        decay_sums = HeadLogDecaySums(
            self._run_gate_sums(sums.coarse_sums),
            jnp.where(self.row_mask, sums.coarse_sums_row, 0.0),
            None if sums.fine_sums is None else self._run_gate_sums(sums.fine_sums),
            None if sums.fine_sums_row is None else jnp.where(self.row_mask, sums.fine_sums_row, 0.0),
        )
        return dataclasses.replace(found, decay=decay_sums)

    def _run_gate_sums(self, column: jax.Array) -> jax.Array:
        """Returns the sums of the run's gates. Tokens of other runs get the sum at the chunk's last token, the weight
        of the whole run.
        """
        return jnp.where(self.column_mask, column, jnp.where(self.is_last, last_row(column), 0.0))


@dataclasses.dataclass(frozen=True)
class SegmentRuns:
    """The runs of segments in a chunk: an index per token, -1 for padding.

    Attributes:
        num_runs: The number of runs.
        column: float32 [C, 1], the run of each token.
        row: float32 [1, C], the same along lanes; None if nothing reads it.
    """

    num_runs: jax.Array
    column: jax.Array
    row: jax.Array | None

    def __getitem__(self, index: jax.Array) -> SegmentRun:
        run = index.astype(jnp.float32)
        row = None if self.row is None else self.row == run
        return SegmentRun(self.column == run, row, index == self.num_runs - 1)


def load_segment_runs(refs: RecurrenceRefs, spec: RecurrenceSpec, grid_step: GridStep) -> SegmentRuns | None:
    """Returns the runs of a chunk's tokens; None without segments."""
    if not spec.has_segment_runs:
        return None
    at = len(spec.scalar_names) * spec.heads_per_step
    row = refs.scalar_rows[spec.num_scalar_rows - 1 : spec.num_scalar_rows] if spec.gate_sum_names else None
    return SegmentRuns(grid_step.num_runs, refs.scalar_columns[:, at : at + 1], row)


def fold_segment_runs(grid_step: GridStep, advance_run: Callable[[Any, Any], Any], initial_carry: Any) -> Any:
    """Calls `advance_run` with the index of each run and the previous result, `initial_carry` for the first run."""
    return lax.fori_loop(np.int32(0), grid_step.num_runs, advance_run, initial_carry)


def _field_head_of_step_head(spec: RecurrenceSpec, head: int, count: int) -> int:
    """Returns the head of a field's block that a head of the step reads."""
    return head * spec.heads_per_block(count) // spec.heads_per_step


def write_token_gradients(
    refs: RecurrenceRefs, spec: RecurrenceSpec, gradients: tuple[ChunkTokens, ...], grad_fields: frozenset[str]
) -> None:
    """Writes gradients of tokens; those of heads that share a field's head are added first."""
    totals: dict[tuple[str, int], jax.Array] = {}
    for head, found in enumerate(gradients):
        for name, count in spec.channel_field_head_counts:
            if name not in grad_fields:
                continue
            read_head, value = _field_head_of_step_head(spec, head, count), getattr(found, name)
            total = totals.pop((name, read_head), None)
            value = value if total is None else total + value
            if (head + 1) * spec.heads_per_block(count) // spec.heads_per_step == read_head:
                totals[name, read_head] = value  # more heads of the step read it
                continue
            ref = getattr(refs, f"d{name}")
            ref[head_index(ref, read_head, spec.num_channels(name))] = value.astype(ref.dtype)
        sum_gradients = found.decay if isinstance(found.decay, HeadLogDecaySums) and "decay" in grad_fields else None
        for name, at in _columns_of_head(spec, head):
            # The coarse and the fine sum have the same gradient.
            if name == "coarse_sums" and sum_gradients is not None:
                refs.dscalar_columns[:, at : at + 1] = sum_gradients.coarse_sums
            elif name in grad_fields:
                refs.dscalar_columns[:, at : at + 1] = getattr(found, name)
        if sum_gradients is not None:
            refs.dscalar_rows[head : head + 1] = sum_gradients.coarse_sums_row
