"""The compile-time constants of the quantised matmul's kernels."""

import dataclasses

from ejkernel.families.quantized_matmul import QuantizedMatmul
from ejkernel.ops.device import current_device
from ejkernel.planning.quantized_formats import WORD_BITS
from ejkernel_triton.launch import is_interpreting
from ejkernel_triton.quantized_matmul.config import QuantizedTiles


@dataclasses.dataclass(frozen=True, kw_only=True)
class QuantizedSpec:
    """Constants of the kernels.

    Attributes:
        M: Rows of x.
        R: Rows of the packed matrix.
        W: Words per such row.
        SCALES_PER_ROW: Scales per such row.
        CODES_PER_SCALE: Codes per scale.
        CODES_PER_WORD: Codes per word: 4 or 8.
        BITS_PER_CODE: Bits per code.
        CODES_ARE_INTEGERS: Whether codes are integers.
        SHARED_ZERO_POINT: The zero that all codes share; 0 if each group has its own.
        HAS_CODE_TABLE: Whether codes are indices into a table.
        SCALES_ARE_E8M0: Whether scales are e8m0 in 8 bits.
        SCALES_ARE_E4M3: Whether scales are e4m3 in 8 bits.
        BLOCK_M: Rows of x per tile.
        BLOCK_R: Rows of the packed matrix per tile.
        BLOCK_W: Words per tile.
        NUM_SPLITS: Split-K: programs that the contracted axis is split over.
        OPERAND_DTYPE: Dtype of the product's operands.
        PRECISION: How Triton multiplies float32 tiles: "ieee" or "tf32x3".
        WIDEN_TO_FLOAT32: Whether operands are converted first: the interpreter multiplies the bits of bfloat16.
    """

    M: int
    R: int
    W: int
    SCALES_PER_ROW: int
    CODES_PER_SCALE: int
    CODES_PER_WORD: int
    BITS_PER_CODE: int
    CODES_ARE_INTEGERS: bool
    SHARED_ZERO_POINT: int
    HAS_CODE_TABLE: bool
    SCALES_ARE_E8M0: bool
    SCALES_ARE_E4M3: bool
    BLOCK_M: int
    BLOCK_R: int
    BLOCK_W: int
    NUM_SPLITS: int
    OPERAND_DTYPE: str
    PRECISION: str
    WIDEN_TO_FLOAT32: bool


def make_spec(record: QuantizedMatmul, config: QuantizedTiles) -> QuantizedSpec:
    """Returns the constants of a record's kernels on the device in use."""
    quantized_format, (rows, words) = record.format, record.packed.shape
    return QuantizedSpec(
        M=record.x.shape[0],
        R=rows,
        W=words,
        SCALES_PER_ROW=record.scales.shape[1],
        CODES_PER_SCALE=quantized_format.group_size,
        CODES_PER_WORD=WORD_BITS // quantized_format.bits,
        BITS_PER_CODE=quantized_format.bits,
        CODES_ARE_INTEGERS=quantized_format.integers,
        SHARED_ZERO_POINT=quantized_format.symmetric_zero_point or 0,
        HAS_CODE_TABLE=quantized_format.mode == "nf4",
        SCALES_ARE_E8M0=quantized_format.has_power_of_two_scales,
        SCALES_ARE_E4M3=quantized_format.mode.startswith("nv"),
        BLOCK_M=config.block_m,
        BLOCK_R=config.block_r,
        BLOCK_W=config.block_w,
        NUM_SPLITS=config.splits,
        OPERAND_DTYPE=record.x.dtype.name,
        PRECISION="tf32x3" if current_device().vendor == "nvidia" else "ieee",
        WIDEN_TO_FLOAT32=is_interpreting(),
    )
