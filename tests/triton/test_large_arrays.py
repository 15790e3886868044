"""Arrays of more than 2^31 elements: no kernel computes an offset in 32 bits that does not fit into them."""

import json
import os
import subprocess
import sys
from pathlib import Path

SCRIPT = Path(__file__).with_name("large_process.py")


def run(*names):
    environment = {**os.environ, "TRITON_INTERPRET": "1"}
    command = [sys.executable, str(SCRIPT), *names]
    return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=600)


def test_offsets_of_the_last_program_of_every_kernel_fit():
    done = run()
    assert done.returncode == 0, done.stderr[-2000:]
    found = json.loads(done.stdout)
    assert len(found) >= 10
    for name, ran in found.items():
        assert any(large for _, large in ran), name


def test_an_offset_above_32_bits_is_detected():
    done = run("an overflow")
    assert "int32 overflow detected for operation mul" in done.stderr
