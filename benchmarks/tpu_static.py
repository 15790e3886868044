"""TPU kernels without a TPU: predicted times, by the static profile of libtpu's schedules, for four chips.

    python benchmarks/tpu_static.py                      # all chips and kernels; some minutes
    python benchmarks/tpu_static.py --target v6e         # one chip
    python benchmarks/tpu_static.py --only grouped       # kernels whose name has the word
    python benchmarks/tpu_static.py --quick              # a kernel of each kind, for one chip

Shows ejkernel's kernels with the tiles that they choose, and those that JAX ships with blocks worth comparing with.
Needs libtpu: pip install "ejkernel-pallas[aot]". What the figures mean and how good they are is on the page "TPU
kernels without a TPU".
"""

import argparse
import importlib.util
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import _report

from ejkernel_pallas.tpu.profile import CHIPS, Case, Report, profile_many

PEERS, OURS = Path(__file__).with_name("_tpu_peers.py"), Path(__file__).with_name("_tpu_ours.py")
COLUMNS = ("kernel", "µs", "MFU", "computing µs", "HBM µs", "matrix units", "VMEM MiB", "spilled", "reloaded")


def case(label: str, build: str, file: Path = PEERS, **kwargs: Any) -> Case:
    return Case(label=label, build=f"{file}:{build}", kwargs=kwargs)


UNEQUAL = (1500, 300, 1024, 12, 2100, 40, 1800, 1416)


QUICK = (
    case("flash attention, ejkernel", "attention", OURS),
    case("flash attention, JAX flash, blocks of 1024", "flash", block=1024),
    case("grouped matmul, JAX megablox, 512x1024x1024", "grouped_matmul", tiling=(512, 1024, 1024)),
    case("paged decode, JAX ragged, 64 pages a block", "ragged_pages", queries=1),
)
ALL = (
    QUICK[0],
    case("flash attention, JAX flash, blocks of 512", "flash", block=512),
    QUICK[1],
    case("flash attention, JAX splash, blocks of 512", "splash", block_q=512, block_kv=512),
    case("flash attention, JAX splash, blocks of 1024", "splash", block_q=1024, block_kv=1024),
    case("flash attention, JAX splash, blocks of 1024x2048", "splash", block_q=1024, block_kv=2048),
    case("forward and gradient, ejkernel", "attention", OURS, gradient=True),
    case("forward and gradient, JAX flash, blocks of 512", "flash", block=512, gradient=True),
    case("forward and gradient, JAX splash, blocks of 512", "splash", block_q=512, block_kv=512, gradient=True),
    case("forward and gradient, JAX splash, blocks of 1024", "splash", block_q=1024, block_kv=1024, gradient=True),
    QUICK[2],
    QUICK[3],
    case("paged decode, ejkernel", "pages", OURS, queries=1),
    case("paged prefill of 512, JAX ragged, 32 pages a block", "ragged_pages", queries=512, pages=32, q_block=128),
    case("paged prefill of 512, ejkernel", "pages", OURS, queries=512),
)


def row(report: Report) -> Sequence[object]:
    if report.error is not None:
        return (report.label, "-", *[""] * (len(COLUMNS) - 3), report.error.splitlines()[0][:100])
    kernels = report.kernels
    doubtful = any(kernel.simulation.unknown or not kernel.simulation.complete for kernel in kernels)
    busy = sum(kernel.mxu * kernel.seconds for kernel in kernels) / report.seconds
    return (
        report.label + (" (values unknown)" if doubtful else ""),
        f"{report.seconds * 1e6:.0f}",
        f"{report.mfu or 0:.1%}",
        f"{sum(kernel.compute_seconds for kernel in kernels) * 1e6:.0f}",
        f"{sum(kernel.memory_seconds for kernel in kernels) * 1e6:.0f}",
        f"{busy:.0%}",
        f"{max(kernel.vmem_bytes for kernel in kernels) / 2**20:.1f}",
        sum(kernel.spills for kernel in kernels),
        sum(kernel.fills for kernel in kernels),
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="a kernel of each kind, for v5e")
    parser.add_argument("--target", action="append", choices=list(CHIPS), help="repeatable; all if left out")
    parser.add_argument("--only", default="", help="a word in the kernel's name")
    arguments = parser.parse_args()
    print(_report.heading())
    if importlib.util.find_spec("libtpu") is None:
        print("libtpu is not installed: pip install 'ejkernel-pallas[aot]'")
        return
    cases = [made for made in (QUICK if arguments.quick else ALL) if arguments.only in made.label]
    for target in arguments.target or (["v5e"] if arguments.quick else CHIPS):
        reports = profile_many(cases, target=target)
        print(f"## {target}\n")
        print(_report.markdown_table(COLUMNS, map(row, reports)) + "\n")


if __name__ == "__main__":
    main()
