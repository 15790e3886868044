"""Starting workers, and collecting what they find."""

import contextlib
import dataclasses
import importlib.util
import os
import pickle
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Generator, Mapping, Sequence
from pathlib import Path
from typing import Any

from ejkernel_pallas.tpu.profile.cases import Case, function_path
from ejkernel_pallas.tpu.profile.chips import chip
from ejkernel_pallas.tpu.profile.report import Report

_WORKER = "ejkernel_pallas.tpu.profile.worker"
_LOG_LINES = 3
_POLL_SECONDS = 0.1
NEEDS_LIBTPU = "profiles need libtpu's compiler: pip install 'ejkernel-pallas[aot]'"


@dataclasses.dataclass(frozen=True)
class Job:
    """What a worker is given.

    Attributes:
        target: Name of the chip.
        cases: What to profile.
        first: Number of the first case, where earlier workers have done others.
        folder: Where everything is written.
    """

    target: str
    cases: Sequence[Case]
    first: int
    folder: Path

    @property
    def dumps(self) -> Path:
        """Returns where libtpu writes."""
        return self.folder / "libtpu"

    def result(self, number: int) -> Path:
        """Returns the report of a case."""
        return self.folder / f"{number}.report"

    def keep_dumps(self, number: int) -> None:
        """Moves what libtpu has written of a case out of the way of the next."""
        kept = self.folder / f"{number}.dumps"
        kept.mkdir(exist_ok=True)
        for path in self.dumps.iterdir():
            path.rename(kept / path.name)


def profile(
    function: Callable[..., Any] | str,
    *args: Any,
    target: str = "v5e",
    flops: float | None = None,
    **static: Any,
) -> Report:
    """Predicts how fast a function's TPU kernels are, without a TPU.

    Args:
        function: A JAX function of a module, or where to find it: `"module:function"` or `"file.py:function"`.
        *args: Its arguments, pytrees included; see `Workload.args`.
        target: `"v5e"`, `"v5p"`, `"v6e"` or `"v7x"`.
        flops: Its useful operations, for MFU.
        **static: Keyword arguments that are no arrays.

    Returns:
        The report; what went wrong, if anything, is its `error`.

    Raises:
        ValueError: There is no such chip, or a worker cannot import the function.
        ModuleNotFoundError: libtpu is not installed.
    """
    path = function if isinstance(function, str) else function_path(function)
    kwargs = {"function": path, "args": args, "flops": flops, "static": static}
    case = Case(label=path.rpartition(":")[2], build="ejkernel_pallas.tpu.profile.cases:plain", kwargs=kwargs)
    return profile_many([case], target=target)[0]


def profile_many(
    cases: Sequence[Case],
    *,
    target: str = "v5e",
    keep: Path | None = None,
    timeout: float = 900.0,
    progress: Callable[[Report], None] | None = None,
) -> list[Report]:
    """Returns profiles cases one after another, in one worker process as long as the compiler does not abort it.

    Args:
        cases: What to profile.
        target: `"v5e"`, `"v5p"`, `"v6e"` or `"v7x"`.
        keep: Folder to leave everything in that libtpu writes; a temporary one if not given.
        timeout: Seconds after which a worker is stopped.
        progress: Called with each report in order, as soon as it is there.

    Returns:
        A report for every case, in their order; what went wrong with one is its `error`.

    Raises:
        ValueError: There is no such chip.
        ModuleNotFoundError: libtpu is not installed.
    """
    chip(target)
    if importlib.util.find_spec("libtpu") is None:
        raise ModuleNotFoundError(NEEDS_LIBTPU)
    reports: list[Report] = []
    with _folder(keep) as folder:
        while len(reports) < len(cases):
            job = Job(target, cases[len(reports) :], len(reports), folder)
            for report in _work(job, timeout):
                reports.append(report)
                if progress is not None:
                    progress(report)
    return reports


def _work(job: Job, timeout: float) -> Generator[Report]:
    """Runs a worker; its reports as they come, the last of which says what it died of if it did."""
    shutil.rmtree(job.dumps, ignore_errors=True)  # what a worker left that did not live to move it away
    job.dumps.mkdir()
    path = job.folder / f"{job.first}.job"
    path.write_bytes(pickle.dumps(job))
    command, end = [sys.executable, "-m", _WORKER, str(path)], time.monotonic() + timeout
    found = 0
    with (
        (job.folder / "log").open("wb") as log,
        subprocess.Popen(command, env=_environment(job), stdout=log, stderr=log) as worker,
    ):
        try:
            running = True
            while running:
                with contextlib.suppress(subprocess.TimeoutExpired):
                    worker.wait(_POLL_SECONDS)
                running = worker.poll() is None and time.monotonic() < end
                while (result := job.result(job.first + found)).exists():
                    yield pickle.loads(result.read_bytes())
                    found += 1
        finally:
            worker.kill()
    if found < len(job.cases):  # the worker died of the case after the last that it reported
        yield Report(label=job.cases[found].label, target=job.target, error=_last_words(job.folder))


def _environment(job: Job) -> Mapping[str, str]:
    """The worker's environment: modules are found where this process finds them, and libtpu looks for no TPU."""
    flags = (f"--xla_jf_dump_to={job.dumps}", "--xla_jf_dump_llo_text=true", "--xla_jf_dump_llo_pass_label_regex=final")
    return {
        **os.environ,
        "PYTHONPATH": os.pathsep.join([os.getcwd(), *filter(None, sys.path)]),
        "LIBTPU_INIT_ARGS": " ".join(flags),
        "JAX_PLATFORMS": "cpu",
        "TPU_SKIP_MDS_QUERY": "1",
        "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",
    }


def _last_words(folder: Path) -> str:
    lines = (folder / "log").read_text(errors="replace").strip().splitlines()
    return "; ".join(["the compiler's process ended without a report", *lines[-_LOG_LINES:]])


@contextlib.contextmanager
def _folder(keep: Path | None) -> Generator[Path]:
    if keep is not None:
        keep.mkdir(parents=True, exist_ok=True)
        for old in keep.glob("*.report"):
            old.unlink()
        yield keep.resolve()
        return
    with tempfile.TemporaryDirectory(prefix="ejkernel-profile-") as temporary:
        yield Path(temporary)
