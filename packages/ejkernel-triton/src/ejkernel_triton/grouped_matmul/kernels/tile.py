"""Device helpers of the grouped-matmul kernels: fields of the tile list, and conversion of operands."""

import triton
import triton.language as tl

from ejkernel_triton.blocks import convert_to_dtype

# Fields of an entry of the tile list, `ejkernel.families.grouped_matmul.row_tiles`.
MATRIX_INDEX_FIELD = tl.constexpr(0)
FIRST_ROW_FIELD = tl.constexpr(1)
END_ROW_FIELD = tl.constexpr(2)
FIELDS_PER_ENTRY = tl.constexpr(4)


@triton.jit
def to_operand_dtype(x, spec: tl.constexpr):
    """Converts a tile to the operands' dtype of the product, in which 8-bit integers and floats are exact."""
    if x.dtype.primitive_bitwidth == 8:
        # Triton's interpreter converts integers to the bits of bfloat16.
        x = x.to(tl.float32)
    DTYPE: tl.constexpr = spec.OPERAND_DTYPE  # Triton 3.6 takes no field of a string as an argument
    return convert_to_dtype(x, DTYPE)


@triton.jit
def tile_indices_and_mask(start, BLOCK: tl.constexpr, SIZE: tl.constexpr):
    """Returns the indices of a tile from `start` on, and which of them are below SIZE: a constant if tiles end with
    it.
    """
    index = start + tl.arange(0, BLOCK)
    if SIZE % BLOCK == 0:
        return index, tl.full([BLOCK], True, tl.int1)
    else:
        return index, index < SIZE
