"""Ring attention in Triton: every kind of step in Triton's interpreter, which is chosen at import."""

from triton_chips import run_interpreted


def test_every_kind_of_ring_step_matches_one_device():
    run_interpreted("ring_attention/ring_process.py")
