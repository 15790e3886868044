"""Lines of native sparse attention's measured time by length, beside dense attention, from the committed tables."""

from pathlib import Path

import matplotlib.pyplot as plt
from style import BLUE, GREY, LIGHT_BLUE, MUTED, save, table_rows

SIDES = (
    ("selected", "ejkernel triton", LIGHT_BLUE, "selected branch"),
    ("all", "ejkernel triton", BLUE, "all three branches"),
    ("all", "dense causal flash_attention", GREY, "dense causal flash attention"),
)


def times(column: int) -> dict[tuple[str, str], list[tuple[int, float]]]:
    """(tokens, ms) by branches and side."""
    found: dict[tuple[str, str], dict[int, float]] = {}
    for shape, side, *cells in table_rows("native_sparse_attention_gpu.md"):
        if shape != "shape":
            branches, tokens = shape.split(",")[0], int(shape.split(" S")[1].split()[0])
            found.setdefault((branches, side), {})[tokens] = float(cells[column])
    # Dense attention was timed beside either.
    dense = "dense causal flash_attention"
    found["all", dense] = found["selected", dense] | found["all", dense]
    return {key: sorted(measured.items()) for key, measured in found.items()}


def panel(axes: object, column: int, title: str) -> None:
    """One pass."""
    measured = times(column)
    for branches, side, color, label in SIDES:
        tokens, ms = zip(*measured[branches, side], strict=True)
        axes.plot(tokens, ms, marker="o", color=color, label=label, linewidth=2)
        axes.annotate(f"{ms[-1]:.3g}", (tokens[-1], ms[-1]), (4, 4), textcoords="offset points", fontsize=9)
    axes.set(title=title, xlabel="tokens", ylabel="ms", xscale="log", yscale="log")
    ticks = [tokens for tokens, _ in measured["selected", "ejkernel triton"]]
    axes.set_xticks(ticks, [f"{n // 1024}k" for n in ticks], minor=False)
    axes.minorticks_off()
    axes.set_yticks(marks := [2, 5, 10, 20, 50, 100], [str(mark) for mark in marks])
    axes.set_ylim(1.4, 150)
    axes.grid(axis="y", color=GREY, linewidth=0.5)
    axes.spines[["top", "right"]].set_visible(False)


def draw(folder: Path) -> None:
    """Native sparse attention on an H200, forward and with gradients."""
    figure, panels = plt.subplots(1, 2, figsize=(10, 4.8))
    panel(panels[0], 0, "forward")
    panel(panels[1], 2, "forward and backward")
    figure.legend(
        *panels[0].get_legend_handles_labels(), loc="lower center", bbox_to_anchor=(0.5, 0.01), ncols=3, frameon=False
    )
    script = "benchmarks/selected_attention/native_sparse_attention_gpu.py"
    source = f"H200, bfloat16, 64/4 heads of 128, 16 blocks of 64; {script}"
    figure.text(0.99, -0.03, source, ha="right", fontsize=9, color=MUTED)
    figure.tight_layout(rect=(0, 0.06, 1, 1))
    save(figure, "sparse", folder)
