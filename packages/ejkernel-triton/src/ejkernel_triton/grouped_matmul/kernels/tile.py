"""What the grouped-matmul kernels share: fields of the tile list, and conversion of operands to the product's dtype."""

import triton
import triton.language as tl

# Fields of an entry of the tile list, `ejkernel.families.grouped_matmul.row_tiles`.
MATRIX = tl.constexpr(0)
ROW = tl.constexpr(1)
END = tl.constexpr(2)
FIELDS = tl.constexpr(4)


@triton.jit
def operand(x, spec: tl.constexpr):
    """Returns a tile in the operands' dtype of the product; 8-bit integers and floats are exact in it."""
    if x.dtype.primitive_bitwidth == 8:
        # Triton's interpreter converts integers to bfloat16 as the integers that hold its bits.
        x = x.to(tl.float32)
    if spec.OPERAND == "float32":
        return x.to(tl.float32)
    elif spec.OPERAND == "bfloat16":
        return x.to(tl.bfloat16)
    else:
        return x.to(tl.float16)


@triton.jit
def bounded(start, BLOCK: tl.constexpr, SIZE: tl.constexpr):
    """Returns indices of a tile from `start` on, and which of them are below SIZE: all, where tiles end with it."""
    index = start + tl.arange(0, BLOCK)
    if SIZE % BLOCK == 0:
        return index, tl.full([BLOCK], True, tl.int1)
    else:
        return index, index < SIZE
