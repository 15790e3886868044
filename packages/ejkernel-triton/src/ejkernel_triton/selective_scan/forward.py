"""Forward pass of the selective scan in Triton."""

import jax
import jax.numpy as jnp
from jax import lax

from ejkernel.arithmetic import LOG2E
from ejkernel.families.selective_scan import ScanResiduals, SelectiveScan, packed_scan
from ejkernel.families.selective_scan.scan_sequences import forward_with_slot_states
from ejkernel_triton.launch import ShapeDtype, launch
from ejkernel_triton.selective_scan.config import ScanForward
from ejkernel_triton.selective_scan.spec import ScanSpec, make_spec


@forward_with_slot_states
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
        record, config.block_e, config.block_t, config.splits, bc_prefetch_distance=config.bc_prefetch_distance
    )
    num_rows, float32, operands = record.x.shape[0], jnp.float32, scan_operands(record)
    initial_states = _initial_states(record, spec, config.num_warps, operands)
    output, states, final_states = launch(
        selective_scan_fwd_kernel,
        (
            *(record.x, record.step, *operands, record.skip.astype(float32)[None]),
            initial_states,
            *packed_sequence_operands(record),
        ),
        (
            ShapeDtype(record.x.shape, record.x.dtype),
            ShapeDtype((num_rows, spec.NUM_INTERVALS, spec.N, spec.E), float32),
            ShapeDtype(
                (num_rows, spec.NUM_SEGMENTS, spec.N, spec.E) if spec.IS_PACKED else (num_rows, spec.N, spec.E), float32
            ),
        ),
        batch=num_rows,
        grid=num_rows * spec.NUM_SEGMENTS * spec.NUM_CHANNEL_TILES,
        num_warps=config.num_warps,
        num_stages=1,
        constants={"HAS_INITIAL_STATES": initial_states is not None, "spec": spec},
    )
    if record.cu_seqlens is not None:
        final_states, states = final_states[0], packed_scan.zero_unused_states(record.cu_seqlens, states)
    return (output, jnp.swapaxes(final_states, 1, 2)), ScanResiduals(states=states)


def _initial_states(
    record: SelectiveScan, spec: ScanSpec, num_warps: int, operands: tuple[jax.Array, jax.Array, jax.Array]
) -> jax.Array | None:
    """Returns the states before all segments, [B, NUM_SEGMENTS, N, E], or of packed sequences, [1, N, E, I]; None for
    zeros.
    """
    initial_state = record.initial_state
    scan_start_state = None if initial_state is None else jnp.swapaxes(initial_state, 1, 2).astype(jnp.float32)
    if spec.NUM_SEGMENTS > 1 and not spec.IS_PACKED:
        segment_operands = (*operands[:2], record.x)
        return segment_initial_states(record, spec, num_warps, segment_operands, scan_start_state, reverse=False)
    if scan_start_state is None:
        return None
    return scan_start_state[None] if spec.IS_PACKED else scan_start_state[:, None]


def packed_sequence_operands(record: SelectiveScan) -> tuple[jax.Array | None, jax.Array | None]:
    """Returns the bounds of packed sequences and their first intervals, [1, N + 1] int32 both; None without packing."""
    if record.cu_seqlens is None:
        return None, None
    return record.cu_seqlens.astype(jnp.int32)[None], packed_scan.first_interval_of_sequences(record.cu_seqlens)[None]


def scan_operands(record: SelectiveScan) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Returns A^T * log2(e) as [1, N, E], B and C, all float32: the arrays are small, and kernels need not convert
    them.
    """
    decay_rates = record.decay.T.astype(jnp.float32)[None] * LOG2E
    return decay_rates, record.write.astype(jnp.float32), record.read.astype(jnp.float32)


def segment_initial_states(
    record: SelectiveScan,
    spec: ScanSpec,
    num_warps: int,
    operands: tuple[jax.Array, jax.Array, jax.Array],
    scan_start_state: jax.Array | None,
    *,
    reverse: bool,
) -> jax.Array:
    """Returns the states before every segment, [B, NUM_SEGMENTS, N, E]; in reverse, the cotangents of the states after
    it.

    Args:
        record: The canonical arguments.
        spec: Constants.
        num_warps: Warps per program.
        operands: A^T * log2(e), B or C, and x or the output's cotangent.
        scan_start_state: [B, N, E], the state before the first segment, or in reverse the last cotangent; None for
            zeros.
        reverse: Whether to scan from the last token to the first.
    """
    from ejkernel_triton.selective_scan.kernels.segment_end_states import segment_end_states_kernel

    decay_rates, column, values = operands
    num_rows = record.x.shape[0]
    end_states, dt_sums = launch(
        segment_end_states_kernel,
        (record.step, decay_rates, column, values),
        (
            ShapeDtype((num_rows, spec.NUM_SEGMENTS, spec.N, spec.E), jnp.float32),
            ShapeDtype((num_rows, spec.NUM_SEGMENTS, spec.E), jnp.float32),
        ),
        batch=num_rows,
        grid=num_rows * spec.NUM_SEGMENTS * spec.NUM_CHANNEL_TILES,
        num_warps=num_warps,
        num_stages=1,
        constants={"REVERSE": reverse, "spec": spec},
    )
    if scan_start_state is None:
        scan_start_state = jnp.zeros((num_rows, spec.N, spec.E), jnp.float32)
    return _pass_segment_states(decay_rates, end_states, dt_sums, scan_start_state, reverse=reverse)


def _pass_segment_states(
    decay_rates: jax.Array, end_states: jax.Array, dt_sums: jax.Array, start_state: jax.Array, *, reverse: bool
) -> jax.Array:
    """Returns the states before all segments, from their end states and the sums of dt over them."""

    def pass_state(state: jax.Array, end_state_and_dt_sum: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
        end_state, dt_sum = end_state_and_dt_sum
        return jnp.exp2(decay_rates * dt_sum[:, None]) * state + end_state, state

    # One step per segment, in float32: an error here would reach every later segment.
    segments = (jnp.moveaxis(end_states, 1, 0), jnp.moveaxis(dt_sums, 1, 0))
    return jnp.moveaxis(lax.scan(pass_state, start_state, segments, reverse=reverse)[1], 0, 1)
