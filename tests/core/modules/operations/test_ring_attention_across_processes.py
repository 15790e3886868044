"""`ring_attention` over a ring whose devices belong to two processes, over `jax.distributed`."""

import json
import os
import socket
import subprocess
import sys
from pathlib import Path

PROGRAM = Path(__file__).with_name("ring_process.py")


def test_values_and_gradients_are_those_of_one_device():
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    flags = f"{os.environ.get('XLA_FLAGS', '')} --xla_force_host_platform_device_count=2"  # of two, the last counts
    environment = {**os.environ, "JAX_PLATFORMS": "cpu", "XLA_FLAGS": flags}
    running = [
        subprocess.Popen(
            [sys.executable, str(PROGRAM), port, str(rank)],
            env=environment,
            text=True,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
        )
        for rank in (0, 1)
    ]
    try:
        outputs = [process.communicate(timeout=600) for process in running]
    finally:
        for process in running:
            process.kill()
    assert [process.returncode for process in running] == [0, 0], "\n".join(errors for _, errors in outputs)
    for output, _ in outputs:
        found = json.loads(output.splitlines()[-1])
        assert (found["devices"], found["own"]) == (4, 2)
        assert set(found["errors"]) == {"output", "query", "key", "value", "sinks", "bias"}
        assert all(parts == 2 for parts in found["parts"].values())
        assert all(error < 2e-5 for error in found["errors"].values()), found["errors"]
