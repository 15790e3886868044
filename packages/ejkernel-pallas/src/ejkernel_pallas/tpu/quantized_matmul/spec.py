"""The compile-time constants of a quantized-matmul kernel: everything about a record except arrays and traced
numbers.
"""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from ejkernel.arithmetic import cdiv
from ejkernel.families.quantized_matmul import QuantizedMatmul
from ejkernel.ops.device import current_device
from ejkernel.planning.precision import product_precision
from ejkernel.planning.quantized_formats import WORD_BITS, Format
from ejkernel_pallas.tpu.generations import has_256_wide_mxu
from ejkernel_pallas.tpu.mosaic.vectors import LANES
from ejkernel_pallas.tpu.quantized_matmul.config import ROW_PADDING_MULTIPLE, TpuQuantized

MAX_PAIR_ROWS = 64
"""Rows of x for which codes are dequantized in pairs: each product then has twice as many rows, half of which count."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class QuantizedSpec:
    """The compile-time constants of a kernel.

    Attributes:
        padded_rows: M, rounded up to whole registers of the narrowest dtype; in a `batch_invariant` block, to whole
            tiles.
        packed_rows: The number of rows of the packed matrix.
        words_per_row: Words per row of the packed matrix.
        groups_per_row: Scales per row of the packed matrix.
        format: Mode, bits and group size.
        blocks: Tiles.
        operand_dtype: Dtype of the products' operands.
        output_dtype: Dtype of the output: x's, or float32 if it is still to be multiplied by a tensor scale.
        precision: Precision of the products.
        rows_and_words_per_product: Rows of words, and words, per product: the width of the matrix unit. More values
            would not fit registers.
        unpacks_pairs: Whether two codes of a word are dequantized together, as the bfloat16 pair of a 32-bit register
            element: see `dequantize.dequantize_pair`.
    """

    padded_rows: int
    packed_rows: int
    words_per_row: int
    groups_per_row: int
    format: Format
    blocks: TpuQuantized
    operand_dtype: Any
    output_dtype: Any
    precision: lax.Precision | None
    rows_and_words_per_product: int
    unpacks_pairs: bool

    @property
    def codes_per_word(self) -> int:
        """Returns the number of codes per word."""
        return WORD_BITS // self.format.bits

    @property
    def words_per_group(self) -> int:
        """Returns the number of words whose codes share a scale."""
        return self.format.group_size // self.codes_per_word

    @property
    def tiles_per_scale_block(self) -> int:
        """Returns the number of tiles of words whose scales are in one block of 128."""
        return max(1, LANES * self.words_per_group // self.blocks.block_w)


def make_spec(record: QuantizedMatmul, config: TpuQuantized) -> QuantizedSpec:
    """Returns the constants of a record's kernels with given tiles.

    Raises:
        ValueError: A block size is not valid for a kernel.
    """
    quantized_format = record.format
    most = LANES * quantized_format.group_size * quantized_format.bits // WORD_BITS
    for name, step in (("block_m", ROW_PADDING_MULTIPLE), ("block_r", LANES), ("block_w", LANES)):
        if getattr(config, name) % step or getattr(config, name) <= 0:
            raise ValueError(f"cfg: got {name}={getattr(config, name)}, wants a multiple of {step}")
    if config.block_w > most and record.scales.shape[1] > LANES:
        config = dataclasses.replace(config, block_w=most)
    requested_precision = product_precision(record.x.dtype, record.precision)
    exact = requested_precision in (lax.Precision.HIGH, lax.Precision.HIGHEST)
    wide = record.x.dtype == jnp.float32
    multiple = config.block_m if config.batch_invariant else ROW_PADDING_MULTIPLE
    padded_rows = cdiv(record.x.shape[0], multiple) * multiple
    has_wide_mxu = has_256_wide_mxu(current_device().kind)
    return QuantizedSpec(
        padded_rows=padded_rows,
        packed_rows=record.packed.shape[0],
        words_per_row=record.packed.shape[1],
        groups_per_row=record.scales.shape[1],
        format=quantized_format,
        blocks=config,
        operand_dtype=record.x.dtype,
        output_dtype=record.x.dtype if record.tensor_scale is None else jnp.dtype(jnp.float32),
        # Mosaic has products in one bfloat16 pass and in six. One pass is exact for bfloat16 operands.
        precision=lax.Precision.HIGHEST if wide and exact else requested_precision if wide else None,
        rows_and_words_per_product=2 * LANES if has_wide_mxu else LANES,
        # The chips with these matrix units are those whose vector units compute in bfloat16.
        # Both values and their products are rounded differently in pairs.
        unpacks_pairs=has_wide_mxu
        and not config.batch_invariant
        and quantized_format.integers
        and quantized_format.bits == 4
        and record.x.dtype == jnp.bfloat16
        and padded_rows <= min(MAX_PAIR_ROWS, config.block_m),
    )


def bitcast_float16_scales(scales: jax.Array) -> jax.Array:
    """Returns scales in the dtype that the kernels read: float16 as integers of the same bits, others unchanged."""
    if scales.dtype == jnp.float16:
        return lax.bitcast_convert_type(scales, jnp.uint16)
    return scales
