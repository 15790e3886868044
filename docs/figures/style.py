"""What the figures share: a palette for light pages and one for dark pages, boxes and arrows.

`python docs/figures/make.py` draws all of them again.
"""

import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("svg")

import matplotlib.pyplot as plt
from matplotlib.patches import FancyArrowPatch, FancyBboxPatch

HERE = Path(__file__).parent
RESULTS = HERE.parents[1] / "benchmarks" / "results"

INK, MUTED, CARD = "#1f2937", "#6b7280", "#f8fafc"
BLUE, LIGHT_BLUE, ORANGE, GREEN, RED, GREY = "#2563eb", "#bfdbfe", "#f59e0b", "#10b981", "#dc2626", "#d1d5db"

DARK = {
    INK: "#e5e7eb",
    MUTED: "#9ca3af",
    CARD: "#1e2129",
    BLUE: "#3b82f6",
    LIGHT_BLUE: "#1e3a8a",
    ORANGE: "#d97706",
    GREEN: "#047857",
    RED: "#f87171",
    GREY: "#4b5563",
    "#fde68a": "#854d0e",
    "#a7f3d0": "#065f46",
    "#fecaca": "#991b1b",
    "#d9d9d9": "#4b5563",
}
"""The colour of the dark variant for each colour of a figure."""

# Text stays text, so that pages can be searched. Ids and dates are fixed: a figure drawn again is the same file.
plt.rcParams.update(
    {
        "svg.fonttype": "none",
        "svg.hashsalt": "ejkernel",
        "font.family": "sans-serif",
        "font.size": 11,
        "text.color": INK,
        "axes.edgecolor": MUTED,
        "axes.labelcolor": INK,
        "axes.facecolor": CARD,
        "figure.facecolor": CARD,
        "xtick.color": MUTED,
        "ytick.color": MUTED,
    }
)


def canvas(width: float, height: float) -> tuple[Any, Any]:
    """A figure of `width` by `height` units, with one axis that spans it and no frame."""
    figure, axes = plt.subplots(figsize=(width, height))
    axes.set(xlim=(0, width), ylim=(0, height))
    axes.axis("off")
    figure.subplots_adjust(0, 0, 1, 1)
    return figure, axes


def box(axes: Any, xy: tuple[float, float], size: tuple[float, float], text: str, color: str = LIGHT_BLUE) -> None:
    """A rounded box with centred text; `xy` is its lower left corner."""
    patch = FancyBboxPatch(xy, *size, boxstyle="round,pad=0,rounding_size=0.08", facecolor=color, edgecolor=MUTED)
    axes.add_patch(patch)
    axes.text(xy[0] + size[0] / 2, xy[1] + size[1] / 2, text, ha="center", va="center", fontsize=10)


def arrow(axes: Any, start: tuple[float, float], end: tuple[float, float], bend: float = 0, color: str = INK) -> None:
    """An arrow from `start` to `end`; `bend` curves it."""
    style = {"arrowstyle": "-|>", "mutation_scale": 12, "color": color, "linewidth": 1.2}
    axes.add_patch(FancyArrowPatch(start, end, connectionstyle=f"arc3,rad={bend}", **style))


def save(figure: Any, name: str, folder: Path) -> None:
    """Writes `name`.svg, and `name`_dark.svg for dark pages."""
    nothing = dict.fromkeys(("Creator", "Date", "Format", "Type"))
    path = folder / f"{name}.svg"
    figure.savefig(path, metadata=nothing, bbox_inches="tight", pad_inches=0.1)
    plt.close(figure)
    (folder / f"{name}_dark.svg").write_text(dark(path.read_text()))


def dark(svg: str) -> str:
    """Returns a figure with the colours of the dark palette.

    White text stays white, since it is on a coloured bar, while white boxes become dark. Text without a colour is black
    in a light figure, and light here.
    """
    svg = re.sub(r"(<(?!text)[^>]*fill: )#ffffff", r"\1#111827", svg)
    svg = re.sub("|".join(DARK), lambda color: DARK[color.group()], svg)
    return svg.replace("</style>", f"text{{fill: {DARK[INK]}}}</style>", 1)


def table_rows(file: str) -> Iterable[list[str]]:
    """The cells of the Markdown tables of a file in `benchmarks/results`, row by row, headings among them."""
    for line in (RESULTS / file).read_text().splitlines():
        if line.startswith("|") and not line.startswith("|---"):
            yield [cell.strip() for cell in line.strip("|").split("|")]
