"""What every benchmark prints first: where and with what it ran; and the options of its command line."""

import argparse
import contextlib
import os
import platform
import shlex
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from importlib import metadata
from pathlib import Path

import filelock
import jax

CANDIDATES_FLAG = {"--candidates": "every configuration, too"}
"""The flag of `options` that measures a kernel's candidates as well."""


def cpu_name() -> str:
    """Name of the CPU, as far as the system tells."""
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.exists() else []
    name = next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), platform.machine())
    count = sum(line.startswith("processor") for line in lines)
    return f"{name}, {count} cores" if count else name


def _accelerator_names() -> list[str]:
    """Kinds of the devices in use that are no CPU."""
    return sorted({device.device_kind for device in jax.devices() if device.platform != "cpu"})


def heading() -> str:
    """Machine, how busy it is, accelerators, versions and command, as Markdown."""
    packages = ", ".join(f"{name} {metadata.version(name)}" for name in ("jax", "jaxlib", "ejkernel-core"))
    command = shlex.join(["python", "/".join(Path(sys.argv[0]).resolve().parts[-3:]), *sys.argv[1:]])
    accelerator = "".join(f"; {kind}" for kind in _accelerator_names())
    busy = f"; load average {os.getloadavg()[0]:.1f}" if hasattr(os, "getloadavg") else ""
    return f"`{command}`\n\n{cpu_name()}{accelerator}{busy}; Python {platform.python_version()}, {packages}\n"


def markdown_table(columns: Sequence[str], rows: Iterable[Sequence[object]]) -> str:
    """A Markdown table."""
    lines = ["| " + " | ".join(columns) + " |", "|" + "---|" * len(columns)]
    return "\n".join(lines + ["| " + " | ".join(map(str, row)) + " |" for row in rows])


def has_gpu() -> bool:
    """Whether there is a GPU; where there is none, it says that nothing was measured."""
    found = jax.default_backend() == "gpu"
    if not found:
        print(f"{Path(sys.argv[0]).name} needs a GPU: nothing was measured")
    return found


def parse_options(
    description: str | None, flags: Mapping[str, str], values: Mapping[str, tuple[str, str]] | None = None
) -> argparse.Namespace:
    """Parses the command line of a benchmark. Where there is no GPU, the program ends, except with `--check`.

    Args:
        description: The script's docstring, whose first line is printed with the options.
        flags: The text of each flag.
        values: The default and the text of each option that takes a value.
    """
    parser = argparse.ArgumentParser(description=(description or "").partition("\n")[0])
    for name, text in flags.items():
        parser.add_argument(name, action="store_true", help=text)
    for name, (default, text) in (values or {}).items():
        parser.add_argument(name, default=default, help=text)
    parsed = parser.parse_args()
    if not getattr(parsed, "check", False) and not has_gpu():
        sys.exit()
    return parsed


def print_rows_as_measured(columns: Sequence[str], rows: Iterable[Sequence[str]]) -> None:
    """Prints where it ran and a table, each row as soon as it was measured."""
    print(heading())
    print(markdown_table(columns, ()), flush=True)
    for row in rows:
        print("| " + " | ".join(row) + " |", flush=True)


def locked_rounds(num_rounds: int) -> Iterator[int]:
    """Rounds of samples. Where `EJKERNEL_BENCH_LOCK` names a file, each round holds its lock.

    So several scripts may compile and check on one GPU at the same time, while one of them measures.
    """
    path = os.environ.get("EJKERNEL_BENCH_LOCK")
    for round_index in range(num_rounds):
        with filelock.FileLock(path) if path else contextlib.nullcontext():
            yield round_index
