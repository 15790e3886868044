"""The compile-time constants of the linear recurrence's kernels."""

import dataclasses

from jax import lax

from ejkernel.families.linear_recurrence import LinearRecurrence, num_state_heads
from ejkernel.planning.precision import product_precision
from ejkernel_pallas.tpu.linear_recurrence.config import (
    MAX_STATES_VMEM_BYTES,
    MIN_CHUNK_TOKENS,
    TpuRecurrence,
    has_channel_gates,
    state_vmem_bytes_per_head,
    updates_slots,
)

SCALAR_FIELDS = ("beta", "dt", "skip")
"""Fields with one element per token and head."""
GATE_SUM_NAMES = ("coarse_sums", "fine_sums")
"""The two values that represent sums of log gates that channels share; see `gates.HeadDecay`."""


@dataclasses.dataclass(frozen=True)
class ChunkArithmetic:
    """Constants of a chunk's arithmetic.

    Attributes:
        output_scale: Factor on the outputs.
        keeps_float32: Whether products keep float32's precision.
    """

    output_scale: float
    keeps_float32: bool


@dataclasses.dataclass(frozen=True, kw_only=True)
class RecurrenceSpec:
    """Constants of a kernel.

    Attributes:
        arithmetic: Constants of a chunk's arithmetic.
        chunk_tokens: The number of tokens per chunk.
        heads_per_step: The number of heads per grid step.
        total_heads: H, the number of heads.
        key_dim: K, channels of a key.
        value_dim: V, channels of a value.
        channel_field_head_counts: Pairs of a field that has channels, by name, and its number of heads.
        scalar_names: Names of the elements per token and head, in the order of the array of columns.
        gate_sum_names: Names of the values that represent sums of gates that all channels of a key share; empty for
            gates per channel.
        has_segment_runs: Whether a chunk takes one pass per run of a segment; the last column has the runs' indices.
    """

    arithmetic: ChunkArithmetic
    chunk_tokens: int
    heads_per_step: int
    total_heads: int
    key_dim: int
    value_dim: int
    channel_field_head_counts: tuple[tuple[str, int], ...]
    scalar_names: tuple[str, ...]
    gate_sum_names: tuple[str, ...]
    has_segment_runs: bool

    @property
    def num_head_steps(self) -> int:
        """Returns the number of grid steps over heads."""
        return self.total_heads // self.heads_per_step

    @property
    def step_scalar_names(self) -> tuple[str, ...]:
        """Returns the fields of one element per token and head that steps read: gates are not summed there."""
        fields = tuple(name for name in self.scalar_names if name in SCALAR_FIELDS)
        return ("decay", *fields) if self.gate_sum_names else fields

    @property
    def num_scalar_rows(self) -> int:
        """Returns the number of values per token that kernels read along lanes: sums of gates, and runs of segments."""
        return len(self.gate_sum_names) * self.heads_per_step + self.has_segment_runs if self.gate_sum_names else 0

    def num_channels(self, name: str) -> int:
        """Returns the number of channels of a field."""
        return self.value_dim if name in ("value", "value_decay", "output") else self.key_dim

    def heads_per_block(self, count: int) -> int:
        """Returns the number of heads in a block of a field of `count` heads."""
        return max(1, self.heads_per_step * count // self.total_heads)

    def has_heads_along_lanes(self, name: str, count: int) -> bool:
        """Returns whether a block of a field's heads is a block of lanes of [B, T, heads * channels]."""
        block = self.heads_per_block(count)
        return block == count or block * self.num_channels(name) % 128 == 0


def make_spec(record: LinearRecurrence, config: TpuRecurrence) -> RecurrenceSpec:
    """Returns the constants of a record's kernels."""
    total_heads, heads_in_vmem = (
        num_state_heads(record),
        max(1, MAX_STATES_VMEM_BYTES // max(1, state_vmem_bytes_per_head(record))),
    )
    shared = record.decay is not None and not has_channel_gates(record)
    channel_fields = {"query": record.query, "key": record.key, "value": record.value}
    channel_fields |= {"decay": record.decay} if has_channel_gates(record) else {}
    channel_fields |= {name: getattr(record, name) for name in ("value_decay", "low_rank_write", "low_rank_read")}
    head_counts = {name: x.shape[2] for name, x in channel_fields.items() if x is not None}
    keeps_float32 = product_precision(record.query.dtype, record.precision) in (
        lax.Precision.HIGH,
        lax.Precision.HIGHEST,
    )
    sums = GATE_SUM_NAMES[: 1 + keeps_float32] if shared else ()
    columns = sums + tuple(name for name in SCALAR_FIELDS if getattr(record, name) is not None)
    return RecurrenceSpec(
        arithmetic=ChunkArithmetic(output_scale=record.softmax_scale, keeps_float32=keeps_float32),
        chunk_tokens=config.chunk_size if updates_slots(record) else max(MIN_CHUNK_TOKENS, config.chunk_size),
        heads_per_step=_heads_per_step(total_heads, min(config.heads, heads_in_vmem), set(head_counts.values())),
        total_heads=total_heads,
        key_dim=record.query.shape[3],
        value_dim=record.value.shape[3],
        channel_field_head_counts=tuple(head_counts.items()),
        scalar_names=columns,
        gate_sum_names=sums,
        has_segment_runs=record.segment_ids is not None,
    )


def _heads_per_step(total_heads: int, max_heads: int, head_counts: set[int]) -> int:
    """Returns the largest number of heads per step that have whole heads of every field, or one head of it."""

    def divides_heads_evenly(heads: int) -> bool:
        groups = [total_heads // count for count in head_counts]
        return total_heads % heads == 0 and all(heads % group == 0 or group % heads == 0 for group in groups)

    return max(heads for heads in range(1, min(total_heads, max_heads) + 1) if divides_heads_evenly(heads))
