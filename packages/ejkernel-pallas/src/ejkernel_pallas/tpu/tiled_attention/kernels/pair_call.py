"""Calls of kernels whose grid is (batch row, head, tile pair)."""

import functools
from collections.abc import Callable
from typing import Any

from ejkernel_pallas.tpu.mosaic.launch import KernelCall, Operand
from ejkernel_pallas.tpu.tiled_attention.kernels.refs import gather_rows
from ejkernel_pallas.tpu.tiled_attention.plan import has_distinct_rows_and_heads, pair_coordinates
from ejkernel_pallas.tpu.tiled_attention.spec import TiledSpec

OperandsByName = dict[str, Operand]


def tile_pairs_call(
    name: str,
    kernel: Callable[..., None],
    refs: type,
    table: Any,
    spec: TiledSpec,
    inputs: OperandsByName,
    outputs: OperandsByName,
    scratch: dict[str, Any],
) -> KernelCall:
    """Returns the call of a kernel that computes one tile pair per grid step.

    Args:
        name: The kernel's name in traces and dumps.
        kernel: Called with the refs, and with the keywords `spec` and `distinct_rows_and_heads`.
        refs: The class of the refs.
        table: Tile pairs, int32 [B|1, H|1, steps]. With `TiledSpec.accumulates_for_keys` they are per KV head, and each
            is computed for every query head of the group.
        spec: The kernel's constants.
        inputs: The operands that it reads. An operand named as an output plus `_before` shares memory with that output.
        outputs: The operands that it writes.
        scratch: Scratch memory that is kept between steps.
    """
    distinct_rows_and_heads, batch = has_distinct_rows_and_heads(table), inputs["query"].array.shape[0]
    group = spec.group_size if spec.accumulates_for_keys else 1
    return KernelCall(
        name=name,
        kernel=functools.partial(kernel, spec=spec, distinct_rows_and_heads=distinct_rows_and_heads),
        refs=gather_rows(refs),
        grid=(batch, spec.num_heads // group, table.shape[2], *((group,) if spec.accumulates_for_keys else ())),
        num_parallel_axes=2,
        scalar_tables={"table": table.reshape(-1)},
        inputs=inputs,
        outputs=outputs,
        scratch=scratch,
        coordinate_map=functools.partial(
            pair_coordinates, distinct_rows_and_heads=distinct_rows_and_heads, group=group
        ),
        aliases={f"{key}_before": key for key in outputs if f"{key}_before" in inputs},
    )
