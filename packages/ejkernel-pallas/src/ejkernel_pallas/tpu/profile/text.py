"""Prints reports."""

from collections.abc import Iterable, Sequence
from typing import Any

from rich.console import Console

from ejkernel.cli.tables import print_table, print_unmarked_text
from ejkernel_pallas.tpu.profile.report import KernelReport, Loop, Report

MIB = 1 << 20
_SPILL_SLOTS = ("VLOAD:FILL", "VSTORE:SPILL")  # these are already counted as loads and stores


def print_report(out: Console, report: Report) -> None:
    """Prints a whole report."""
    title = f"{report.label}, on {report.target}"
    if report.error is not None:
        print_unmarked_text(out, f"{title}: {report.error}\n", "red")
        return
    if not report.kernels:
        print_unmarked_text(out, f"{title}: no Pallas kernel; XLA computes it all, and is not modelled\n", "red")
        return
    print_unmarked_text(out, f"{title}: {prediction_line(report)}", "bold")
    print_unmarked_text(
        out, f"lowered in {report.lower_seconds:.1f} s, compiled in {report.compile_seconds:.1f} s\n", "dim"
    )
    for kernel in report.kernels:
        _print_kernel(out, kernel)


def prediction_line(report: Report) -> str:
    """Returns the prediction as one line."""
    parts = [f"{microseconds(report.seconds)} µs predicted"]
    if report.flops and report.mfu and report.roofline_seconds:
        parts.append(f"{report.flops / report.seconds / 1e12:.4g} TFLOP/s")
        parts.append(f"MFU {percent(report.mfu)}")
        parts.append(f"{report.seconds / report.roofline_seconds:.2f} times the roofline's")
    return ", ".join(parts)


def kernel_rows(kernel: KernelReport) -> list[tuple[str, str]]:
    """Returns the facts about a kernel, except its loops and slots."""
    simulation, seconds = kernel.simulation, kernel.seconds
    waited = simulation.waited_cycles / max(1.0, simulation.cycles)
    by_kind = (
        f"{kind} {size / 1e6:.4g} MB in {simulation.num_copies_by_kind[kind]}"
        for kind, size in simulation.copied_bytes_by_kind.items()
    )
    limit = kernel.chip.vmem
    return [
        ("grid", " x ".join(map(str, kernel.grid)) or "none"),
        ("predicted time", f"{microseconds(seconds)} µs, {simulation.cycles:.0f} cycles"),
        ("of which computing", f"{microseconds(kernel.compute_seconds)} µs"),
        ("waiting for copies", percent(waited)),
        ("roofline of HBM", f"{microseconds(kernel.memory_seconds)} µs at {kernel.chip.bandwidth / 1e9:.0f} GB/s"),
        ("bound by", describe_bound(kernel)),
        ("matrix units busy", percent(kernel.mxu)),
        ("VMEM", f"{kernel.vmem_bytes / MIB:.1f} MiB of {limit / MIB:.0f}"),
        ("HBM", f"{simulation.hbm_read_bytes / 1e6:.4g} MB read, {simulation.hbm_written_bytes / 1e6:.4g} MB written"),
        ("copies", "; ".join(by_kind) or "none"),
        *_link_rows(kernel),
        ("registers", f"{kernel.spills} spilled, {kernel.fills} reloaded"),
        ("schedule", f"{kernel.bundles} bundles, {simulation.bundles} issued"),
        *_warning_rows(kernel),
    ]


def _link_rows(kernel: KernelReport) -> Iterable[tuple[str, str]]:
    sent, rate = kernel.simulation.bytes_sent_to_devices, kernel.chip.link_bandwidth
    if sent:
        time = f"{microseconds(kernel.link_seconds)} µs at {rate / 1e9:.0f} GB/s of a link"
        yield "to the next device", f"{sent / 1e6:.4g} MB, {time}"


def describe_bound(kernel: KernelReport) -> str:
    """Returns what limits the speed of a kernel."""
    if kernel.memory_seconds > 0.9 * kernel.seconds:
        return "HBM"
    if kernel.link_seconds > 0.9 * kernel.seconds:
        return "the link to the next device"
    return "the matrix units" if kernel.mxu > 0.9 else "its schedule"


def _warning_rows(kernel: KernelReport) -> Iterable[tuple[str, str]]:
    simulation = kernel.simulation
    if not simulation.is_complete:
        yield "INCOMPLETE", "the simulation was stopped; every figure is too low"
    if simulation.unknown_reads:
        reads = ", ".join(f"{name} ({count} times)" for name, count in simulation.unknown_reads.items())
        yield "UNKNOWN", f"{reads}: read as 0, so the prediction means nothing; give the values of these operands"


def _print_kernel(out: Console, kernel: KernelReport) -> None:
    print_table(out, f"kernel {kernel.name}", "figure", "value", rows=kernel_rows(kernel))
    slots = [slot for slot in kernel.utilisation.slots if slot not in _SPILL_SLOTS]
    headings = ("loop", "bundles", "num_trips", *slots, "spills", "fills")
    rows: list[tuple[Any, ...]] = [
        (_bundle_range_text(loop), loop.bundles, loop.num_trips, *_loop_cells(loop, slots)) for loop in kernel.loops
    ]
    whole = [percent(kernel.slots[slot]) for slot in slots]
    rows.append(("whole run", kernel.simulation.bundles, "", *whole, kernel.spills, kernel.fills))
    print_table(out, "slots in use; a loop's over one trip", *headings, rows=rows, right_aligned_columns=headings[1:])


def _bundle_range_text(loop: Loop) -> str:
    return f"{'  ' * (loop.depth - 1)}{loop.start}..{loop.end}"


def _loop_cells(loop: Loop, slots: Sequence[str]) -> tuple[str | int, ...]:
    return (*(percent(loop.slots[slot]) for slot in slots), loop.spills, loop.fills)


def percent(share: float) -> str:
    """Returns a share as a percentage."""
    return f"{100 * share:.0f}%"


def microseconds(seconds: float) -> str:
    """Returns a time in microseconds, with three significant digits, or all integer digits."""
    value = seconds * 1e6
    return f"{value:.0f}" if value >= 1000 else f"{value:.3g}"
