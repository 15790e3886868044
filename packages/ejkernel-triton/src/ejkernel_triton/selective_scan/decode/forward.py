"""The decode step of the selective scan in Triton: one to eight tokens per sequence, the states updated in place."""

import jax
import jax.numpy as jnp

from ejkernel.families import selective_scan
from ejkernel.families.selective_scan import ScanResiduals, SelectiveScan
from ejkernel_triton.launch import ShapeDtype, launch
from ejkernel_triton.selective_scan.decode.config import ScanDecodeTile
from ejkernel_triton.selective_scan.decode.spec import make_spec


def forward(record: SelectiveScan, config: ScanDecodeTile) -> tuple[tuple[jax.Array, jax.Array], ScanResiduals]:
    """Returns output and final states of a record.

    States in float32, and slots of any dtype, are updated in place: XLA copies them first only if they are used
    elsewhere, for example by a caller that does not donate them.

    Args:
        record: The canonical arguments.
        config: The tile.

    Returns:
        Output [B, T, I] in x's dtype, final states in float32 or the slots, and the residuals of the backward pass.
    """
    from ejkernel_triton.selective_scan.decode.kernels.selective_state_update import selective_state_update_kernel

    spec, rows = make_spec(record, config), record.x.shape[0]
    bounds, slots, initial = record.cu_seqlens, record.state_slots, record.initial_state
    if spec.IS_PACKED:
        bounds, slots, initial = (None if x is None else x[None] for x in (bounds, slots, initial))
        bounds, slots = (None if x is None else x.astype(jnp.int32) for x in (bounds, slots))
    fields = (record.x, record.step, record.decay[None], record.write, record.read, record.skip[None])
    inputs = (*fields, bounds, slots, initial)
    states = (spec.NUM_SEQUENCES, spec.E, spec.N) if spec.IS_PACKED else (spec.E, spec.N)
    final, output = launch(
        selective_state_update_kernel,
        inputs,
        (
            # The index of an input means that the output is written to its memory.
            len(inputs) - 1 if spec.STATES_ARE_IN_PLACE else ShapeDtype((rows, *states), jnp.float32),
            ShapeDtype(record.x.shape, record.x.dtype),
        ),
        batch=rows,
        grid=rows * spec.NUM_SEQUENCES * spec.NUM_CHANNEL_TILES,
        num_warps=config.num_warps,
        num_stages=1,
        constants={"spec": spec},
    )
    # XLA computes the residuals of calls with a backward pass, and drops those of the others.
    return (output, final[0] if spec.IS_PACKED else final), selective_scan.reference(record)[1]
