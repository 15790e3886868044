"""The calls of kernels whose grid is (batch row, head, tile pair)."""

import functools
from collections.abc import Callable
from typing import Any

from ejkernel_pallas.tpu.mosaic.launch import Call, Operand
from ejkernel_pallas.tpu.tiled_attention.spec import Spec
from ejkernel_pallas.tpu.tiled_attention.visits import distinct_rows, walk

Operands = dict[str, Operand]


def pairs_call(
    name: str,
    kernel: Callable[..., None],
    refs: type,
    table: Any,
    spec: Spec,
    inputs: Operands,
    outputs: Operands,
    scratch: dict[str, Any],
) -> Call:
    """The call of a kernel that walks tile pairs.

    Args:
        name: The kernel's, in traces and dumps.
        kernel: Called with the refs, and by keyword `spec` and `distinct`.
        refs: Their type.
        table: Tile pairs, int32 [B|1, H|1, steps]; those of KV heads, each for every head of a group, if `Spec.by_key`.
        spec: The kernel's constants.
        inputs: What it reads. One named as an output with `_before` behind it gives that its memory.
        outputs: What it writes.
        scratch: What it keeps between steps.
    """
    distinct, batch = distinct_rows(table), inputs["query"].array.shape[0]
    group = spec.group if spec.by_key else 1
    return Call(
        name=name,
        kernel=functools.partial(kernel, spec=spec, distinct=distinct),
        refs=refs,
        grid=(batch, spec.heads // group, table.shape[2], *((group,) if spec.by_key else ())),
        parallel=2,
        tables={"table": table.reshape(-1)},
        inputs=inputs,
        outputs=outputs,
        scratch=scratch,
        where=functools.partial(walk, distinct=distinct, group=group),
        aliases={f"{key}_before": key for key in outputs if f"{key}_before" in inputs},
    )
