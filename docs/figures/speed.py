"""Bars of measured speed: ours and the fastest peer in the same run, from the committed tables."""

from pathlib import Path

import matplotlib.pyplot as plt
from style import BLUE, GREY, MUTED, save, table_rows

SHAPES = (
    ("B4 S8192 H16/16 D128 full", "full mask"),
    ("B4 S8192 H16/16 D128 causal", "causal"),
    ("B4 S8192 H32/8 D128 causal", "causal, GQA 32/8"),
    ("B4 S8192 H16/16 D128 causal, window 1024", "window of 1024"),
    ("B4 S8192 H16/16 D128 causal, cap 30", "soft cap"),
    ("B1 S32768 H16/16 D128 causal", "32k tokens, causal"),
    ("B1 S32768 H16/16 D128 causal, 22 packed", "22 packed sequences"),
)


def rates(column: int) -> dict[str, dict[str, float]]:
    """TFLOP/s by shape and side."""
    found: dict[str, dict[str, float]] = {}
    headings = 0
    for shape, side, *cells in table_rows("flash_attention_gpu.md"):
        headings += shape == "shape"
        if headings > 1:  # later tables are other runs, whose rows must not be compared with these
            break
        if cells[column].isdigit():
            found.setdefault(shape, {})[side] = float(cells[column])
    return found


def panel(axes: object, column: int, title: str) -> None:
    """One pass: our fastest bar beside the fastest peer's."""
    measured = rates(column)
    for i, (shape, _) in enumerate(SHAPES):
        ours = measured[shape]["ejkernel auto"]
        name, peer = max(((s, x) for s, x in measured[shape].items() if "ejkernel" not in s), key=lambda side: side[1])
        axes.barh(i - 0.2, ours, 0.38, color=BLUE, label="ejkernel" if not i else None)
        axes.barh(i + 0.2, peer, 0.38, color=GREY, label="fastest peer" if not i else None)
        axes.text(ours - 8, i - 0.2, f"{ours:.0f}", va="center", ha="right", fontsize=9, color="white")
        axes.text(peer - 8, i + 0.2, f"{peer:.0f}  {name}", va="center", ha="right", fontsize=9)
    axes.set(title=title, xlabel="TFLOP/s", yticks=range(len(SHAPES)), yticklabels=[name for _, name in SHAPES])
    axes.spines[["top", "right"]].set_visible(False)


def draw(folder: Path) -> None:
    """Flash attention on an H200, forward and with gradients."""
    figure, panels = plt.subplots(1, 2, figsize=(10, 4.8), sharey=True)
    panel(panels[0], 1, "forward")
    panels[0].invert_yaxis()  # shared
    panel(panels[1], 3, "forward and backward")
    figure.legend(*panels[0].get_legend_handles_labels(), loc="lower left", ncols=2, frameon=False)
    figure.text(
        0.99,
        0.02,
        "H200, bfloat16, JAX 0.11.2; benchmarks/tiled_attention/flash_attention_gpu.py",
        ha="right",
        fontsize=9,
        color=MUTED,
    )
    figure.tight_layout(rect=(0, 0.06, 1, 1))
    save(figure, "speed", folder)
