"""Bars of the grouped matmul's measured speed: ours and PyTorch's in the same run, from the committed table."""

from pathlib import Path

import matplotlib.pyplot as plt
from style import BLUE, GREY, LIGHT_BLUE, MUTED, save, table_rows

SIDES = (
    ("ejkernel pallas", BLUE, "ejkernel, Mosaic GPU"),
    ("ejkernel triton", LIGHT_BLUE, "ejkernel, Triton"),
    ("torch._grouped_mm", GREY, "PyTorch"),
)


def rates() -> dict[str, dict[str, dict[str, float]]]:
    """TFLOP/s by pass, shape and side, of the file's first table."""
    found: dict[str, dict[str, dict[str, float]]] = {}
    headings = 0
    for shape, kind, side, *_, rate in table_rows("grouped_matmul_gpu.md"):
        headings += shape == "shape"
        if headings > 1:  # later tables are other runs
            break
        if rate.endswith("TFLOP/s"):
            found.setdefault(kind, {}).setdefault(shape, {})[side] = float(rate.split()[0])
    return found


def panel(axes: object, shapes: dict[str, dict[str, float]], title: str) -> None:
    """One pass."""
    sides = [side for side in SIDES if any(side[0] in measured for measured in shapes.values())]
    for i, measured in enumerate(shapes.values()):
        for place, (side, color, label) in enumerate(sides):
            if side in measured:
                at, rate = i + (place - (len(sides) - 1) / 2) * 0.27, measured[side]
                axes.barh(at, rate, 0.25, color=color, label=None if i else label)
                ink = "white" if color == BLUE else "black"
                axes.text(rate - 8, at, f"{rate:.0f}", va="center", ha="right", fontsize=9, color=ink)
    names = [shape.replace(" M", "\nM", 1) for shape in shapes]
    axes.set(title=title, xlabel="TFLOP/s", yticks=range(len(names)), yticklabels=names)
    axes.spines[["top", "right"]].set_visible(False)


def draw(folder: Path) -> None:
    """The expert products of known models on an H200, forward and with both gradients."""
    measured = rates()
    figure, panels = plt.subplots(1, 2, figsize=(9.5, 7.5), sharey=True)
    panel(panels[0], measured["forward"], "forward")
    panels[0].invert_yaxis()  # shared
    panel(panels[1], measured["all three"], "forward and both gradients")
    figure.legend(
        *panels[0].get_legend_handles_labels(), loc="lower center", bbox_to_anchor=(0.5, 0.01), ncols=3, frameon=False
    )
    source = "H200, bfloat16, JAX 0.11.2; benchmarks/grouped_matmul/grouped_matmul_gpu.py"
    figure.text(0.99, -0.015, source, ha="right", fontsize=9, color=MUTED)
    figure.tight_layout(rect=(0, 0.05, 1, 1))
    save(figure, "experts", folder)
