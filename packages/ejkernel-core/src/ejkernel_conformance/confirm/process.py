"""A worker process, seen from the one that started it."""

import contextlib
import json
import os
import select
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, TextIO

QUICK_XLA = "--xla_gpu_autotune_level=0"
"""XLA's search for its fastest products takes most of the time of a test on a GPU, and says nothing about a kernel."""


WORKER = ("-m", "ejkernel_conformance.confirm.worker")


class EndedError(Exception):
    """The process ended, or was ended for being silent for too long; the message says how."""


def environment(given: Mapping[str, str]) -> dict[str, str]:
    """Returns the environment of workers: they share a GPU, and each compiles on one processor."""
    defaults = {"XLA_PYTHON_CLIENT_PREALLOCATE": "false", "XLA_FLAGS": QUICK_XLA, "OMP_NUM_THREADS": "1"}
    return {**defaults, "TF_CPP_MIN_LOG_LEVEL": "2", "PYTHONUNBUFFERED": "1", **given}


class Process:
    """One worker."""

    def __init__(self, log: TextIO, program: Sequence[str] = WORKER) -> None:
        self._process = subprocess.Popen(
            [sys.executable, *program],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=log,
            env=environment(os.environ),
        )
        self._received = b""

    def send(self, **request: Any) -> None:
        """Sends a request.

        Raises:
            EndedError: The process has ended.
        """
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(json.dumps(request).encode() + b"\n")
            self._process.stdin.flush()
        except OSError as error:
            raise EndedError(self._how_it_ended()) from error

    def receive(self, until: float) -> dict[str, Any]:
        """Returns the next message.

        Args:
            until: The time at which the process is ended, if it says nothing.

        Raises:
            EndedError: There will be none.
        """
        assert self._process.stdout is not None
        stream = self._process.stdout.fileno()
        while b"\n" not in self._received:
            ready, _, _ = select.select([stream], [], [], max(0.0, until - time.time()))
            if not ready:
                self.end()
                raise EndedError("it took too long, and was ended")
            received = os.read(stream, 1 << 16)
            if not received:
                raise EndedError(self._how_it_ended())
            self._received += received
        line, _, self._received = self._received.partition(b"\n")
        return json.loads(line)

    @property
    def ended(self) -> bool:
        """Returns whether the process has ended."""
        return self._process.poll() is not None

    def end(self) -> None:
        """Ends the process."""
        self._process.kill()
        self._process.wait()
        for pipe in (self._process.stdin, self._process.stdout):
            with contextlib.suppress(OSError):  # a pipe whose reader has ended
                assert pipe is not None
                pipe.close()

    def _how_it_ended(self) -> str:
        try:
            code = self._process.wait(timeout=60)
        except subprocess.TimeoutExpired:
            self.end()
            return "the process closed its output, and was ended"
        return f"the process ended with signal {-code}" if code < 0 else f"the process ended with status {code}"


def open_log(folder: Path, name: str) -> TextIO:
    """Returns the file of what a process prints."""
    folder.mkdir(parents=True, exist_ok=True)
    return (folder / name).open("a", encoding="utf-8")
