"""Forward pass of native sparse attention on TPUs: three softmaxes, of which two are tiled attention."""

import functools
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental.pallas import tpu as pltpu

from ejkernel.families import selected_attention
from ejkernel.families.selected_attention import BranchResiduals, SelectedAttention, SelectedResiduals
from ejkernel.families.selected_attention import branches as selected_branches
from ejkernel.families.selected_attention.branches import DenseKernel
from ejkernel.ops.nested import dispatched_backward, dispatched_forward
from ejkernel_pallas.tpu.mosaic.launch import KernelCall, Operand, launch
from ejkernel_pallas.tpu.mosaic.vectors import LANES
from ejkernel_pallas.tpu.selected_attention import plan
from ejkernel_pallas.tpu.selected_attention.config import TpuSelected
from ejkernel_pallas.tpu.selected_attention.kernels.selected_fwd import selected_fwd
from ejkernel_pallas.tpu.selected_attention.kernels.tile import SelectedRefs
from ejkernel_pallas.tpu.selected_attention.spec import SelectedSpec, make_spec

DENSE_OPERATION = "flash_attention"
"""The operation that computes the branches that are tiled attention."""
DENSE_KERNEL = DenseKernel(
    functools.partial(dispatched_forward, DENSE_OPERATION), functools.partial(dispatched_backward, DENSE_OPERATION)
)


def forward(record: SelectedAttention, config: TpuSelected) -> tuple[jax.Array, SelectedResiduals]:
    """Returns output and residuals of a record.

    Args:
        record: The canonical arguments.
        config: Tile sizes of the selected branch.

    Returns:
        [B, T, H, Dv] in the query's dtype, and the residuals for the backward pass.
    """
    return selected_branches.forward(
        record, lambda listed: _selected_branch(listed, config), _select_blocks, DENSE_KERNEL
    )


def _select_blocks(record: SelectedAttention, compressed: BranchResiduals | None) -> jax.Array:
    return selected_attention.select(record)


def _selected_branch(record: SelectedAttention, config: TpuSelected) -> BranchResiduals:
    """Returns the selected branch of a record."""
    spec = make_spec(record, config, "forward")
    batch, kv_heads = record.query.shape[0], record.key.shape[2]
    tokens, rows = spec.num_query_tiles * spec.block_q, spec.rows_per_token
    lse = jax.ShapeDtypeStruct((batch, kv_heads, tokens * rows // LANES, LANES), jnp.float32)
    output = jax.ShapeDtypeStruct((batch, kv_heads, tokens, rows, spec.value_width), spec.row_dtype)
    results = run_kernel(
        "fwd",
        selected_fwd,
        record,
        spec,
        inputs={},
        outputs={"output": query_tile_operand(spec, output), "lse": row_statistics_operand(spec, lse)},
        scratch={
            "row_max": pltpu.VMEM((spec.block_q + 1, rows, LANES), jnp.float32),
            "row_sum": pltpu.VMEM((spec.block_q + 1, rows, spec.padded_keys_per_part), jnp.float32),
            "acc": pltpu.VMEM((spec.block_q + 1, rows, spec.value_width), jnp.float32),
            "scores": item_scratch(spec, jnp.float32),
            "weights": item_scratch(spec, spec.operand_dtype),
            "alpha": pltpu.VMEM((spec.readers_per_product * rows, LANES), jnp.float32),
            "outside": pltpu.VMEM((LANES, LANES), jnp.float32),
            "must_repeat": pltpu.SMEM((1,), jnp.int32),
        },
    )
    output = plan.restore_query_rows(results["output"], spec, record.value.shape[3]).astype(record.query.dtype)
    return BranchResiduals(output=output, lse=plan.restore_row_statistics(results["lse"], spec))


def item_scratch(spec: SelectedSpec, dtype: Any) -> Any:
    """Returns scratch memory for the scores or weights of an item."""
    return pltpu.VMEM((spec.readers_per_product * spec.rows_per_token, spec.padded_keys_per_part), dtype)


def _query_index_map(accumulates_for_keys: bool) -> Any:
    """Returns the index map of arrays of a tile of queries, whose third axis are the tiles."""
    return lambda b, h, i, j, *_: (b, h, j if accumulates_for_keys else i, 0, 0)


def query_tile_operand(spec: SelectedSpec, x: Any, accumulates_for_keys: bool = False) -> Operand:
    """Returns the operand that gives a grid step its queries of [B, Hk, T, rows, n]."""
    return Operand(x, (None, None, spec.block_q, *x.shape[3:]), _query_index_map(accumulates_for_keys))


def row_statistics_operand(spec: SelectedSpec, x: Any, accumulates_for_keys: bool = False) -> Operand:
    """Returns the operand that gives a grid step its rows of [B, Hk, rows of all tokens / 128, 128]."""
    index = _query_index_map(accumulates_for_keys)
    return Operand(x, (None, None, spec.block_q * spec.rows_per_token // LANES, LANES), lambda *step: index(*step)[:4])


def key_tile_operand(spec: SelectedSpec, x: Any, accumulates_for_keys: bool = False) -> Operand:
    """Returns the operand that gives a grid step its parts of [B, Hk, parts, keys, n]. After the last tile of keys that
    a tile of queries reads, the index stays, so that nothing is copied.
    """

    def index(b: Any, h: Any, i: Any, j: Any, table: Any) -> tuple[Any, ...]:
        if accumulates_for_keys:
            return b, h, i, 0, 0
        last = table[(b * x.shape[1] + h) * spec.num_query_tiles + i]
        return b, h, jnp.minimum(j % spec.num_key_tiles, last), 0, 0

    return Operand(x, (None, None, spec.parts_per_tile, *x.shape[3:]), index)


def run_kernel(
    name: str,
    kernel: Any,
    record: SelectedAttention,
    spec: SelectedSpec,
    *,
    inputs: Mapping[str, Operand],
    outputs: Mapping[str, Operand],
    scratch: Mapping[str, Any],
    accumulates_for_keys: bool = False,
) -> dict[str, jax.Array]:
    """Runs a kernel on all pairs of a tile of queries and a tile of keys.

    Args:
        name: The kernel's name.
        kernel: The kernel.
        record: The arguments, with blocks that are listed.
        spec: The kernel's constants.
        inputs: Inputs in addition to work list, query, key and value.
        outputs: The results.
        scratch: Memory that is kept between grid steps.
        accumulates_for_keys: Whether the kernel accumulates for keys; the tiles of queries are then the inner axis of
            the grid.
    """
    work = plan.work_lists(record, spec)
    query = plan.arrange_query_rows(record.query, spec, spec.key_width)
    key = plan.split_keys_into_parts(record.key, record, spec, spec.key_width)
    value = plan.split_keys_into_parts(record.value, record, spec, spec.value_width)
    tiles = (spec.num_query_tiles, spec.num_key_tiles * spec.num_rounds)
    work_block = (None, None, None, 1, spec.words_per_work_list)
    return launch(
        KernelCall(
            name=f"ejkernel_selected_attention_{name}",
            kernel=functools.partial(kernel, spec=spec),
            refs=SelectedRefs,
            grid=(*work.shape[:2], *(tiles[::-1] if accumulates_for_keys else tiles)),
            num_parallel_axes=3,
            scalar_tables={"last_key_tile": plan.last_key_tiles(work, spec)},
            inputs={
                "work_list": Operand(work, work_block, _query_index_map(accumulates_for_keys), memory_space=pltpu.SMEM),
                "query": query_tile_operand(spec, query, accumulates_for_keys),
                "key": key_tile_operand(spec, key, accumulates_for_keys),
                "value": key_tile_operand(spec, value, accumulates_for_keys),
                **inputs,
            },
            outputs=outputs,
            scratch=scratch,
        )
    )
