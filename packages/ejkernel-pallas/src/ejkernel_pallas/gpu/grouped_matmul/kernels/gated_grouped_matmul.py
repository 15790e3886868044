"""The gated product: the kernel of rows with a matrix [C, 2F] whose first half of columns gates the second half.

    matrix [C, 2F]     gate 0 | gate 1 | ...  || factor 0 | factor 1 | ...     64 columns each
    a stage            gate 0 | factor 0 | gate 1 | factor 1                   panels [64, 64], copied one by one
    accumulator        [64, 64] [64, 64]  [64, 64] [64, 64]                    one product of 256 columns
    output             act(gate 0) factor 0 | act(gate 1) factor 1             parts of 64 columns, in 16 bits

One product of both halves reads rows from shared memory once. A thread has the same columns of both, so that no data
moves between threads, and a product of any number of column blocks uses the first panels of a stage.

The columns may also be interleaved: a thread then has a column of the gate and its factor in neighbouring registers
(module `gating`). Without a gate, each panel gives its own columns of the output. The bias is loaded when a tile begins
and waits in registers for the sums: the copies of operands keep the memory so busy that a load takes as long as two or
three steps.
"""

import functools
from typing import Any

import jax
import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
from jax import lax

from ejkernel_pallas.gpu.grouped_matmul.kernels.branches import FirstMatchingBranch
from ejkernel_pallas.gpu.grouped_matmul.kernels.call import Call, SubTile
from ejkernel_pallas.gpu.grouped_matmul.kernels.consumer import run_row_kernel
from ejkernel_pallas.gpu.grouped_matmul.kernels.epilogue import write_rows
from ejkernel_pallas.gpu.grouped_matmul.kernels.panels import first_matrix_column_of_panel
from ejkernel_pallas.gpu.grouped_matmul.kernels.row_tiles import OutputTile
from ejkernel_pallas.gpu.grouped_matmul.spec import CONSUMER_WARPGROUPS, ActivationConstants, GateColumnOrder
from ejkernel_pallas.gpu.hopper import arrays, gating, row_gathers, wgmma
from ejkernel_pallas.gpu.hopper.column_bias import load_bias
from ejkernel_pallas.gpu.hopper.sizes import I32, SWIZZLE_COLUMNS, WGMMA_M


def gated_grouped_matmul_kernel(call: Call) -> None:
    """Runs one thread block of the kernel."""
    run_row_kernel(call, _multiply_tile)


def _multiply_tile(call: Call, tile: OutputTile, steps_done: Any) -> None:
    """Computes a warpgroup's part of a tile, from its products to memory."""
    spec, activation_constants, warpgroup = call.spec, call.spec.activation_constants, lax.axis_index("warpgroup")
    assert activation_constants is not None  # set for the gated product
    tile_columns, half_tile_columns = spec.tile.block_n, spec.tile.block_n // 2
    product, fits_64_rows = (
        functools.partial(_multiply_sub_tile, call, activation_constants, tile, steps_done),
        tile.group_end - tile.first_row <= WGMMA_M,
    )
    branches = FirstMatchingBranch()
    if activation_constants.single_warpgroup:
        # The first warpgroup computes all rows. The other one would compute the same, which costs power.
        branches.when(fits_64_rows & (warpgroup > 0), functools.partial(_skip_tile_stages, call, steps_done))
    if spec.may_split_last_tiles:
        branches.when(
            tile.column_half >= 0,
            functools.partial(
                product, SubTile(warpgroup, tile.column_half * half_tile_columns, half_tile_columns, is_half_tile=True)
            ),
        )
    if spec.partial_tile_columns:
        # Columns past the end of the output are not multiplied.
        branches.when(
            tile.first_column + tile_columns > spec.num_columns,
            functools.partial(product, SubTile(warpgroup, 0, spec.partial_tile_columns)),
        )
    branches.otherwise(functools.partial(product, SubTile(warpgroup, 0, tile_columns)))


def _multiply_sub_tile(
    call: Call, activation_constants: ActivationConstants, tile: OutputTile, steps_done: Any, sub_tile: SubTile
) -> None:
    """Computes a warpgroup's 64 rows and some of the columns."""
    row, column, valid = (
        tile.first_row_of_warpgroup(sub_tile.row_block_index),
        tile.first_column + sub_tile.first_column,
        None,
    )
    if activation_constants.has_bias and activation_constants.gathers_rows:
        # The products of a row without a token are the bias, but its output is 0.
        valid = row_gathers.load_row_validity(call.operands["indices"], row, call.operands["lhs"].shape[0])
    bias = _load_bias(call, tile.matrix_index, column, sub_tile.num_columns) if activation_constants.has_bias else None
    acc = _accumulate_products(call, steps_done, sub_tile)
    outputs = _apply_activation_and_gate(call, activation_constants, acc if bias is None else acc + bias, valid)
    write_rows(call, outputs, row, column, tile.group_end)


def _load_bias(call: Call, matrix: Any, column: Any, num_columns: int) -> jax.Array:
    """Returns the bias of the columns of each panel, in the layout of the sums."""
    starts = [
        first_matrix_column_of_panel(call, column, panel_index)
        for panel_index in range(call.spec.num_panels(num_columns))
    ]
    return load_bias(call.operands["bias"], matrix, starts)


def _skip_tile_stages(call: Call, steps_done: Any) -> None:
    """Frees the stages of a tile that another warpgroup multiplies."""
    shared, stages = call.shared_memory, call.spec.tile.stages

    def skip_step(index: Any, carry: None) -> None:
        slot = lax.rem(steps_done + index, I32(stages))
        plgpu.barrier_wait(shared.operands_full.at[slot])
        plgpu.barrier_arrive(shared.operands_free.at[slot])

    lax.fori_loop(0, call.spec.steps_per_tile, skip_step, None)


def _accumulate_products(call: Call, steps_done: Any, sub_tile: SubTile) -> jax.Array:
    """Returns the sums of a warpgroup's products over all steps."""
    spec, shared, stages = call.spec, call.shared_memory, call.spec.tile.stages
    accumulate = wgmma.accumulate_transposed_product if spec.matrices_are_transposed else wgmma.accumulate_product

    def step(index: Any, acc: Any) -> Any:
        slot = lax.rem(steps_done + index, I32(stages))
        plgpu.barrier_wait(shared.operands_full.at[slot])
        acc = accumulate(acc, shared.a.at[slot * CONSUMER_WARPGROUPS + sub_tile.row_block_index], shared.b.at[slot, 0])
        # One product stays in flight, so that the tensor cores do not idle; the previous one has read its stage.
        acc = wgmma.wait_for_products(acc, max_in_flight=1)
        last = lax.rem(steps_done + index + (stages - 1), I32(stages))
        pl.when(index > 0)(lambda: plgpu.barrier_arrive(shared.operands_free.at[last]))
        return acc

    zeros = arrays.zero_tile((WGMMA_M, spec.num_panels(sub_tile.num_columns) * SWIZZLE_COLUMNS))
    acc = wgmma.wait_for_products(lax.fori_loop(0, spec.steps_per_tile, step, zeros), max_in_flight=0)
    # Frees the stage of the last product, which no later step of this tile would free.
    plgpu.barrier_arrive(shared.operands_free.at[lax.rem(steps_done + (spec.steps_per_tile - 1), I32(stages))])
    return acc


def _apply_activation_and_gate(
    call: Call, activation_constants: ActivationConstants, acc: jax.Array, row_validity: jax.Array | None
) -> list[jax.Array]:
    """Returns the output of a warpgroup's sums: [64, 64] for every 64 columns."""
    if activation_constants.gate_column_order is GateColumnOrder.INTERLEAVED:
        width = 2 * SWIZZLE_COLUMNS
        pairs = [acc[:, n : n + width] for n in range(0, acc.shape[1], width)]
        return [
            gating.apply_gate_to_interleaved_columns(both, activation_constants, call.spec.out_dtype, row_validity)
            for both in pairs
        ]
    blocks = [acc[:, n : n + SWIZZLE_COLUMNS] for n in range(0, acc.shape[1], SWIZZLE_COLUMNS)]
    if activation_constants.gate_column_order is GateColumnOrder.NO_GATE:
        return [gating.apply_activation(block, activation_constants, row_validity) for block in blocks]
    return [
        gating.apply_gate(block, factor, activation_constants, row_validity)
        for block, factor in zip(blocks[::2], blocks[1::2], strict=True)
    ]
