"""A benchmark's lines from several processes, which compile at the same time and use the device one after the other."""

import contextlib
import os
import queue
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator
from typing import Any


def lines_of_processes(num_processes: int) -> Iterator[str]:
    """What processes print that run this script again, each with `--part` and `--lock` added, as it comes."""
    environment = os.environ | {"XLA_PYTHON_CLIENT_PREALLOCATE": "false"}
    line_queue: queue.Queue[str | None] = queue.Queue()
    with tempfile.TemporaryDirectory() as folder, contextlib.ExitStack() as stack:
        for part in range(num_processes):
            command = [sys.executable, *sys.argv, "--lock", f"{folder}/lock", "--part", str(part)]
            process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment)
            threading.Thread(
                target=_forward_lines, args=(stack.enter_context(process).stdout, line_queue), daemon=True
            ).start()
        for _ in range(num_processes):
            yield from iter(line_queue.get, None)


def _forward_lines(stream: Any, line_queue: "queue.Queue[str | None]") -> None:
    """Puts lines into a queue, and None at their end."""
    for line in stream:
        line_queue.put(line)
    line_queue.put(None)
