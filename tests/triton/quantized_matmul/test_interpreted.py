"""Numbers of the quantised matmul's kernels, interpreted: formats and dtypes of scales."""

from triton_chips import assert_conforms, run_interpreted

CASES = "scales or mxfp4 or nvfp4 or symmetric or fp8"
"""e8m0, a tensor scale, affine scales that are not float16, codes without zeros, and fp8."""


def test_every_kind_of_scale_matches_the_reference():
    assert_conforms(["quantized_matmul"], f"test_value and ({CASES})")


def test_sums_in_the_matrix_order_are_invariant_to_the_batch_and_match_the_reference():
    assert_conforms(["quantized_matmul"], f"test_batch_invariance or test_value and ({CASES})", "triton_ordered")


def test_a_matrix_that_is_dequantised_first_gives_the_same_products():
    lines = run_interpreted("quantized_matmul/ordered_process.py").splitlines()
    assert len(lines) == 14
    assert [line for line in lines if line.split()[-2] != "True"] == []
