"""The shared code of `kernel_delta_attention` and `gated_delta_rule`, which differ in the names of their arguments."""

import dataclasses
from typing import Any

import jax

from ejkernel.families.linear_recurrence import LinearRecurrence
from ejkernel.modules.operations.shared.recurrences import (
    check_floating,
    check_log_gate,
    check_packing,
    check_parents_shape_and_dtype,
    check_segments,
    check_tokens,
    has_shared_queries,
    l2_normalised,
    tree_fields,
    with_channel_axis,
)
from ejkernel.ops.model import Op
from ejkernel.types.integers import exact_ids


def check_delta_rule_arguments(args: Any, rows: str = "B ") -> dict[str, int]:
    """Checks query, key, value, beta and decay, and returns the sizes of their axes.

    Args:
        args: Record with the five.
        rows: The axes in front of T.

    Raises:
        ValueError: One of them is wrong.
    """
    sizes = check_tokens(args, rows, allow_more_value_heads=True)
    if args.beta is None:
        raise ValueError(f"beta: got None, wants [{', '.join(f'{rows}T H'.split())}]")
    check_floating("beta", args.beta, f"{rows}T H", sizes)
    check_log_gate("decay", args.decay, f"{rows}T H", sizes)
    return sizes


def validate(args: Any) -> None:
    """Raises ValueError for arrays of either operation that are wrong on every backend."""
    sizes = check_delta_rule_arguments(args)
    check_segments(args, sizes)
    if args.cu_seqlens is not None:
        check_packing(args.cu_seqlens, sizes)
    rows = "B" if args.cu_seqlens is None else "N"
    check_floating("initial_state", args.initial_state, f"{rows} H K V", sizes)
    check_parents_shape_and_dtype(args, sizes)


def lower(args: Any) -> LinearRecurrence:
    """Returns the family's record of a call of either operation."""
    return delta_rule_record(args, args.softmax_scale, **_segment_and_state_fields(args))


def _segment_and_state_fields(args: Any) -> dict[str, Any]:
    """Returns the record's fields of segments and states: of rows, of segments of rows, or of packed sequences."""
    parents = tree_fields(args, args.return_state)
    if args.cu_seqlens is not None:
        return {"cu_seqlens": args.cu_seqlens, "sequence_state": args.initial_state, **parents}
    ids = None if args.seg_ids is None else exact_ids("seg_ids", args.seg_ids)
    return {"segment_ids": ids, "initial_state": args.initial_state, **parents}


def axes_of(args: Any) -> dict[str, str]:
    """Returns the axis letters of a call whose value heads share queries and keys."""
    return {"query": "b t g k", "value": "b t h v"} if has_shared_queries(args) else {}


def axes_of_packed_call(args: Any) -> dict[str, str]:
    """Returns the axes of the arguments of a packed call, as `axes_of` does without the axis of rows."""
    return {name: letters.removeprefix("b ") for name, letters in axes_of(args).items()}


def delta_rule_record(args: Any, softmax_scale: float | None = None, **fields: Any) -> LinearRecurrence:
    """Returns the family's record of a call.

    Args:
        args: Record with query, key, value, beta, decay and use_qk_l2norm.
        softmax_scale: Factor on the output; None means `K ** -0.5`.
        **fields: Further fields.
    """
    query, key = (l2_normalised(x) if args.use_qk_l2norm else x for x in (args.query, args.key))
    return LinearRecurrence(
        query=query,
        key=key,
        value=args.value,
        softmax_scale=args.query.shape[-1] ** -0.5 if softmax_scale is None else softmax_scale,
        decay=None if args.decay is None else with_channel_axis(args.decay, args.beta),
        beta=args.beta,
        **fields,
    )


def finish(args: Any, output: tuple[jax.Array, jax.Array]) -> Any:
    """Returns the public result: with the states if asked for."""
    return output if args.return_state else output[0]


def configure(op: Op, args: Any, cfg: Any) -> Any:
    """Returns the configuration that a call's own `chunk_size` and `use_chunked` ask for.

    Args:
        op: The operation.
        args: Record with whichever of the two the operation has.
        cfg: The call's configuration, or None.
    """
    size = getattr(args, "chunk_size", None) if getattr(args, "use_chunked", True) else 1
    return cfg if size is None else dataclasses.replace(cfg or op.config(), chunk_size=size)
