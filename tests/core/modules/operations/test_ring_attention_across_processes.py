"""`ring_attention` over a ring whose devices belong to two processes, over `jax.distributed`."""

from pathlib import Path

from suite.processes import flags_for_devices
from two_processes import run_two_processes

PROGRAM = Path(__file__).with_name("ring_process.py")


def test_values_and_gradients_are_those_of_one_device():
    for found in run_two_processes(PROGRAM, ([], []), XLA_FLAGS=flags_for_devices(2)):
        assert (found["devices"], found["own"]) == (4, 2)
        assert set(found["errors"]) == {"output", "query", "key", "value", "sinks", "bias"}
        assert all(parts == 2 for parts in found["parts"].values())
        assert all(error < 2e-5 for error in found["errors"].values()), found["errors"]
