"""Processes in which kernels are interpreted, each for all tests of a run that need it.

Whether kernels are interpreted is decided when they are imported, so the tests need another process than their own. To
import, to load the backends and to collect the suite takes 3 to 5 s of a processor. A process that has done so runs
what the next test asks for, with the same programs compiled and the same cases traced.
"""

import atexit
import dataclasses
import json
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

SUPPORT = Path(__file__).parents[1]
"""The folder in which the process finds this package."""


@dataclasses.dataclass(frozen=True)
class Ran:
    """What a command that has ended has printed, and its exit status."""

    returncode: int
    stdout: str
    stderr: str


class Server:
    """A process with some variables of the environment.

    Attributes:
        seconds: Of a processor, that requests took.
    """

    def __init__(self, variables: dict[str, str]) -> None:
        environment = {**os.environ, **variables}
        environment.pop("PYTEST_ADDOPTS", None)
        environment["PYTHONPATH"] = os.pathsep.join(filter(None, (str(SUPPORT), os.environ.get("PYTHONPATH"))))
        command = [sys.executable, "-m", "suite.server_process"]
        pipe = subprocess.PIPE
        self._process = subprocess.Popen(command, env=environment, stdin=pipe, stdout=pipe, text=True)
        self.seconds = 0.0

    @property
    def is_running(self) -> bool:
        """Returns whether the process takes requests."""
        return self._process.poll() is None

    def run(self, request: Sequence[str]) -> Ran:
        """Runs a request, and waits for its end."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(json.dumps(list(request)) + "\n")
        self._process.stdin.flush()
        line = self._process.stdout.readline()
        if not line:
            return Ran(self._process.wait() or 1, "", "the process ended before the command did")
        reply = json.loads(line)
        self.seconds += reply.pop("seconds")
        return Ran(**reply)

    def stop(self) -> None:
        """Lets the process end."""
        for stream in (self._process.stdin, self._process.stdout):
            assert stream is not None
            stream.close()
        self._process.wait()


_servers: dict[tuple[tuple[str, str], ...], Server] = {}


def run_pytest(arguments: Sequence[str], **variables: str) -> Ran:
    """Runs pytest in the process that has these variables of the environment."""
    return _server(variables).run(["pytest", *arguments])


def run_script(script: Path, **variables: str) -> Ran:
    """Runs a script in the process that has these variables of the environment."""
    return _server(variables).run(["script", str(script)])


def seconds_of_servers() -> float:
    """Returns the seconds of a processor that all requests of this process have taken."""
    return sum(server.seconds for server in _servers.values())


def _server(variables: dict[str, str]) -> Server:
    key = tuple(sorted(variables.items()))
    if key not in _servers or not _servers[key].is_running:
        server = Server(variables)
        atexit.register(server.stop)
        server.seconds = _servers[key].seconds if key in _servers else 0.0
        _servers[key] = server
    return _servers[key]
