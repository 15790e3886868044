"""The call of the forward scan (csrc/selective_scan.cu)."""

import jax
import jax.numpy as jnp
import numpy as np

from ejkernel.families.selective_scan import INTERVAL, ScanResiduals, SelectiveScan, packed_scan
from ejkernel.families.selective_scan.scan_sequences import sequences, with_states
from ejkernel_cuda.library import registered
from ejkernel_cuda.selective_scan.config import PIECE_CHANNELS, ScanTile, padded


@with_states
def forward(record: SelectiveScan, config: ScanTile) -> tuple[tuple[jax.Array, jax.Array], ScanResiduals]:
    """Output [B, T, I] in x's dtype, final states [B, I, E] float32, and the states before every interval.

    Of packed sequences, final states are [N, I, E], and each sequence is a row of its own to the kernel.

    Axes that `jax.vmap` puts in front of all arrays are more rows to the kernel.

    Raises:
        ValueError: A tile was asked for that the number of channels does not fit.
    """
    (rows, tokens, channels), size = record.x.shape, record.decay.shape[1]
    if config.lanes > 1 and channels % PIECE_CHANNELS:
        raise ValueError(f"{config}: got {channels} channels, wants a multiple of {PIECE_CHANNELS}")
    float32, cu_seqlens = jnp.float32, record.cu_seqlens
    packed = cu_seqlens is not None
    intervals = packed_scan.interval_count(tokens, sequences(record)) if packed else -(-tokens // INTERVAL)
    call = jax.ffi.ffi_call(
        registered("ejkernel_selective_scan"),
        (
            jax.ShapeDtypeStruct(record.x.shape, record.x.dtype),
            jax.ShapeDtypeStruct((rows, intervals, size, channels), float32),
            jax.ShapeDtypeStruct((sequences(record), channels, size), float32),
        ),
        vmap_method="broadcast_all",
    )
    initial = jnp.zeros(0, float32) if record.initial_state is None else record.initial_state.astype(float32)
    output, states, final = call(
        *scan_operands(record, padded(size, config)),
        initial,
        *packed_operands(record),
        channels=np.int32(config.channels),
        lanes=np.int32(config.lanes),
    )
    states = states if cu_seqlens is None else packed_scan.stored_states(cu_seqlens, states)
    return (output, final), ScanResiduals(states=states)


def packed_operands(record: SelectiveScan) -> tuple[jax.Array, jax.Array]:
    """The bounds of packed sequences and their first intervals, [N + 1] int32 both; without elements for none."""
    if record.cu_seqlens is None:
        return jnp.zeros(0, jnp.int32), jnp.zeros(0, jnp.int32)
    return record.cu_seqlens.astype(jnp.int32), packed_scan.first_intervals(record.cu_seqlens)


def scan_operands(record: SelectiveScan, size: int) -> tuple[jax.Array, ...]:
    """x, dt, A, the pairs of B and C and D as the kernels take them.

    B and C of every token are one array [B, T, 2, size] in float32, padded with zeros: they are small, and the kernels
    copy them as they are.
    """
    float32 = jnp.float32
    # The kernels have a dt of x's dtype or of float32, in which no other dtype loses anything.
    step = record.step if record.step.dtype == record.x.dtype else record.step.astype(float32)
    pairs = jnp.stack([record.write.astype(float32), record.read.astype(float32)], axis=2)
    columns = jnp.pad(pairs, ((0, 0), (0, 0), (0, 0), (0, size - record.decay.shape[1])))
    return record.x, step, record.decay.astype(float32), columns, record.skip.astype(float32)
