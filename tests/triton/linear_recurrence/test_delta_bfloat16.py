"""bfloat16 in Triton's interpreter, which computes with its bits: kernels compute in float32."""

from triton_chips import run_interpreted


def test_gradients_of_the_delta_rule_over_several_chunks():
    """A negated 16-bit tile gave gradients of another sign and size; one that a kernel negates is an error."""
    said = run_interpreted("linear_recurrence/delta_bfloat16_process.py")
    assert "same" in said
    assert "negative of bfloat16: got a 16-bit tile, wants float32" in said
