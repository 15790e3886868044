"""The FFI call of the forward scan (csrc/selective_scan/selective_scan.cu)."""

import jax
import jax.numpy as jnp
import numpy as np

from ejkernel.arithmetic import cdiv
from ejkernel.families.selective_scan import TOKENS_PER_STORED_STATE, ScanResiduals, SelectiveScan, packed_scan
from ejkernel.families.selective_scan.scan_sequences import forward_with_slot_states, sequences
from ejkernel_cuda.library import register_handler
from ejkernel_cuda.selective_scan.config import CHANNEL_ALIGNMENT, ScanTile, padded_state_dim


@forward_with_slot_states
def forward(record: SelectiveScan, config: ScanTile) -> tuple[tuple[jax.Array, jax.Array], ScanResiduals]:
    """Returns output [B, T, I] in x's dtype, final states [B, I, E] in float32, and the states before every interval.

    With packed sequences the final states are [N, I, E], and each sequence is a row to the kernel. Leading axes that
    `jax.vmap` adds to all arrays are more rows, too.

    Raises:
        ValueError: The configuration's tile does not divide the number of channels.
    """
    (rows, tokens, channels), state_dim = record.x.shape, record.decay.shape[1]
    if config.lanes > 1 and channels % CHANNEL_ALIGNMENT:
        raise ValueError(f"{config}: got {channels} channels, wants a multiple of {CHANNEL_ALIGNMENT}")
    float32, cu_seqlens = jnp.float32, record.cu_seqlens
    packed = cu_seqlens is not None
    intervals = (
        packed_scan.max_num_intervals(tokens, sequences(record)) if packed else cdiv(tokens, TOKENS_PER_STORED_STATE)
    )
    call = jax.ffi.ffi_call(
        register_handler("ejkernel_selective_scan"),
        (
            jax.ShapeDtypeStruct(record.x.shape, record.x.dtype),
            jax.ShapeDtypeStruct((rows, intervals, state_dim, channels), float32),
            jax.ShapeDtypeStruct((sequences(record), channels, state_dim), float32),
        ),
        vmap_method="broadcast_all",
    )
    initial = jnp.zeros(0, float32) if record.initial_state is None else record.initial_state.astype(float32)
    output, states, final = call(
        *scan_operands(record, padded_state_dim(state_dim, config)),
        initial,
        *packed_sequence_operands(record),
        channels=np.int32(config.channels),
        lanes=np.int32(config.lanes),
    )
    states = states if cu_seqlens is None else packed_scan.zero_unused_states(cu_seqlens, states)
    return (output, final), ScanResiduals(states=states)


def packed_sequence_operands(record: SelectiveScan) -> tuple[jax.Array, jax.Array]:
    """Returns bounds and first intervals of packed sequences, both int32 [N + 1]; empty arrays without packing."""
    if record.cu_seqlens is None:
        return jnp.zeros(0, jnp.int32), jnp.zeros(0, jnp.int32)
    return record.cu_seqlens.astype(jnp.int32), packed_scan.first_interval_of_sequences(record.cu_seqlens)


def scan_operands(record: SelectiveScan, state_dim: int) -> tuple[jax.Array, ...]:
    """Returns x, dt, A, the pairs of B and C, and D, in the kernels' layout.

    B and C of every token are one float32 array [B, T, 2, size], padded with zeros: they are small, and the kernels
    copy them without conversion.
    """
    float32 = jnp.float32
    # The kernels read dt in x's dtype or in float32, to which any other dtype converts exactly.
    step = record.step if record.step.dtype == record.x.dtype else record.step.astype(float32)
    bc_pairs = jnp.stack([record.write.astype(float32), record.read.astype(float32)], axis=2)
    columns = jnp.pad(bc_pairs, ((0, 0), (0, 0), (0, 0), (0, state_dim - record.decay.shape[1])))
    return record.x, step, record.decay.astype(float32), columns, record.skip.astype(float32)
