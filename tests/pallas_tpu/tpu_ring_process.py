"""A ring of six simulated devices in a process of its own; fails by an exception."""

from test_tpu_ring_races import backward, forward, found
from tpu_records import simulated
from tpu_rings import alike, answers, arrays, both

if __name__ == "__main__":
    given = arrays((1, 768, 1, 1, 32, 32))
    with simulated():
        got = both(forward, backward, 6, given)
    assert not found()
    alike(got, answers(6, given))
