"""The compile-time constants of the linear recurrence's kernels."""

import dataclasses

from jax import lax

from ejkernel.families.linear_recurrence import LinearRecurrence, by_channel, head_count
from ejkernel.planning.precision import product_precision
from ejkernel_pallas.tpu.linear_recurrence.config import STATES_VMEM_BYTES, TpuRecurrence, state_bytes
from ejkernel_pallas.tpu.linear_recurrence.kernels.chunk import Numbers

SCALAR_FIELDS = ("beta", "dt", "skip")
"""Fields with one element per token and head."""
GATE_SUM_PARTS = ("coarse", "fine")
"""The two numbers that represent sums of log gates that channels share; see `gates.HeadDecay`."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class RecurrenceSpec:
    """Constants of a kernel.

    Attributes:
        numbers: Constants of the arithmetic.
        chunk: Tokens per chunk.
        heads: Heads per grid step.
        total_heads: H.
        keys: K.
        values: V.
        wide: Heads of each field that has channels, by its name.
        columns: Names of the elements per token and head, in the order of the array of columns.
        sums: Names of the numbers that represent sums of gates that the channels of a key share; empty if they do not.
        runs: Whether segments are separate passes; the last of the columns has their indices.
    """

    numbers: Numbers
    chunk: int
    heads: int
    total_heads: int
    keys: int
    values: int
    wide: tuple[tuple[str, int], ...]
    columns: tuple[str, ...]
    sums: tuple[str, ...]
    runs: bool

    @property
    def steps(self) -> int:
        """Returns grid steps over heads."""
        return self.total_heads // self.heads

    @property
    def rows(self) -> int:
        """Returns the elements per token in the array of rows: sums of gates, and the runs of segments."""
        return len(self.sums) * self.heads + self.runs if self.sums else 0

    def width(self, name: str) -> int:
        """Returns channels of a field."""
        return self.values if name in ("value", "value_decay", "output") else self.keys

    def block_heads(self, count: int) -> int:
        """Returns heads of a field of `count` heads in a block."""
        return max(1, self.heads * count // self.total_heads)

    def lies_in_lanes(self, name: str, count: int) -> bool:
        """Returns whether a block of a field's heads is a block of lanes of [B, T, heads * channels]."""
        block = self.block_heads(count)
        return block == count or block * self.width(name) % 128 == 0


def make_spec(record: LinearRecurrence, config: TpuRecurrence) -> RecurrenceSpec:
    """Returns the constants of a record's kernels."""
    total, room = head_count(record), max(1, STATES_VMEM_BYTES // max(1, state_bytes(record)))
    shared = record.decay is not None and not by_channel(record)
    wide = {"query": record.query, "key": record.key, "value": record.value}
    wide |= {"decay": record.decay} if by_channel(record) else {}
    wide |= {"value_decay": record.value_decay} if record.value_decay is not None else {}
    counts = {name: x.shape[2] for name, x in wide.items() if x is not None}
    exact = product_precision(record.query.dtype, record.precision) in (lax.Precision.HIGH, lax.Precision.HIGHEST)
    sums = GATE_SUM_PARTS[: 1 + exact] if shared else ()
    columns = sums + tuple(name for name in SCALAR_FIELDS if getattr(record, name) is not None)
    return RecurrenceSpec(
        numbers=Numbers(scale=record.softmax_scale, exact=exact),
        chunk=config.chunk_size,
        heads=_heads_per_step(total, min(config.heads, room), set(counts.values())),
        total_heads=total,
        keys=record.query.shape[3],
        values=record.value.shape[3],
        wide=tuple(counts.items()),
        columns=columns,
        sums=sums,
        runs=record.segment_ids is not None,
    )


def _heads_per_step(total: int, most: int, counts: set[int]) -> int:
    """Returns the largest number of heads per step that have whole heads of every field, or one head of it."""

    def fits(heads: int) -> bool:
        groups = [total // count for count in counts]
        return total % heads == 0 and all(heads % group == 0 or group % heads == 0 for group in groups)

    return max(heads for heads in range(1, min(total, most) + 1) if fits(heads))
