"""The compile-time constants of the quantised matmul's kernels."""

import dataclasses

from ejkernel.families.quantized_matmul import QuantizedMatmul
from ejkernel.ops.device import current_device
from ejkernel.planning.quantized_formats import WORD
from ejkernel_triton.launch import interpreting
from ejkernel_triton.quantized_matmul.config import QuantizedTiles


@dataclasses.dataclass(frozen=True, kw_only=True)
class QuantizedSpec:
    """Constants of the kernels.

    Attributes:
        M: Rows of x.
        R: Rows of the packed matrix.
        W: Words per such row.
        GROUPS: Scales per such row.
        GROUP: Codes per scale.
        PER: Codes per word: 4 or 8.
        BITS: Bits per code.
        AFFINE: Whether codes are integers.
        CENTER: The zero that all codes share; 0 if each group has its own.
        TABLE: Whether codes are indices into a table.
        EXPONENT: Whether scales are e8m0 in 8 bits.
        SCALE8: Whether scales are e4m3 in 8 bits.
        BLOCK_M: Rows of x per tile.
        BLOCK_R: Rows of the packed matrix per tile.
        BLOCK_W: Words per tile.
        SPLITS: Split-K: programs that the contracted axis is split over.
        OPERAND: Dtype of the product's operands.
        PRECISION: How Triton multiplies float32 tiles: "ieee" or "tf32x3".
        WIDEN: Whether operands are converted to float32 first: the interpreter multiplies the bits of bfloat16.
    """

    M: int
    R: int
    W: int
    GROUPS: int
    GROUP: int
    PER: int
    BITS: int
    AFFINE: bool
    CENTER: int
    TABLE: bool
    EXPONENT: bool
    SCALE8: bool
    BLOCK_M: int
    BLOCK_R: int
    BLOCK_W: int
    SPLITS: int
    OPERAND: str
    PRECISION: str
    WIDEN: bool


def make_spec(record: QuantizedMatmul, config: QuantizedTiles) -> QuantizedSpec:
    """Returns the constants of a record's kernels on the device in use."""
    form, (rows, words) = record.format, record.packed.shape
    return QuantizedSpec(
        M=record.x.shape[0],
        R=rows,
        W=words,
        GROUPS=record.scales.shape[1],
        GROUP=form.group_size,
        PER=WORD // form.bits,
        BITS=form.bits,
        AFFINE=form.integers,
        CENTER=form.center or 0,
        TABLE=form.mode == "nf4",
        EXPONENT=form.exponents,
        SCALE8=form.mode.startswith("nv"),
        BLOCK_M=config.block_m,
        BLOCK_R=config.block_r,
        BLOCK_W=config.block_w,
        SPLITS=config.splits,
        OPERAND=record.x.dtype.name,
        PRECISION="tf32x3" if current_device().vendor == "nvidia" else "ieee",
        WIDEN=interpreting(),
    )
