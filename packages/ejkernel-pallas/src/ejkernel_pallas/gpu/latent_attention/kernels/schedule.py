"""Plans a call in one kernel, where XLA takes about ten, which cost more than their work.

Block p computes where program p starts. Every block computes all running sums itself, in shared memory:

    steps   | 2  5  1  3 |       ends = steps; then for 1, 2, 4, ...: ends[i] += ends[i - n]
    ends    | 2  7  8 11 |       the item of step s is the number of ends <= s

and writes some rows of the table of items.
"""

from typing import Any

import jax
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental.mosaic import gpu as mgpu
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith, memref, vector

from ejkernel.families.paged_attention import PagedAttention
from ejkernel_pallas.gpu.hopper import arrays
from ejkernel_pallas.gpu.hopper.registers import int32_constant, int32_type
from ejkernel_pallas.gpu.hopper.sizes import I32, THREADS_PER_WARPGROUP
from ejkernel_pallas.gpu.latent_attention.plan import LatentSchedule, key_limits, make_row_key_extents
from ejkernel_pallas.gpu.latent_attention.spec import KEYS_PER_STEP, LatentSpec

ITEM_TABLE_COLUMNS = 5
"""Columns of the table of items."""
LOG2_KEYS_PER_STEP = KEYS_PER_STEP.bit_length() - 1
"""log2 of the keys per step."""


def make_schedule_in_kernel(record: PagedAttention, spec: LatentSpec) -> LatentSchedule:
    """Returns the items of a record, and the programs' shares, as `plan.make_schedule` does."""
    # A power of two, which every layout of a warpgroup divides.
    size = max(THREADS_PER_WARPGROUP, 1 << (spec.num_items - 1).bit_length())
    # If sequences are rows, the kernel reads lengths, and XLA has nothing to compute.
    single = record.query_start is None and record.kv_starts is None
    operands = (record.kv_lens.astype(I32),) if single else make_row_key_extents(record, spec)
    memory = plgpu.SMEM((size,), I32)
    # Zeros precede the sums, so that reads before the first one need no bounds check.
    scratch = [memory, memory, memory, memory, memory, plgpu.SMEM((2 * size,), I32)]
    outputs = [
        jax.ShapeDtypeStruct((spec.num_items, ITEM_TABLE_COLUMNS), I32),
        jax.ShapeDtypeStruct((spec.num_programs + 1, 2), I32),
    ]
    items, shares = plgpu.kernel(
        lambda *refs: _schedule_kernel(record, spec, size, refs[: len(operands)], refs[len(operands) :]),
        out_type=outputs,
        scratch_types=scratch,
        grid=(spec.num_programs + 1,),
        grid_names=("block",),
        compiler_params=plgpu.CompilerParams(lowering_semantics=plgpu.LoweringSemantics.Lane),
    )(*operands)
    return LatentSchedule(items, shares)


def _schedule_kernel(
    record: PagedAttention, spec: LatentSpec, padded_num_items: int, input_refs: Any, output_and_scratch_refs: Any
) -> None:
    items, shares, *columns, sums = output_and_scratch_refs
    # One element per thread and register: rows are read from offsets that may be odd.
    layout = plgpu.Layout.WG_STRIDED((padded_num_items,), vec_size=1)
    row = plgpu.broadcasted_iota(I32, (padded_num_items,), 0, layout=layout)
    loaded = [_load_vector(ref, padded_num_items, layout) for ref in input_refs]
    if len(loaded) == 1:
        keys, low = key_limits(record, loaded[0], loaded[0] - 1, 0 * row)
        sequence = row
    else:
        sequence, keys, low = loaded
    steps = lax.shift_right_logical(keys + (KEYS_PER_STEP - 1), LOG2_KEYS_PER_STEP) - lax.shift_right_logical(
        low, LOG2_KEYS_PER_STEP
    )
    # An item without keys has an output, too; rows past the last item have no steps.
    steps = jnp.where(row < spec.num_items, jnp.maximum(steps, 1), 0)
    ends = _running_sums(steps, sums, padded_num_items, layout)
    block = lax.axis_index("block")
    begin, item = _first_step_of_program(spec, steps, ends, block)
    shares[block, 0] = item
    shares[block, 1] = begin
    for column_ref, column in zip(columns, (sequence, keys, ends - steps, steps, low), strict=True):
        column_ref[...] = column
    # Blocks write interleaved rows.
    for first in range(0, spec.num_items, spec.num_programs + 1):
        lax.cond(
            first + block < spec.num_items,
            lambda row: _write_item_row(items, columns, row),
            lambda row: None,
            first + block,
        )


def _load_vector(ref: Any, padded_size: int, layout: Any) -> Any:
    """Loads an int32 vector from device memory, padded with its last element."""
    count = ref.shape[0]

    @plgpu.inline_mgpu(
        arg_types=(plgpu.RefType(()),), return_type=plgpu.ShapeDtypeStruct((padded_size,), ref.dtype, layout=layout)
    )
    def load(_: Any, ref: Any) -> Any:
        index, vector_type = ir.IndexType.get(), ir.VectorType.get((1,), int32_type())
        thread = arith.remui(mgpu.utils.thread_idx(), int32_constant(THREADS_PER_WARPGROUP))
        registers = np.empty((padded_size // THREADS_PER_WARPGROUP,), dtype=object)
        for n in range(padded_size // THREADS_PER_WARPGROUP):
            element_index = arith.minui(
                arith.addi(thread, int32_constant(n * THREADS_PER_WARPGROUP)), int32_constant(count - 1)
            )
            registers[n] = vector.from_elements(
                vector_type, [memref.load(ref, [arith.index_cast(index, element_index)])]
            )
        strided_layout = mgpu.WGStridedFragLayout((padded_size,), 1)
        return mgpu.FragmentedArray(_registers=registers, _layout=strided_layout, _is_signed=True)

    return load(ref)  # pyright: ignore[reportCallIssue]  # the decorator gives the context


def _write_item_row(items: Any, columns: Any, item_index: Any) -> None:
    for number, column in enumerate(columns):
        items[item_index, number] = column[item_index]


def _running_sums(steps: Any, sums_ref: Any, padded_num_items: int, layout: Any) -> Any:
    sums_ref[:padded_num_items] = jnp.zeros_like(steps)
    shift = 1
    while shift < padded_num_items:
        sums_ref[padded_num_items:] = steps
        steps = steps + arrays.load_with_layout(
            sums_ref.at[padded_num_items - shift : 2 * padded_num_items - shift], layout
        )
        shift *= 2
    return steps


def _first_step_of_program(spec: LatentSpec, steps_per_item: Any, step_ends: Any, program: Any) -> tuple[Any, Any]:
    """Returns the first step of a program in the order of all steps, and its item."""
    total, max_steps = jnp.sum(steps_per_item), jnp.max(steps_per_item)
    steps_per_program = lax.div(total + (spec.num_programs - 1), I32(spec.num_programs))
    if spec.max_share_growth_percent:
        whole_item_steps = lax.div(steps_per_program + max_steps - 1, max_steps) * max_steps
        has_equal_steps = total == max_steps * spec.num_items
        steps_per_program = jnp.where(
            has_equal_steps
            & ((whole_item_steps - steps_per_program) * 100 <= steps_per_program * spec.max_share_growth_percent),
            whole_item_steps,
            steps_per_program,
        )
    begin = jnp.minimum(program * steps_per_program, total)
    item = jnp.sum(jnp.where(step_ends <= begin, 1, 0))
    return begin, jnp.minimum(item, spec.num_items - 1)
