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


def lines(count: int) -> Iterator[str]:
    """What processes print that run this script again, each with `--part` and `--lock` added, as it comes."""
    environment = os.environ | {"XLA_PYTHON_CLIENT_PREALLOCATE": "false"}
    found: queue.Queue[str | None] = queue.Queue()
    with tempfile.TemporaryDirectory() as folder, contextlib.ExitStack() as stack:
        for part in range(count):
            command = [sys.executable, *sys.argv, "--lock", f"{folder}/lock", "--part", str(part)]
            process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment)
            threading.Thread(target=_hand_on, args=(stack.enter_context(process).stdout, found), daemon=True).start()
        for _ in range(count):
            yield from iter(found.get, None)


def _hand_on(stream: Any, found: "queue.Queue[str | None]") -> None:
    """Puts lines into a queue, and None at their end."""
    for line in stream:
        found.put(line)
    found.put(None)
