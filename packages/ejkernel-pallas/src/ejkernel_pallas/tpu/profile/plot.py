"""Plots the use of slots over a kernel's schedule; the only module that imports matplotlib."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.figure import Figure

from ejkernel_pallas.tpu.profile.report import KernelReport, Report
from ejkernel_pallas.tpu.profile.text import describe_bound, microseconds

_PLOT_COLUMNS = 400
_INCHES_PER_SLOT_KIND = 0.28


def draw_reports(reports: Sequence[Report], path: Path) -> None:
    """Draws a panel for every kernel: kinds of slots downwards, and the issued bundles to the right, in the order of
    the schedule, each as wide as the number of times that it was issued.

    Args:
        reports: Those without an error are drawn.
        path: PNG file to write.
    """
    panels = [(report, kernel) for report in reports for kernel in report.kernels]
    heights = [1.2 + _INCHES_PER_SLOT_KIND * len(kernel.utilisation.slots) for _, kernel in panels]
    # Without pyplot, which keeps figures alive and looks for a display.
    figure = Figure(figsize=(11, sum(heights)), layout="constrained")
    axes = figure.subplots(len(panels), height_ratios=heights, squeeze=False)
    image: Any = None
    for axis, (report, kernel) in zip(axes[:, 0], panels, strict=True):
        image = axis.imshow(
            slot_shares_over_schedule(kernel), aspect="auto", vmin=0, vmax=1, cmap="viridis", extent=(0, 100, 1, 0)
        )
        _label_panel(axis, report, kernel)
    figure.colorbar(image, ax=list(axes[:, 0]), label="slots in use", shrink=min(1.0, 3 / sum(heights)))
    figure.savefig(path, dpi=150, format="png")


def slot_shares_over_schedule(kernel: KernelReport, columns: int = _PLOT_COLUMNS) -> np.ndarray[Any, Any]:
    """Returns the share of slots in use, [kinds of slots, columns]; every column stands for the same number of
    issued bundles.
    """
    used = np.asarray(kernel.utilisation.used_slots, np.float64) / np.asarray(kernel.utilisation.slot_capacity)
    counts = np.array([kernel.simulation.issues_per_bundle.get(k, 0) for k in range(len(used))], np.float64)
    ends = np.concatenate([[0.0], np.cumsum(counts)])
    sums = np.concatenate([np.zeros((1, used.shape[1])), np.cumsum(used * counts[:, None], axis=0)])
    edges = np.linspace(0.0, ends[-1], columns + 1)
    cumulative_slots = np.stack([np.interp(edges, ends, sums[:, slot]) for slot in range(used.shape[1])])
    return np.diff(cumulative_slots, axis=1) / max(ends[-1] / columns, 1e-9)


def _label_panel(axis: Any, report: Report, kernel: KernelReport) -> None:
    slots = kernel.utilisation.slots
    axis.set_yticks([(k + 0.5) / len(slots) for k in range(len(slots))], slots, fontsize=8)
    axis.set_xlabel("per cent of the bundles issued, in the order of the schedule", fontsize=8)
    for loop in kernel.loops:
        before = sum(count for k, count in kernel.simulation.issues_per_bundle.items() if k < loop.start)
        share_of_loop = sum(
            count for k, count in kernel.simulation.issues_per_bundle.items() if loop.start <= k <= loop.end
        )
        share = 100 / max(1, kernel.simulation.bundles)
        for boundary in (before * share, (before + share_of_loop) * share):
            axis.axvline(boundary, color="white", linewidth=0.6, alpha=0.8)
    summary = f"{microseconds(kernel.seconds)} µs predicted, bound by {describe_bound(kernel)}"
    title = f"{report.label}, on {report.target}, kernel {kernel.name}: {summary}"
    axis.set_title(title, loc="left", fontsize=8, wrap=True)
