"""A device helper: whole words of a packed matrix, dequantised to a tile in the matrix's order."""

import triton
import triton.language as tl

from ejkernel_triton.blocks import round_bfloat16
from ejkernel_triton.quantized_matmul.kernels.dequantize import dequantize_code


@triton.jit
def dequantize_words(packed, scale, offset, nf4_table, spec: tl.constexpr):
    """Dequantises all codes of words [R, W]: [R, W * CODES_PER_WORD] of WEIGHT_DTYPE, in the order of the matrix.

    A thread has all codes of its words, so interleaving them moves nothing between threads. They are rounded after
    that: Triton 3.9 does not compile a product whose operand is an interleaved tile itself.
    """
    code0 = dequantize_code(packed, scale, offset, nf4_table, 0, spec)
    code1 = dequantize_code(packed, scale, offset, nf4_table, 1, spec)
    code2 = dequantize_code(packed, scale, offset, nf4_table, 2, spec)
    code3 = dequantize_code(packed, scale, offset, nf4_table, 3, spec)
    if spec.CODES_PER_WORD == 8:
        code4 = dequantize_code(packed, scale, offset, nf4_table, 4, spec)
        code5 = dequantize_code(packed, scale, offset, nf4_table, 5, spec)
        code6 = dequantize_code(packed, scale, offset, nf4_table, 6, spec)
        code7 = dequantize_code(packed, scale, offset, nf4_table, 7, spec)
        even = tl.interleave(tl.interleave(code0, code4), tl.interleave(code2, code6))
        odd = tl.interleave(tl.interleave(code1, code5), tl.interleave(code3, code7))
        weights = tl.interleave(even, odd)
    else:
        weights = tl.interleave(tl.interleave(code0, code2), tl.interleave(code1, code3))
    if spec.WEIGHT_DTYPE == "float32":
        return weights
    elif spec.WEIGHT_DTYPE == "bfloat16":
        if spec.WIDEN_TO_FLOAT32:  # the interpreter's cast truncates
            weights = round_bfloat16(weights)
        return weights.to(tl.bfloat16)
    else:
        return weights.to(tl.float16)
