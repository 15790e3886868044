"""The FFI call of the backward scan (csrc/selective_scan/gradient.cu)."""

import jax
import jax.numpy as jnp
import numpy as np

from ejkernel.arithmetic import cdiv
from ejkernel.families.selective_scan import SelectiveScan
from ejkernel.families.selective_scan.scan_sequences import backward_with_slot_states, sequences
from ejkernel.types.pullback import Pullback
from ejkernel_cuda.library import register_handler
from ejkernel_cuda.selective_scan.config import CHANNELS_PER_WARPGROUP, MAX_STATE_DIM, GradientTile
from ejkernel_cuda.selective_scan.forward import packed_sequence_operands, scan_operands


@backward_with_slot_states
def backward(pullback: Pullback, config: GradientTile) -> dict[str, jax.Array]:
    """Returns the gradients of the requested fields of a record.

    Args:
        pullback: Record, stored states, cotangents of output and final states, and the names of the requested fields.
        config: Warpgroups per block.

    Returns:
        The gradient of each requested field, in its shape and dtype.
    """
    record: SelectiveScan = pullback.record
    (rows, tokens, channels), state_dim = record.x.shape, record.decay.shape[1]
    output_cotangent, final = pullback.cotangent
    x, step, decay, columns, skip = scan_operands(record, MAX_STATE_DIM)
    shape, float32, states = jax.ShapeDtypeStruct, jnp.float32, sequences(record)
    call = jax.ffi.ffi_call(
        register_handler("ejkernel_selective_scan_gradient"),
        (
            shape(x.shape, x.dtype),
            shape(step.shape, step.dtype),
            shape((rows, cdiv(channels, CHANNELS_PER_WARPGROUP), tokens, 2, MAX_STATE_DIM), float32),
            shape((states, channels, state_dim), float32),
            shape((states, channels), float32),
            shape((states, channels, state_dim), float32),
        ),
        vmap_method="broadcast_all",
    )
    inputs = (x, step, decay, columns, skip, pullback.residuals.states, output_cotangent, final.astype(float32))
    dx, dstep, partial_sums, ddecay, dskip, dinitial = call(
        *inputs, *packed_sequence_operands(record), warpgroups=np.int32(config.warpgroups)
    )
    # Each warpgroup has summed dB and dC over its channels; the sum over warpgroups has a fixed order.
    bc_gradients = partial_sums.sum(axis=1)
    gradients = {
        "x": dx,
        "step": dstep,
        "decay": ddecay.sum(axis=0),
        "write": bc_gradients[:, :, 0, :state_dim],
        "read": bc_gradients[:, :, 1, :state_dim],
        "skip": dskip.sum(axis=0),
        "initial_state": dinitial,
    }
    return {name: gradients[name].astype(getattr(record, name).dtype) for name in sorted(pullback.grad_fields)}
