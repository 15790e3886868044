"""The kernels that send keys on by themselves, on simulated devices that watch for races."""

import os
import pathlib
import subprocess
import sys
from unittest import mock

import numpy as np
import pytest
from suite.processes import flags_for_devices
from tpu_races import found
from tpu_records import simulated
from tpu_rings import COTANGENTS, FORWARD, OUTPUTS, alike, answers, arrays, both, ids, record, spread

from ejkernel_pallas.tpu.ring_attention.kernels import remote_copies
from ejkernel_pallas.tpu.ring_attention.kernels.remote_backward import backward
from ejkernel_pallas.tpu.ring_attention.kernels.remote_forward import forward

CASES = {
    "striped": (arrays((1, 1024, 1, 1, 32, 48)), {"causal": True}),
    "both ways, segments, sinks, grouped heads": (
        arrays(
            (1, 512, 2, 1, 128, 128),
            softmax_aux=np.float32([0.5, -1.0]),
            q_segment_ids=ids(100, 300, 112),
            kv_segment_ids=ids(100, 300, 112),
        ),
        {"sliding_window": (100, 60), "logits_soft_cap": 2.0},
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_a_ring_of_four_devices_has_no_races(name):
    given, options = CASES[name]
    with simulated():
        got = both(forward, backward, 4, given, **options)
    assert not found()
    alike(got, answers(4, given, **options))


def test_a_ring_of_six_devices_has_no_races():
    """In a process with more host devices, hence threads, than the ring has: all of them wait for one another."""
    environment = {**os.environ, "XLA_FLAGS": flags_for_devices(12), "JAX_PLATFORMS": "cpu"}
    script = pathlib.Path(__file__).parents[1] / "tpu_ring_process.py"
    done = subprocess.run([sys.executable, script], env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-2000:]


def test_a_slot_written_too_early_is_reported_as_a_race():
    given = {name: x for name, x in arrays((1, 384, 1, 1, 32, 32)).items() if name not in COTANGENTS}
    with (
        mock.patch.object(remote_copies, "signal_free_slot"),
        mock.patch.object(remote_copies, "wait_free_slot"),
        simulated(),
    ):
        # The forward pass alone: its schedule of copies is what lacks the signals here.
        spread(lambda given: forward(record(given), FORWARD)[0], 3, given, OUTPUTS[0])
    assert found()
