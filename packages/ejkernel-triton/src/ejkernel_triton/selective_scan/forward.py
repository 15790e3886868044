"""Forward pass of the selective scan in Triton."""

import jax
import jax.numpy as jnp
from jax import lax

from ejkernel.arithmetic import LOG2E
from ejkernel.families.selective_scan import ScanResiduals, SelectiveScan, packed_scan
from ejkernel.families.selective_scan.scan_sequences import with_states
from ejkernel_triton.launch import Shape, launch
from ejkernel_triton.selective_scan.config import ScanForward
from ejkernel_triton.selective_scan.spec import ScanSpec, make_spec


@with_states
def forward(record: SelectiveScan, config: ScanForward) -> tuple[tuple[jax.Array, jax.Array], ScanResiduals]:
    """Returns output and final states of a record.

    Args:
        record: The canonical arguments.
        config: Tiles, segments and warps.

    Returns:
        Output [B, T, I] in x's dtype, final states [B, I, E] float32, or [N, I, E] for packed sequences, and the states
        before intervals.
    """
    from ejkernel_triton.selective_scan.kernels.selective_scan_fwd import selective_scan_fwd_kernel

    spec = make_spec(
        record, config.block_e, config.block_t, config.splits, prefetched_columns=config.prefetched_columns
    )
    rows = record.x.shape[0]
    rates, write, read = scan_operands(record)
    first = None
    if record.initial_state is not None:
        first = jnp.swapaxes(record.initial_state, 1, 2).astype(jnp.float32)
    # The initial states of packed sequences are passed as [1, N, E, I].
    starts = None if first is None else first[None] if spec.PACKED else first[:, None]
    if spec.SPLITS > 1 and not spec.PACKED:
        starts = segment_starts(record, spec, config.num_warps, (rates, write, record.x), first, reverse=False)
    output, states, final = launch(
        selective_scan_fwd_kernel,
        (
            record.x,
            record.step,
            rates,
            write,
            read,
            record.skip.astype(jnp.float32)[None],
            starts,
            *packed_operands(record),
        ),
        (
            Shape(record.x.shape, record.x.dtype),
            Shape((rows, spec.CHUNKS, spec.N, spec.E), jnp.float32),
            Shape((rows, spec.SPLITS, spec.N, spec.E) if spec.PACKED else (rows, spec.N, spec.E), jnp.float32),
        ),
        batch=rows,
        grid=rows * spec.SPLITS * spec.TILES,
        num_warps=config.num_warps,
        num_stages=1,
        constants={"GIVEN": starts is not None, "spec": spec},
    )
    if record.cu_seqlens is not None:
        final, states = final[0], packed_scan.stored_states(record.cu_seqlens, states)
    return (output, jnp.swapaxes(final, 1, 2)), ScanResiduals(states=states)


def packed_operands(record: SelectiveScan) -> tuple[jax.Array | None, jax.Array | None]:
    """Returns the bounds of packed sequences and their first intervals, [1, N + 1] int32 both; None without packing."""
    if record.cu_seqlens is None:
        return None, None
    return record.cu_seqlens.astype(jnp.int32)[None], packed_scan.first_intervals(record.cu_seqlens)[None]


def scan_operands(record: SelectiveScan) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Returns A^T * log2(e) as [1, N, E], B and C, all float32: the arrays are small, and kernels need not convert
    them.
    """
    rates = record.decay.T.astype(jnp.float32)[None] * LOG2E
    return rates, record.write.astype(jnp.float32), record.read.astype(jnp.float32)


def segment_starts(
    record: SelectiveScan,
    spec: ScanSpec,
    num_warps: int,
    operands: tuple[jax.Array, jax.Array, jax.Array],
    first: jax.Array | None,
    *,
    reverse: bool,
) -> jax.Array:
    """Returns the states before every segment, [B, SPLITS, N, E]; in reverse, the cotangents of the states after it.

    Args:
        record: The canonical arguments.
        spec: Constants.
        num_warps: Warps per program.
        operands: A^T * log2(e), B or C, and x or the output's cotangent.
        first: [B, N, E], the state before the first segment, or in reverse the last cotangent; None for zeros.
        reverse: Whether to scan from the last token to the first.
    """
    from ejkernel_triton.selective_scan.kernels.segment_states import segment_states_kernel

    rates, column, values = operands
    rows = record.x.shape[0]
    ends, sums = launch(
        segment_states_kernel,
        (record.step, rates, column, values),
        (
            Shape((rows, spec.SPLITS, spec.N, spec.E), jnp.float32),
            Shape((rows, spec.SPLITS, spec.E), jnp.float32),
        ),
        batch=rows,
        grid=rows * spec.SPLITS * spec.TILES,
        num_warps=num_warps,
        num_stages=1,
        constants={"REVERSE": reverse, "spec": spec},
    )

    def part(state: jax.Array, parts: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
        end, total = parts
        return jnp.exp2(rates * total[:, None]) * state + end, state

    # One step per segment, in float32: an error here would reach every later segment.
    start = jnp.zeros((rows, spec.N, spec.E), jnp.float32) if first is None else first
    found = lax.scan(part, start, (jnp.moveaxis(ends, 1, 0), jnp.moveaxis(sums, 1, 0)), reverse=reverse)[1]
    return jnp.moveaxis(found, 0, 1)
