"""Blocks that name a device change nothing for what runs outside of them."""

import subprocess
import sys

PROGRAM = """
import jax, jax.numpy as jnp
import ejkernel.ops
from ejkernel.ops import DeviceInfo, target_device

traces = []

@jax.jit
def unrelated(x):
    traces.append("unrelated")
    return x + 1

x = jnp.ones(3)
unrelated(x)
with target_device(DeviceInfo(platform="tpu", vendor="google", kind="TPU v5e")):
    pass
unrelated(x)
with target_device(DeviceInfo(platform="tpu", vendor="google", kind="TPU v5e")):
    inside = ejkernel.ops.current_device()
unrelated(x)
assert inside.kind == "TPU v5e" and ejkernel.ops.current_device().platform == "cpu"
print(len(traces))
"""


def test_an_empty_target_device_block_retraces_no_function():
    """In a process of its own: the first block of a process was the one that did."""
    done = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True, check=True, timeout=600)

    assert done.stdout.split() == ["1"]
