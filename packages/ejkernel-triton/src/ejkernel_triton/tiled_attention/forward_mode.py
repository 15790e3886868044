"""Forward pass of tiled softmax attention with its tangents, in Triton."""

import dataclasses
from collections.abc import Iterable, Mapping

import jax
import jax.numpy as jnp
from jax import lax

from ejkernel.families.tiled_attention import SoftmaxResiduals, TiledAttention
from ejkernel.families.tiled_attention.tile_pairs import padding_as_segments, tiles
from ejkernel.ops.device import current_device
from ejkernel_triton.launch import ShapeDtype, launch
from ejkernel_triton.tiled_attention.config import Tile, TritonForward, matrix_unit
from ejkernel_triton.tiled_attention.plan import kernel_operands, plan_key_blocks
from ejkernel_triton.tiled_attention.spec import (
    has_modified_scores,
    has_segments_or_positions,
    longest_padded_row,
    query_tile_constants,
)

Results = tuple[jax.Array, SoftmaxResiduals]

LONGEST_ROW, LONGEST_FLOAT32_ROW = 128, 64
"""Elements of the longest row of queries or values that two accumulators leave registers for."""
OPERANDS = ("query", "key", "value")
"""The record fields whose tangents the kernel takes."""


@dataclasses.dataclass(frozen=True)
class MovedOperands:
    """Which operands have tangents; a constant of the kernel."""

    QUERY: bool
    KEY: bool
    VALUE: bool


def limits(record: TiledAttention, fields: frozenset[str]) -> Iterable[str]:
    """Yields why the kernel cannot compute the tangents of a call.

    Args:
        record: The canonical arguments.
        fields: The record fields with tangents.
    """
    if others := sorted(fields - {*OPERANDS}):
        yield f"tangents of {', '.join(others)}: the kernel takes those of query, key and value"
    if not record.normalize_output:
        yield "normalize_output=False: the maximum, which the output is relative to, has a tangent"
    if record.pattern is not None:
        yield "a pattern: the kernel reads consecutive key tiles"
    if record.query.dtype == jnp.float32 and record.precision == lax.Precision.HIGHEST:
        yield "precision HIGHEST of float32: products without the matrix unit leave no registers"
    longest = LONGEST_FLOAT32_ROW if record.query.dtype == jnp.float32 else LONGEST_ROW
    if longest_padded_row(record) > longest:
        yield f"head size {max(record.query.shape[3], record.value.shape[3])} is above {longest}"


def forward_mode(
    record: TiledAttention, tangents: Mapping[str, jax.Array], params: TritonForward
) -> tuple[Results, Results]:
    """Returns output and residuals of a record, and the tangents of both.

    Args:
        record: The canonical arguments, for which `limits` yields nothing.
        tangents: Tangents of query, key and value, in their shapes and dtypes; zero where left out.
        params: Not used: tiles hold tangents next to values, so that those of the forward pass do not fit.

    Returns:
        `(output [B, T, H, Dv], residuals)` and the tangents of both.
    """
    from ejkernel_triton.tiled_attention.kernels.flash_fwd_tangents import flash_fwd_tangents_kernel

    record = padding_as_segments(record)
    (b, t, h, _), dv = record.query.shape, record.value.shape[3]
    tile = choose_tile(record)
    blocks, q_tiles = plan_key_blocks(record, tile.stationary_rows, tile.streamed_rows), tiles(t, tile.stationary_rows)
    output, statistic = ShapeDtype((b, t, h, dv), record.query.dtype), ShapeDtype((b, h, t), jnp.float32)
    results = launch(
        flash_fwd_tangents_kernel,
        (*kernel_operands(record, blocks), *(tangents.get(name) for name in OPERANDS)),
        [output, statistic, output, statistic],
        batch=b,
        grid=q_tiles * h * b,
        num_warps=tile.warps,
        num_stages=tile.stages,
        constants={
            **query_tile_constants(record, tile),
            "moved": MovedOperands(*(name in tangents for name in OPERANDS)),
            "NUM_TILES": q_tiles,
            "REVERSE_TILES": record.causal,
        },
    )
    return _results(*results[:2]), _results(*results[2:])


def choose_tile(record: TiledAttention) -> Tile:
    """Returns the tile of a record: a program keeps a query tile with its tangent, and streams keys and values with
    theirs.
    """
    unit = matrix_unit(current_device(), record)
    if unit == "interpreter":
        return Tile(32, 32, 4, 1)
    if record.query.dtype == jnp.float32:
        return Tile(64, 16, 8, 1)
    if unit in ("hopper", "blackwell"):
        # Long rows spill 8 bytes with the longer tile, which is 4 to 6% faster on an H200, and more with segments.
        short = longest_padded_row(record) > 64 and (has_segments_or_positions(record) or has_modified_scores(record))
        return Tile(128, 32, 8, 3) if short else Tile(128, 64, 8, 2)
    stages = 1 if unit == "amd" else 2
    return Tile(64, 32, 4, stages) if longest_padded_row(record) <= 64 else Tile(64, 32, 8, stages)


def _results(output: jax.Array, lse: jax.Array) -> Results:
    return output, SoftmaxResiduals(lse=lse, row_max=None, row_argmax=None)
