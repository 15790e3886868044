"""The same bits whatever Python hashes names to, and on whichever device a call runs."""

import os
import subprocess
import sys
from pathlib import Path

SCRIPT = Path(__file__).with_name("same_bits_process.py")
# More on a GPU, where another process takes the kernels that the chip has confirmed.
NAMES = os.environ.get("EJKERNEL_SAME_BITS", "gated_delta_rule kernel_delta_attention state_space_v1").split()


def digests(seed: int, *words: str) -> list[str]:
    """What a process of its own prints, with that seed of Python's hashes."""
    environment = {**os.environ, "PYTHONHASHSEED": str(seed)}
    done = subprocess.run(
        [sys.executable, str(SCRIPT), *NAMES, *words], capture_output=True, text=True, check=True, env=environment
    )
    return done.stdout.splitlines()


def test_hash_seed_and_device_change_no_bit() -> None:
    one = digests(1)
    assert len({line.split()[1] for line in one}) == len(NAMES)
    assert digests(2, "last") == one


def test_alibi_over_pages_has_the_bits_of_a_sequence_alone() -> None:
    """With the options that users compile with: those of the tests round otherwise."""
    environment = {**os.environ, "XLA_FLAGS": ""}
    script = SCRIPT.with_name("alibi_bits_process.py")
    done = subprocess.run([sys.executable, str(script)], capture_output=True, text=True, check=True, env=environment)
    assert done.stdout.split() == ["True"]
