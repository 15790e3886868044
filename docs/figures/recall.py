"""Losses of the layers of `examples/layers.py` while they learn to recall, from the committed table."""

import math
from pathlib import Path

import matplotlib.pyplot as plt
from style import BLUE, GREEN, MUTED, ORANGE, RED, save, table_rows

LAYERS = {
    "mamba2": ("Mamba-2", ORANGE),
    "gla": ("GLA", GREEN),
    "gated_delta": ("gated delta", BLUE),
    "kda": ("KDA", RED),
}
STYLES = ("-", "--", "-.", ":")  # the curves can be told apart without their colors
GUESS = math.log(16)


def draw(folder: Path) -> None:
    """Loss by step, on a logarithmic axis."""
    (_, *names), *rows = table_rows("layers_recall_cpu.md")
    steps = [int(row[0]) for row in rows]
    figure, axes = plt.subplots(figsize=(9, 4))
    for n, name in enumerate(names):
        label, color = LAYERS[name]
        losses = [float(row[n + 1]) for row in rows]
        axes.semilogy(steps, losses, color=color, linestyle=STYLES[n], linewidth=2, label=label)
    axes.axhline(GUESS, color=MUTED, linewidth=1)
    axes.text(steps[-1], GUESS * 1.1, "a guess", ha="right", fontsize=9.5, color=MUTED)
    axes.set(xlabel="training step", ylabel="loss of the answers", xlim=(0, steps[-1]), ylim=(1e-3, 6))
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(frameon=False)
    source = "2 cores of a CPU, float32; python examples/layers.py --steps 300"
    figure.text(0.99, 0.01, source, ha="right", fontsize=8.5, color=MUTED)
    figure.tight_layout(rect=(0, 0.03, 1, 1))
    save(figure, "recall", folder)
