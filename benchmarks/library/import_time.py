"""What `import ejkernel` adds to `import jax`, and what it does not import.

    python benchmarks/library/import_time.py [--quick]

Every import runs in a fresh interpreter; the statements take turns, and medians are printed. Processor time is what a
busy machine disturbs less. Goal: 150 ms.
"""

import argparse
import os
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

sys.path.append(str(Path(__file__).parents[1]))
from shared.report import heading, markdown_table

STATEMENTS = ("import jax", "import jax; import ejkernel", "import jax; from ejkernel.modules import flash_attention")
HEAVY = ("triton", "jax_triton", "jax.experimental.pallas", "click", "rich", "matplotlib", "tqdm")


def seconds(statement: str, bytecode: str) -> tuple[float, float]:
    """Wall and processor time of one statement in a new interpreter, start-up excluded.

    Args:
        statement: What to run.
        bytecode: Folder for compiled modules; otherwise an environment that forbids them times the compiler.
    """
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}
    environment["PYTHONPYCACHEPREFIX"] = bytecode
    clocks = "time.perf_counter(), time.process_time()"
    timed = f"import time; a = {clocks}; {statement}; b = {clocks}; print(b[0] - a[0], b[1] - a[1])"
    printed = subprocess.run([sys.executable, "-c", timed], env=environment, capture_output=True, check=True, text=True)
    wall, processor = map(float, printed.stdout.split())
    return wall, processor


def imported() -> list[str]:
    """Which of `HEAVY` the import pulls in."""
    listing = f"import sys, ejkernel.modules; print(*[m for m in {HEAVY!r} if m in sys.modules])"
    return subprocess.run([sys.executable, "-c", listing], capture_output=True, check=True, text=True).stdout.split()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="fewer repeats")
    repeats = 3 if parser.parse_args().quick else 15
    times: dict[str, list[tuple[float, float]]] = {statement: [] for statement in STATEMENTS}
    with tempfile.TemporaryDirectory() as bytecode:
        for turn in range(repeats + 1):
            for statement, record in times.items():
                taken = seconds(statement, bytecode)
                if turn:  # the first turn compiles the modules and fills the disk cache
                    record.append(taken)
    medians = {s: [1e3 * statistics.median(clock) for clock in zip(*taken, strict=True)] for s, taken in times.items()}
    base = medians[STATEMENTS[0]]
    print(heading())
    rows = [
        (f"`{s}`", *(f"{ms:.0f} ms, {ms - own:+.0f} ms" for ms, own in zip(clocks, base, strict=True)))
        for s, clocks in medians.items()
    ]
    print(markdown_table(("statement", "median, over `import jax`", "processor time, likewise"), rows))
    print(f"\nof {', '.join(HEAVY)} it imports: {', '.join(imported()) or 'none'}")


if __name__ == "__main__":
    main()
