"""The worker process that loads libtpu: `python -m ejkernel_pallas.tpu.profile.worker JOB`.

libtpu reads its flags once per process, so setting them requires a process of its own; and if the compiler aborts, only
this process ends.
"""

import os
import pickle
import sys
from pathlib import Path

from ejkernel_pallas.tpu.profile.chips import chip
from ejkernel_pallas.tpu.profile.compiling import profile_case
from ejkernel_pallas.tpu.profile.jobs import Job
from ejkernel_pallas.tpu.profile.report import Report


def main(path: Path) -> None:
    """Profiles the cases of a job, and writes each report as soon as it is available."""
    job: Job = pickle.loads(path.read_bytes())
    for number, case in enumerate(job.cases, start=job.first_case_index):
        try:
            report = profile_case(chip(job.target), case, job.libtpu_folder)
        except Exception as error:  # noqa: BLE001 - a case may fail in any way, and must not end the other cases
            report = Report(label=case.label, target=job.target, error=f"{type(error).__name__}: {error}")
        job.move_dumps_of_case(number)
        temporary = job.report_path(number).with_suffix(".tmp")
        temporary.write_bytes(pickle.dumps(report))
        os.replace(temporary, job.report_path(number))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
