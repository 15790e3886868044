"""A ring of six simulated devices in a process of its own; fails by an exception."""

from tpu_races import found
from tpu_records import simulated
from tpu_rings import alike, answers, arrays, both

from ejkernel_pallas.tpu.ring_attention.kernels.remote_backward import backward
from ejkernel_pallas.tpu.ring_attention.kernels.remote_forward import forward

if __name__ == "__main__":
    given = arrays((1, 768, 1, 1, 32, 32))
    with simulated():
        got = both(forward, backward, 6, given)
    assert not found()
    alike(got, answers(6, given))
