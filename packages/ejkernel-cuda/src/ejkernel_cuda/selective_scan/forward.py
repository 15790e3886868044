"""The call of the forward scan (csrc/selective_scan.cu)."""

import jax
import jax.numpy as jnp
import numpy as np

from ejkernel.families.selective_scan import INTERVAL, ScanResiduals, SelectiveScan
from ejkernel_cuda.library import registered
from ejkernel_cuda.selective_scan.tiles import ScanTile, padded


def forward(record: SelectiveScan, config: ScanTile) -> tuple[tuple[jax.Array, jax.Array], ScanResiduals]:
    """Output [B, T, I] in x's dtype, final states [B, I, E] float32, and the states before every interval.

    Axes that `jax.vmap` puts in front of all arrays are more rows to the kernel.
    """
    (rows, tokens, channels), size = record.x.shape, record.decay.shape[1]
    float32 = jnp.float32
    call = jax.ffi.ffi_call(
        registered("ejkernel_selective_scan"),
        (
            jax.ShapeDtypeStruct(record.x.shape, record.x.dtype),
            jax.ShapeDtypeStruct((rows, -(-tokens // INTERVAL), size, channels), float32),
            jax.ShapeDtypeStruct((rows, channels, size), float32),
        ),
        vmap_method="broadcast_all",
    )
    # The kernel has a dt of x's dtype or of float32, in which no other dtype loses anything.
    step = record.step if record.step.dtype == record.x.dtype else record.step.astype(float32)
    initial = jnp.zeros(0, float32) if record.initial_state is None else record.initial_state.astype(float32)
    output, states, final = call(
        record.x,
        step,
        record.decay.astype(float32),
        columns(record),
        record.skip.astype(float32),
        initial,
        channels=np.int32(config.channels),
        lanes=np.int32(config.lanes),
        unrolled=np.int32(config.unrolled),
    )
    return (output, final), ScanResiduals(states=states)


def columns(record: SelectiveScan) -> jax.Array:
    """B and C of every token, [B, T, 2, N] in float32: small, and the kernel copies them as they are."""
    pairs = jnp.stack([record.write.astype(jnp.float32), record.read.astype(jnp.float32)], axis=2)
    return jnp.pad(pairs, ((0, 0), (0, 0), (0, 0), (0, padded(record.decay.shape[1]) - record.decay.shape[1])))
