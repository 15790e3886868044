"""Draws the times of `ejkernel bench`. No other module imports matplotlib."""

import textwrap
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from matplotlib.figure import Figure

BAR_COLOR = "#3b6ea5"
TITLE_LINE_LENGTH = 100  # characters of a title's line


def draw_bars(timings: Sequence[Any], path: Path, title: str) -> None:
    """Draws a bar for every timing that ran, and a panel for every call and pass.

    The axis labels the bars, so that no legend covers them.

    Args:
        timings: `ejkernel.cli.bench.Timing`s.
        path: PNG file to write.
        title: The operation, the device and the versions.
    """
    panels = _timings_by_panel(
        [timing for timing in timings if timing.seconds], lambda timing: (timing.call, timing.passes)
    )
    heights = [1.0 + 0.5 * len(bars) for bars in panels.values()]
    # pyplot would keep figures alive and look for a display.
    figure = Figure(figsize=(9, sum(heights) + 0.5), layout="constrained")
    figure.suptitle(title, fontsize=10)
    axes = figure.subplots(len(panels), height_ratios=heights, squeeze=False)
    for axis, ((call, passes), bars) in zip(axes[:, 0], panels.items(), strict=True):
        bars = sorted(bars, key=lambda timing: timing.seconds, reverse=True)
        names, times = [bar.implementation for bar in bars], [bar.seconds * 1e3 for bar in bars]
        errors = [bar.spread * 5e2 for bar in bars]
        bar_container = axis.barh(names, times, xerr=errors, color=BAR_COLOR, ecolor="#555555")
        axis.bar_label(bar_container, labels=[_bar_label(bar) for bar in bars], padding=6)
        axis.margins(x=0.35)
        axis.set_title("\n".join(textwrap.wrap(f"{passes}: {call}", TITLE_LINE_LENGTH)), loc="left", fontsize=9)
        axis.set_xlabel("median milliseconds; the line is the interquartile range")
        axis.spines[["top", "right"]].set_visible(False)
    figure.savefig(path, dpi=150, format="png")


def draw_sweep(timings: Sequence[Any], path: Path, title: str, axis_name: str) -> None:
    """Draws a line for every implementation over the sizes of an axis, and a panel for every pass.

    Args:
        timings: `ejkernel.cli.bench.Timing`s.
        path: PNG file to write.
        title: The operation, the device and the versions.
        axis_name: The letters that were swept over.
    """
    panels = _timings_by_panel([timing for timing in timings if timing.seconds], lambda timing: timing.passes)
    rates = all(timing.work_count.flops is not None for timings in panels.values() for timing in timings)
    figure = Figure(figsize=(9, 3.2 * len(panels) + 0.8), layout="constrained")
    figure.suptitle(title, fontsize=10)
    handles: dict[str, Any] = {}
    for axis, (passes, points) in zip(figure.subplots(len(panels), squeeze=False)[:, 0], panels.items(), strict=True):
        for name, line in _timings_by_panel(points, _forward_implementation).items():
            sizes = [point.at for point in line]
            values = [point.work_count.rates(point.seconds)[0] if rates else point.seconds * 1e3 for point in line]
            # One colour for an implementation in all panels.
            color = handles[name].get_color() if name in handles else f"C{len(handles)}"
            (bar_container,) = axis.plot(sizes, values, marker="o", color=color)
            handles.setdefault(name, bar_container)
        axis.set_xscale("log", base=2)
        axis.set_yscale("linear" if rates else "log")
        axis.set_title(passes, loc="left", fontsize=9)
        axis.set_xlabel(f"size of {axis_name}")
        axis.set_ylabel("TFLOP/s" if rates else "median milliseconds")
        axis.spines[["top", "right"]].set_visible(False)
    # Below the panels, so that it covers no line.
    figure.legend(handles.values(), handles.keys(), loc="outside lower center", ncols=4, frameon=False)
    figure.savefig(path, dpi=150, format="png")


def _forward_implementation(timing: Any) -> str:
    """Returns the implementation of the forward pass."""
    return timing.implementation.partition(" + ")[0]


def _timings_by_panel(timings: Sequence[Any], panel_key: Any) -> dict[Any, list[Any]]:
    panels: dict[Any, list[Any]] = {}
    for timing in timings:
        panels.setdefault(panel_key(timing), []).append(timing)
    return panels


def _bar_label(bar: Any) -> str:
    flops = bar.work_count.rates(bar.seconds)[0]
    rate = "" if flops is None else f", {flops:.3g} TFLOP/s"
    return f"{bar.seconds * 1e3:.3g} ms{rate}"
