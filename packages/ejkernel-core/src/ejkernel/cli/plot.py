"""Drawing the times of `ejkernel bench`; the one module that imports matplotlib."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from matplotlib.figure import Figure


def draw(timings: Sequence[Any], path: Path) -> None:
    """Draws a bar for every timing that ran, and a panel for every call and pass.

    Args:
        timings: `ejkernel.cli.bench.Timing`s.
        path: PNG file to write.
    """
    panels: dict[tuple[str, str], list[Any]] = {}
    for timing in timings:
        if timing.seconds:
            panels.setdefault((timing.call, timing.passes), []).append(timing)
    heights = [1.0 + 0.5 * len(bars) for bars in panels.values()]
    # Without pyplot: it keeps figures alive, and looks for a display.
    figure = Figure(figsize=(9, sum(heights)), layout="constrained")
    axes = figure.subplots(len(panels), height_ratios=heights, squeeze=False)
    for axis, ((call, passes), bars) in zip(axes[:, 0], panels.items(), strict=True):
        bars = sorted(bars, key=lambda timing: timing.seconds, reverse=True)
        drawn = axis.barh([bar.implementation for bar in bars], [bar.seconds * 1e3 for bar in bars], color="#3b6ea5")
        axis.bar_label(drawn, fmt="%.3g ms", padding=4)
        axis.margins(x=0.15)
        axis.set_title(f"{passes}: {call}", loc="left", fontsize=9, wrap=True)
        axis.set_xlabel("median milliseconds")
        axis.spines[["top", "right"]].set_visible(False)
    figure.savefig(path, dpi=150, format="png")
