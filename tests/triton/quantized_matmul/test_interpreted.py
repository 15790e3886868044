"""Numbers of the quantised matmul's kernels, interpreted: formats and dtypes of scales."""

from triton_chips import assert_conforms

CASES = "scales or mxfp4 or nvfp4 or symmetric or fp8"
"""e8m0, a tensor scale, affine scales that are not float16, codes without zeros, and fp8."""


def test_every_kind_of_scale_matches_the_reference():
    assert_conforms(["quantized_matmul"], f"test_value and ({CASES})")
