"""Plans the launches of the delta rule's backward pass: pipeline stages, heads per program, shapes of gradients."""

import math
from typing import Any

import jax.numpy as jnp

from ejkernel.ops.chips import gpu_of
from ejkernel.ops.device import current_device
from ejkernel_triton.launch import ShapeDtype, is_interpreting
from ejkernel_triton.linear_recurrence.chunked.backward import MAX_HEADS_SUMMED_PER_PROGRAM
from ejkernel_triton.linear_recurrence.config import MIN_TILE
from ejkernel_triton.linear_recurrence.delta.forward import delta_config
from ejkernel_triton.linear_recurrence.plan import RecurrenceCall
from ejkernel_triton.linear_recurrence.spec import RecurrenceSpec
from ejkernel_triton.sizes import pad_to_power_of_two


def state_gradient_stages(call: RecurrenceCall) -> int:
    """Returns the pipeline stages of the reverse scan: as many chunks as fit shared memory, at most the
    configuration's.
    """
    spec, config = call.spec, delta_config(call)
    key_channels = pad_to_power_of_two(spec.K, MIN_TILE)
    # Shared memory holds the products' operands: q, k and W of all key channels, do and A^T do of the tile.
    bytes_per_chunk = spec.CHUNK_SIZE * (3 * key_channels + 2 * config.dh_block_v) * call.query.dtype.itemsize
    shared_memory_budget = gpu_of(current_device()).shared_memory * 4 // 5
    return max(1, min(config.dh_stages, shared_memory_budget // bytes_per_chunk))


def key_heads_summed_per_program(spec: RecurrenceSpec, num_single_head_programs: int) -> int:
    """Returns how many heads that share queries or keys a program has, which adds up their gradients.

    Args:
        spec: Constants of the kernels.
        num_single_head_programs: Programs of the call, if each had one head.
    """
    heads_per_field_head = [spec.H // n for n in (spec.HQ, spec.HK) if n < spec.H]
    if not heads_per_field_head:
        return 1
    most, shared = MAX_HEADS_SUMMED_PER_PROGRAM, math.gcd(*heads_per_field_head)
    if not is_interpreting():
        # Fewer heads where the chip would have less than two programs per multiprocessor.
        programs = num_single_head_programs * spec.H
        most = min(most, max(1, programs // (2 * gpu_of(current_device()).multiprocessors)))
    return next(n for n in range(most, 0, -1) if shared % n == 0)


def key_kernel_shapes(
    call: RecurrenceCall, heads_per_program: int, num_tiles: int, dgates_dtype: Any
) -> list[ShapeDtype]:
    """Returns the shapes of the outputs of `chunk_bwd_dqkwg_kernel`: gradients of queries and keys, their incomplete
    sums, and gradients of gates and beta. Sums over key channels are partial sums of the tiles.
    """
    spec, batch = call.spec, call.query.shape[0]
    pairs = [_key_gradient_shapes(call, n, heads_per_program) for n in (spec.HQ, spec.HK)]
    gradients, sums = zip(*pairs, strict=True)
    partial_sums = ShapeDtype((batch, num_tiles, spec.T, spec.H), jnp.float32)
    if dgates_dtype is None:
        return [*gradients, *sums, ShapeDtype((batch,), jnp.float32), partial_sums]
    gate_shape = (batch, spec.T, spec.H, spec.K) if spec.GATE_CHANNELS > 1 else partial_sums.shape
    return [*gradients, *sums, ShapeDtype(gate_shape, dgates_dtype), partial_sums]


def _key_gradient_shapes(
    call: RecurrenceCall, field_heads: int, heads_per_program: int
) -> tuple[ShapeDtype, ShapeDtype]:
    """Returns the shapes of the gradient of queries or keys with `field_heads` heads, as the kernel stores it, and of
    the sum over a group of heads while it is not complete.
    """
    spec, batch, dtype = call.spec, call.query.shape[0], call.query.dtype
    if field_heads == spec.H:
        return ShapeDtype((batch, spec.T, spec.H, spec.K), dtype), ShapeDtype((batch,), jnp.float32)
    groups = spec.H // heads_per_program
    # Several groups of a field's head are added up by XLA.
    shape = (batch, spec.T, groups, spec.K)
    return (
        ShapeDtype(shape, dtype if groups == field_heads else jnp.float32),
        ShapeDtype(shape if heads_per_program > 1 else (batch,), jnp.float32),
    )
