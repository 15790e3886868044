"""Backward pass of the selective scan in Triton."""

import jax
import jax.numpy as jnp

from ejkernel.families.selective_scan import SelectiveScan
from ejkernel.families.selective_scan.scan_sequences import backward_with_slot_states
from ejkernel.types.pullback import Pullback
from ejkernel_triton.launch import ShapeDtype, launch
from ejkernel_triton.selective_scan.config import ScanBackward
from ejkernel_triton.selective_scan.forward import packed_sequence_operands, scan_operands, segment_initial_states
from ejkernel_triton.selective_scan.spec import ScanSpec, make_spec

Gradients = dict[str, jax.Array]


@backward_with_slot_states
def backward(pullback: Pullback, config: ScanBackward) -> Gradients:
    """Returns the gradients of the requested fields of a record.

    Args:
        pullback: Record, stored states, cotangents of output and final states, and the names of the requested fields.
        config: Tiles and segments.

    Returns:
        The gradient of each requested field, in its shape and dtype.
    """
    record: SelectiveScan = pullback.record
    spec = make_spec(
        record,
        config.block_e,
        config.block_t,
        config.splits,
        prefetch=config.prefetch,
        prefetch_states=config.prefetch_states,
        bc_prefetch_distance=config.block_t if config.prefetch_recomputed_b else 0,
    )
    output_cotangent, final_states_cotangent = pullback.cotangent
    operands = scan_operands(record)
    final_cotangent = jnp.swapaxes(final_states_cotangent, 1, 2).astype(jnp.float32)
    segment_end_cotangents = final_cotangent[None] if spec.IS_PACKED else final_cotangent[:, None]
    if spec.NUM_SEGMENTS > 1 and not spec.IS_PACKED:
        decay_rates, _, read = operands
        segment_end_cotangents = segment_initial_states(
            record, spec, 1, (decay_rates, read, output_cotangent), final_cotangent, reverse=True
        )
    dx, ddt, partial_sums, ddecay, dskip, dinitial_states, _ = _launch_backward_kernel(
        pullback, operands, output_cotangent, segment_end_cotangents, spec
    )
    # Every program has summed dB and dC over its channels; the sum over tiles has a fixed order.
    bc_gradients = partial_sums.sum(axis=1)
    gradients = {
        "x": dx,
        "step": ddt,
        "decay": ddecay.sum(axis=(0, 1)).T,
        "write": bc_gradients[..., : spec.N],
        "read": bc_gradients[..., spec.BN : spec.BN + spec.N],
        "skip": dskip.sum(axis=(0, 1)),
        "initial_state": jnp.swapaxes(dinitial_states[0] if spec.IS_PACKED else dinitial_states, 1, 2),
    }
    return {name: gradients[name].astype(getattr(record, name).dtype) for name in sorted(pullback.grad_fields)}


def _launch_backward_kernel(
    pullback: Pullback,
    operands: tuple[jax.Array, jax.Array, jax.Array],
    output_cotangent: jax.Array,
    segment_end_cotangents: jax.Array,
    spec: ScanSpec,
) -> tuple[jax.Array, ...]:
    """Returns gradients of the tokens, and sums over each program's channels and tokens."""
    from ejkernel_triton.selective_scan.kernels.selective_scan_bwd import selective_scan_bwd_kernel

    record: SelectiveScan = pullback.record
    num_rows, float32 = record.x.shape[0], jnp.float32
    programs = spec.NUM_SEGMENTS * spec.NUM_CHANNEL_TILES
    blocks = spec.TOKENS_PER_INTERVAL // spec.BLOCK_T
    return launch(
        selective_scan_bwd_kernel,
        (
            *(record.x, record.step, *operands, record.skip.astype(float32)[None]),
            *(pullback.residuals.states, output_cotangent, segment_end_cotangents),
            *packed_sequence_operands(record),
        ),
        (
            ShapeDtype(record.x.shape, record.x.dtype),
            ShapeDtype(record.step.shape, record.step.dtype),
            ShapeDtype((num_rows, spec.NUM_CHANNEL_TILES, spec.T, 2 * spec.BN), float32),
            ShapeDtype((num_rows, spec.NUM_SEGMENTS, spec.N, spec.E), float32),
            ShapeDtype((num_rows, spec.NUM_SEGMENTS, spec.E), float32),
            ShapeDtype(
                (num_rows, spec.NUM_SEGMENTS, spec.N, spec.E) if spec.IS_PACKED else (num_rows, spec.N, spec.E), float32
            ),
            # Scratch for one interval per program, overwritten by the next: small enough to stay in L2.
            ShapeDtype((num_rows, programs, blocks, spec.BN, spec.BLOCK_E), float32),
        ),
        batch=num_rows,
        grid=num_rows * programs,
        # Sums over channels are shuffles of one warp; a second warp would need shared memory and barriers.
        num_warps=1,
        num_stages=1,
        constants={"spec": spec},
    )
