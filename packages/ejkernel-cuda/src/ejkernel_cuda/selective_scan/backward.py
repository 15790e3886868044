"""The call of the backward scan (csrc/selective_scan_gradient.cu)."""

import jax
import jax.numpy as jnp
import numpy as np

from ejkernel.families.selective_scan import SelectiveScan
from ejkernel.families.selective_scan.scan_sequences import sequences, with_state_gradients
from ejkernel.types.pullback import Pullback
from ejkernel_cuda.library import registered
from ejkernel_cuda.selective_scan.config import LARGEST, WARPGROUP_CHANNELS, GradientTile
from ejkernel_cuda.selective_scan.forward import packed_operands, scan_operands


@with_state_gradients
def backward(pullback: Pullback, config: GradientTile) -> dict[str, jax.Array]:
    """Gradients of the wanted fields of a record.

    Args:
        pullback: Record, states before every interval, cotangents of output and final states, and the wanted names.
        config: Warpgroups of a block.

    Returns:
        Each wanted gradient, in its field's shape and dtype.
    """
    record: SelectiveScan = pullback.record
    (rows, tokens, channels), size = record.x.shape, record.decay.shape[1]
    outputs, final = pullback.cotangent
    x, step, decay, columns, skip = scan_operands(record, LARGEST)
    shape, float32, states = jax.ShapeDtypeStruct, jnp.float32, sequences(record)
    call = jax.ffi.ffi_call(
        registered("ejkernel_selective_scan_gradient"),
        (
            shape(x.shape, x.dtype),
            shape(step.shape, step.dtype),
            shape((rows, -(-channels // WARPGROUP_CHANNELS), tokens, 2, LARGEST), float32),
            shape((states, channels, size), float32),
            shape((states, channels), float32),
            shape((states, channels, size), float32),
        ),
        vmap_method="broadcast_all",
    )
    inputs = (x, step, decay, columns, skip, pullback.residuals.states, outputs, final.astype(float32))
    dx, dstep, partial, ddecay, dskip, dfirst = call(
        *inputs, *packed_operands(record), warpgroups=np.int32(config.warpgroups)
    )
    # Every warpgroup has dB and dC of its channels; the sum over them has a fixed order.
    pairs = partial.sum(axis=1)
    found = {
        "x": dx,
        "step": dstep,
        "decay": ddecay.sum(axis=0),
        "write": pairs[:, :, 0, :size],
        "read": pairs[:, :, 1, :size],
        "skip": dskip.sum(axis=0),
        "initial_state": dfirst,
    }
    return {name: found[name].astype(getattr(record, name).dtype) for name in sorted(pullback.wanted)}
