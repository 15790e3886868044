"""Starts worker processes, and collects their reports."""

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

_WORKER_MODULE = "ejkernel_pallas.tpu.profile.worker"
_REPORTED_LOG_LINES = 3
_POLL_SECONDS = 0.1
LIBTPU_MISSING_MESSAGE = "profiles need libtpu's compiler: pip install 'ejkernel-pallas[aot]'"


@dataclasses.dataclass(frozen=True)
class Job:
    """The input of a worker process.

    Attributes:
        target: Name of the chip.
        cases: The cases to profile.
        first_case_index: Index of the first case, if earlier workers have processed others.
        folder: Folder for all files.
    """

    target: str
    cases: Sequence[Case]
    first_case_index: int
    folder: Path

    @property
    def libtpu_folder(self) -> Path:
        """Returns the folder that libtpu writes to."""
        return self.folder / "libtpu"

    def report_path(self, case_index: int) -> Path:
        """Returns the path of the report of a case."""
        return self.folder / f"{case_index}.report"

    def move_dumps_of_case(self, case_index: int) -> None:
        """Moves what libtpu has written for a case to a folder of its own, before the next case."""
        kept = self.folder / f"{case_index}.dumps"
        kept.mkdir(exist_ok=True)
        for path in self.libtpu_folder.iterdir():
            path.rename(kept / path.name)


def profile(
    function: Callable[..., Any] | str,
    *args: Any,
    target: str = "v5e",
    flops: float | None = None,
    **static: Any,
) -> Report:
    """Predicts the run time of a function's TPU kernels without a TPU.

    Args:
        function: A JAX function of a module, or its path: `"module:function"` or `"file.py:function"`.
        *args: Its arguments, which may be pytrees; see `Workload.args`.
        target: `"v5e"`, `"v5p"`, `"v6e"` or `"v7x"`.
        flops: The number of useful operations, for MFU.
        **static: Keyword arguments that are not arrays.

    Returns:
        The report; if profiling failed, its `error` says why.

    Raises:
        ValueError: There is no such chip, or a worker cannot import the function.
        ModuleNotFoundError: libtpu is not installed.
    """
    path = function if isinstance(function, str) else function_path(function)
    kwargs = {"path": path, "args": args, "flops": flops, "static_kwargs": static}
    case = Case(
        label=path.rpartition(":")[2],
        build="ejkernel_pallas.tpu.profile.cases:workload_of_function_path",
        kwargs=kwargs,
    )
    return profile_many([case], target=target)[0]


def profile_many(
    cases: Sequence[Case],
    *,
    target: str = "v5e",
    dump_folder: Path | None = None,
    timeout: float = 900.0,
    on_report: Callable[[Report], None] | None = None,
) -> list[Report]:
    """Profiles cases one after another, in one worker process unless the compiler aborts it.

    Args:
        cases: The cases to profile.
        target: `"v5e"`, `"v5p"`, `"v6e"` or `"v7x"`.
        dump_folder: Folder in which to keep everything that libtpu writes; a temporary one by default.
        timeout: Seconds after which a worker is stopped.
        on_report: Called with each report, in order, as soon as it is available.

    Returns:
        A report for every case, in order; if profiling a case failed, its `error` says why.

    Raises:
        ValueError: There is no such chip.
        ModuleNotFoundError: libtpu is not installed.
    """
    chip(target)
    if importlib.util.find_spec("libtpu") is None:
        raise ModuleNotFoundError(LIBTPU_MISSING_MESSAGE)
    reports: list[Report] = []
    with _open_job_folder(dump_folder) as folder:
        while len(reports) < len(cases):
            job = Job(target, cases[len(reports) :], len(reports), folder)
            for report in _run_worker(job, timeout):
                reports.append(report)
                if on_report is not None:
                    on_report(report)
    return reports


def _run_worker(job: Job, timeout: float) -> Generator[Report]:
    """Runs a worker and yields its reports as they arrive; if the worker died, a last report says why."""
    shutil.rmtree(job.libtpu_folder, ignore_errors=True)  # left by a worker that died before it could move it
    job.libtpu_folder.mkdir()
    path = job.folder / f"{job.first_case_index}.job"
    path.write_bytes(pickle.dumps(job))
    command, end = [sys.executable, "-m", _WORKER_MODULE, str(path)], time.monotonic() + timeout
    found = 0
    with (
        (job.folder / "log").open("wb") as log,
        subprocess.Popen(command, env=_worker_environment(job), stdout=log, stderr=log) as worker,
    ):
        try:
            running = True
            while running:
                with contextlib.suppress(subprocess.TimeoutExpired):
                    worker.wait(_POLL_SECONDS)
                running = worker.poll() is None and time.monotonic() < end
                while (result := job.report_path(job.first_case_index + found)).exists():
                    yield pickle.loads(result.read_bytes())
                    found += 1
        finally:
            worker.kill()
    if found < len(job.cases):  # the worker died in the case after the last one that it reported
        yield Report(label=job.cases[found].label, target=job.target, error=_worker_failure(job.folder))


def _worker_environment(job: Job) -> Mapping[str, str]:
    """Returns the worker's environment: the same module search path as this process, and no TPU for libtpu to look
    for.
    """
    flags = (
        f"--xla_jf_dump_to={job.libtpu_folder}",
        "--xla_jf_dump_llo_text=true",
        "--xla_jf_dump_llo_pass_label_regex=final",
    )
    return {
        **os.environ,
        "PYTHONPATH": os.pathsep.join([os.getcwd(), *filter(None, sys.path)]),
        "LIBTPU_INIT_ARGS": " ".join(flags),
        "JAX_PLATFORMS": "cpu",
        "TPU_SKIP_MDS_QUERY": "1",
        "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",
    }


def _worker_failure(folder: Path) -> str:
    lines = (folder / "log").read_text(errors="replace").strip().splitlines()
    return "; ".join(["the compiler's process ended without a report", *lines[-_REPORTED_LOG_LINES:]])


@contextlib.contextmanager
def _open_job_folder(dump_folder: Path | None) -> Generator[Path]:
    if dump_folder is not None:
        dump_folder.mkdir(parents=True, exist_ok=True)
        for old in dump_folder.glob("*.report"):
            old.unlink()
        yield dump_folder.resolve()
        return
    with tempfile.TemporaryDirectory(prefix="ejkernel-profile-") as temporary:
        yield Path(temporary)
