"""Two processes of one program over `jax.distributed`, on this machine's CPU."""

import json
import os
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any


def run_two_processes(program: Path, arguments: tuple[list[str], list[str]], **variables: str) -> list[dict[str, Any]]:
    """Returns what each process prints last, as JSON.

    Args:
        program: The script; it gets a free port, the process's rank and its own arguments.
        arguments: The arguments of each process.
        **variables: Of the environment.
    """
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    running = [
        subprocess.Popen(
            [sys.executable, str(program), port, str(rank), *own],
            env={**os.environ, "JAX_PLATFORMS": "cpu", **variables},
            text=True,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
        )
        for rank, own in enumerate(arguments)
    ]
    try:
        outputs = [process.communicate(timeout=600) for process in running]
    finally:
        for process in running:
            process.kill()
    assert [process.returncode for process in running] == [0, 0], "\n".join(errors for _, errors in outputs)
    return [json.loads(output.splitlines()[-1]) for output, _ in outputs]
