"""Calls of kernels whose grid is (batch row, head, tile pair)."""

import functools
from collections.abc import Callable
from typing import Any

from ejkernel_pallas.tpu.mosaic.launch import KernelCall, Operand
from ejkernel_pallas.tpu.tiled_attention.plan import distinct_rows, pair_coordinates
from ejkernel_pallas.tpu.tiled_attention.spec import TiledSpec

Operands = dict[str, Operand]


def pairs_call(
    name: str,
    kernel: Callable[..., None],
    refs: type,
    table: Any,
    spec: TiledSpec,
    inputs: Operands,
    outputs: Operands,
    scratch: dict[str, Any],
) -> KernelCall:
    """Returns the call of a kernel that computes one tile pair per grid step.

    Args:
        name: The kernel's name in traces and dumps.
        kernel: Called with the refs, and by keyword `spec` and `distinct`.
        refs: Their type.
        table: Tile pairs, int32 [B|1, H|1, steps]; if `TiledSpec.by_key` those of KV heads, each of which every query
            head of the group computes.
        spec: The kernel's constants.
        inputs: What it reads. One named as an output with `_before` behind it gives that its memory.
        outputs: What it writes.
        scratch: What it keeps between steps.
    """
    distinct, batch = distinct_rows(table), inputs["query"].array.shape[0]
    group = spec.group_size if spec.by_key else 1
    return KernelCall(
        name=name,
        kernel=functools.partial(kernel, spec=spec, distinct=distinct),
        refs=refs,
        grid=(batch, spec.heads // group, table.shape[2], *((group,) if spec.by_key else ())),
        parallel=2,
        tables={"table": table.reshape(-1)},
        inputs=inputs,
        outputs=outputs,
        scratch=scratch,
        where=functools.partial(pair_coordinates, distinct=distinct, group=group),
        aliases={f"{key}_before": key for key in outputs if f"{key}_before" in inputs},
    )
