"""What libtpu 0.0.42.1 wrote about the kernels of `profiled_kernels`, and what the model made of it.

`python tests/pallas/tpu/profile/recorded_schedules.py`, where libtpu is installed, records both anew. The figures are
those of the model that was calibrated against measurements, so they change only with a new calibration.
"""

import gzip
import json
import re
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ejkernel_pallas.tpu.profile import CHIPS, Case, KernelReport, profile_many
from ejkernel_pallas.tpu.profile.simulate import CompiledKernel

FOLDER = Path(__file__).parent / "recorded"
FIGURES = FOLDER / "figures.json"
KERNELS = ("softmax", "transposed", "matmul", "pages", "neighbours")
NAMES = [f"{kernel} {target}" for target in CHIPS for kernel in KERNELS]
KINDS = ("final_bundles", "final_hlo-static-per-bundle-utilization", "pre-finalize-registers-and-allocations")
SEPARATOR = "\n=== next file ===\n"


def texts(name: str) -> tuple[str, str, str]:
    """Bundles, utilisation and allocations."""
    kernel, target = name.split()
    whole = gzip.decompress((FOLDER / f"{kernel}_{target}.txt.gz").read_bytes()).decode()
    bundles, utilisation, allocations = whole.split(SEPARATOR)
    return bundles, utilisation, allocations


def schedule(name: str) -> CompiledKernel:
    """A recorded schedule."""
    return CompiledKernel(CHIPS[name.split()[1]], *texts(name))


def figures() -> Mapping[str, Any]:
    """Name -> figures."""
    return json.loads(FIGURES.read_text())


def figures_of(kernel: KernelReport) -> dict[str, Any]:
    """What is compared."""
    simulation = kernel.simulation
    return {
        "cycles": simulation.cycles,
        "compute_cycles": simulation.compute_cycles,
        "waited_cycles": simulation.waited_cycles,
        "mxu_cycles": simulation.mxu_cycles,
        "bundles": simulation.bundles,
        "copied": dict(simulation.copied_bytes_by_kind),
        "vmem_bytes": kernel.vmem_bytes,
        "loops": [[loop.start, loop.end, loop.depth, loop.num_trips] for loop in kernel.loops],
        "slots": {slot: round(share, 4) for slot, share in kernel.slots.items()},
    }


def record() -> None:
    """Compiles every kernel for every chip."""
    FOLDER.mkdir(exist_ok=True)
    found: dict[str, Any] = {}
    builders = Path(__file__).with_name("profiled_kernels.py")
    for target in CHIPS:
        cases = [Case(label=kernel, build=f"{builders}:{kernel}") for kernel in KERNELS]
        with tempfile.TemporaryDirectory() as temporary:
            reports = profile_many(cases, target=target, dump_folder=Path(temporary))
            for number, report in enumerate(reports):
                (kernel,) = report.kernels
                found[f"{report.label} {target}"] = figures_of(kernel)
                dumped = Path(temporary) / f"{number}.dumps"
                _write(FOLDER / f"{report.label}_{target}.txt.gz", dumped, kernel.name)
    FIGURES.write_text(json.dumps(found, indent=1) + "\n")


def _write(path: Path, dumped: Path, kernel: str) -> None:
    files = [
        next(p for p in dumped.iterdir() if re.fullmatch(rf"\d+-{kernel}-\d+-{kind}\.txt", p.name)) for kind in KINDS
    ]
    bundles, utilisation, allocations = (file.read_text() for file in files)
    kept = "\n".join(line for line in allocations.splitlines() if "#allocation" in line and "[shape" in line)
    path.write_bytes(gzip.compress(SEPARATOR.join((bundles, utilisation, kept)).encode(), mtime=0))


if __name__ == "__main__":
    record()
