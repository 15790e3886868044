"""Mean pooling: the mean of every sequence, or of every chunk of it."""

import dataclasses
from collections.abc import Iterable
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Integer

from ejkernel.arithmetic import at_most
from ejkernel.families import segment_pooling
from ejkernel.families.segment_pooling import SegmentPooling, chunk_ranges
from ejkernel.modules.operations.cases import mean_pooling as cases
from ejkernel.modules.operations.configs import MeanPoolingConfig
from ejkernel.modules.operations.shared.conditions import cumulative_length_conditions
from ejkernel.modules.operations.shared.paged_arguments import set_canonical_fields
from ejkernel.modules.operations.shared.shapes import (
    as_count,
    check_cumulative_lengths,
    check_dtype,
    check_not_empty,
    check_shape,
    got,
)
from ejkernel.ops.argument_records import ArgumentRecord
from ejkernel.ops.execution.kernel import Kernel
from ejkernel.ops.model import Op, tolerances
from ejkernel.ops.operation import document_options, run_operation
from ejkernel.ops.values import Condition

DEFAULT_CHUNK_SIZE = 32
"""Tokens per chunk of values with heads, where the call does not say."""

AXES_BY_RANK = {2: "T C", 3: "B T C", 4: "B T H D"}


@document_options
def mean_pooling(
    x: Float[Array, "t d"] | Float[Array, "b t d"] | Float[Array, "b t h d"],
    cu_seqlens: Integer[Array, " n"] | None = None,
    *,
    chunk_size: int | None = None,
    platform: str | None = None,
    cfg: MeanPoolingConfig | None = None,
    mesh: jax.sharding.Mesh | None = None,
    in_specs: Any = None,
    out_specs: Any = None,
) -> Float[Array, "p d"] | Float[Array, "b p d"] | Float[Array, "b p h d"]:
    """Returns the mean over every sequence, or over every chunk of `chunk_size` tokens of it.

    Shape letters: B rows, T tokens, C or H x D channels, N sequences, M chunks. The last chunk of a sequence is the
    mean of the tokens it has. Pools without tokens are 0. The formula is in `ejkernel.families.segment_pooling`.

    Over devices, rows, heads and channels can be split, tokens cannot.

    Args:
        x: [B, T, C], [B, T, H, D], or packed sequences [T, C]; float16, bfloat16, float32 or float64.
        cu_seqlens: Cumulative lengths, int. With one row (or none), [N + 1] for N packed sequences; with B > 1,
            [B + 1], row b holding one sequence followed by padding. May be traced; an eager call waits for the values
            and checks them. Sequences may be empty.
        chunk_size: Tokens per chunk. None pools whole sequences, and chunks of 32 where x has heads.

    Returns:
        In x's dtype. Whole sequences: [B, C], or [N, C] of packed ones. Chunks: [B, M, C] or [B, M, H, D] with
        `M = ceil(T / chunk_size)`. Chunks of packed sequences: the same with one row, or [M, C] of [T, C]; each
        sequence is cut from its own first token on, `ceil(length / chunk_size)` chunks of each follow one another, and
        M is the most that there can be, `min(T, (T + N * (chunk_size - 1)) // chunk_size)`: those after the last
        are 0.

    Example:
        ```python
        import jax.numpy as jnp
        from ejkernel.modules import mean_pooling

        x = jnp.arange(12.0).reshape(6, 2)
        means = mean_pooling(x, jnp.array([0, 2, 2, 6]))  # sequences of 2, 0 and 4 tokens
        assert means.tolist() == [[1.0, 2.0], [0.0, 0.0], [7.0, 8.0]]
        ```
    """
    return run_operation(OP, locals())


class MeanPoolingArguments(ArgumentRecord, of=mean_pooling):
    """The arguments of a call of `mean_pooling`."""

    def __post_init__(self) -> None:
        if self.chunk_size is not None:
            set_canonical_fields(self, chunk_size=as_count("chunk_size", self.chunk_size, minimum=1))
        # The call goes on under a trace, where no values can be seen.
        if self.cu_seqlens is not None and jnp.ndim(self.x) in AXES_BY_RANK:
            rows, tokens = (1, self.x.shape[0]) if jnp.ndim(self.x) == 2 else self.x.shape[:2]
            check_cumulative_lengths("cu_seqlens", self.cu_seqlens, rows, tokens)


def validate(args: MeanPoolingArguments) -> None:
    """Raises ValueError for arrays that are wrong on every backend; the record has checked the rest."""
    axes = AXES_BY_RANK.get(jnp.ndim(args.x))
    if axes is None:
        raise ValueError(f"x: got {got(args.x)}, wants [B, T, C], [B, T, H, D] or, with cu_seqlens, [T, C]")
    sizes: dict[str, int] = {}
    check_shape("x", args.x, axes, sizes)
    check_not_empty("x", args.x, axes, "T")
    check_dtype("x", args.x, jnp.floating, "a floating dtype")
    if args.cu_seqlens is None:
        if "B" not in sizes:
            raise ValueError(f"cu_seqlens: got None with x of shape {tuple(args.x.shape)}, wants [N + 1] ints")
        return
    rows = sizes.get("B", 1)
    check_shape("cu_seqlens", args.cu_seqlens, "N+1" if rows == 1 else "B+1", {"B+1": rows + 1})
    check_dtype("cu_seqlens", args.cu_seqlens, jnp.integer, "an integer dtype")
    if args.cu_seqlens.shape[0] < 2:
        raise ValueError(f"cu_seqlens: got shape {args.cu_seqlens.shape}, wants [N + 1] with at least 1 sequence")


def conditions(args: MeanPoolingArguments) -> Iterable[Condition]:
    """Yields the condition that cumulative lengths fit the rows."""
    if args.cu_seqlens is not None and jnp.ndim(args.x) in AXES_BY_RANK:
        rows, tokens = (1, args.x.shape[0]) if jnp.ndim(args.x) == 2 else args.x.shape[:2]
        yield from cumulative_length_conditions("cu_seqlens", args.cu_seqlens, rows, tokens)


def lower(args: MeanPoolingArguments) -> SegmentPooling:
    """Returns the pooling record of a call."""
    values, size = _with_row_and_head_axes(args.x), _chunk_size(args)
    rows, tokens = values.shape[:2]
    whole = SegmentPooling(values=values, chunk_size=tokens if size is None else at_most(size, tokens))
    if args.cu_seqlens is None:
        return whole
    bounds = args.cu_seqlens.astype(jnp.int32)
    if rows > 1:
        return dataclasses.replace(whole, lengths=jnp.clip(jnp.diff(bounds), 0, tokens))
    bounds = jnp.clip(bounds, 0, tokens)
    ranges = (
        jnp.stack([bounds[:-1], bounds[1:]], axis=1)
        if size is None
        else chunk_ranges(bounds, at_most(size, tokens), tokens)
    )
    return dataclasses.replace(whole, ranges=ranges)


def finish(args: MeanPoolingArguments, output: jax.Array) -> jax.Array:
    """Returns what the public function returns, from pools [B, M, H, D]."""
    if args.x.ndim == 4:
        return output
    output = output[:, :, 0]
    if args.x.ndim == 2 or (_chunk_size(args) is None and _is_packed(args)):
        return output[0]
    return output[:, 0] if _chunk_size(args) is None else output


def axes_of(args: MeanPoolingArguments) -> dict[str, str]:
    """Returns the axis letters of x and of what comes back."""
    if getattr(args.x, "ndim", None) not in (2, 3):
        return {}
    whole = _chunk_size(args) is None
    if args.x.ndim == 2 or (whole and _is_packed(args)):
        return {"x": "t d" if args.x.ndim == 2 else "b t d", "output": "p d"}
    return {"x": "b t d", "output": "b d" if whole else "b p d"}


def _with_row_and_head_axes(x: jax.Array) -> jax.Array:
    """Returns [B, T, H, D] with a row and a head where x has none."""
    return x if x.ndim == 4 else x[None, :, None] if x.ndim == 2 else x[:, :, None]


def _chunk_size(args: MeanPoolingArguments) -> int | None:
    """Returns tokens per chunk; None for whole sequences."""
    return DEFAULT_CHUNK_SIZE if args.chunk_size is None and args.x.ndim == 4 else args.chunk_size


def _is_packed(args: MeanPoolingArguments) -> bool:
    return args.cu_seqlens is not None and (args.x.ndim == 2 or args.x.shape[0] == 1)


class MeanPooling(Kernel[MeanPoolingConfig, Array]):
    """Wraps `mean_pooling` in an object that an `Executor` can call."""


OP = Op(
    arguments=MeanPoolingArguments,
    family=segment_pooling.FAMILY,
    validate=validate,
    lower=lower,
    conditions=conditions,
    cases=cases.cases(MeanPoolingArguments),
    tolerance=tolerances(float64=1e-12, float32=2e-6, bfloat16=(1e-2, 2e-3), float16=(2e-3, 2e-4)),
    make_inputs=cases.make_inputs,
    axes={"x": "b t h d"},
    finish=finish,
    axes_of=axes_of,
)
MeanPooling.op = OP
